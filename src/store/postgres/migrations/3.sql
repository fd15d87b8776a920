-- `nodes.agents` is the digest of the agents that a node has; null until it is known, and of a node of an older version.

ALTER TABLE nodes ADD COLUMN agents text COLLATE "C";
