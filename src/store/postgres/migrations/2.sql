-- Several nodes are at work at once. `trees.owner`, `agent` and `session` are those of the root. `permit` is 2 for a tree that may
-- run, 1 for one that waits for a permit, 0 for one that waits for a person; `returned` if it had a permit before. `labels` are
-- those that a node needs to drive the tree, null for none; `nodes.labels` those that a node has. `unserved_at` is when no node was seen to have them.
-- `sessions` has the newest run of each session: its runs are accepted one after the other, in the order of their ids.
-- `permit_turns` has in which order the keys (empty: without keys) were given their last permits. Who gives permits locks the row of
-- `permit_lock` first.

ALTER TABLE trees
  ADD COLUMN owner text COLLATE "C",
  ADD COLUMN agent text COLLATE "C",
  ADD COLUMN session bytea,
  ADD COLUMN permit bigint NOT NULL DEFAULT 2,
  ADD COLUMN returned boolean NOT NULL DEFAULT false,
  ADD COLUMN labels text[],
  ADD COLUMN unserved_at timestamptz;
ALTER TABLE nodes ADD COLUMN labels text[] NOT NULL DEFAULT '{}';
UPDATE trees t SET owner = r.owner, agent = r.agent, session = r.session,
  permit = CASE r.status WHEN 'queued' THEN 1 WHEN 'waiting' THEN 0 ELSE 2 END
  FROM runs r WHERE r.id = t.root;
CREATE INDEX trees_session ON trees (session, root) WHERE session IS NOT NULL;
CREATE INDEX trees_labels ON trees (root) WHERE labels IS NOT NULL;
CREATE TABLE sessions (
  owner text COLLATE "C" NOT NULL,
  name bytea NOT NULL,
  last_run uuid NOT NULL,
  PRIMARY KEY (owner, name)
) WITH (fillfactor = 50);
INSERT INTO sessions (owner, name, last_run)
  SELECT DISTINCT ON (coalesce(owner, ''), session) coalesce(owner, ''), session, id FROM runs
  WHERE session IS NOT NULL AND parent IS NULL ORDER BY coalesce(owner, ''), session, id DESC;
CREATE TABLE permit_turns (owner text COLLATE "C" PRIMARY KEY, turn bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE permit_lock (id bigint PRIMARY KEY);
INSERT INTO permit_lock (id) VALUES (1);

-- `memory` has what agents remember; `owner` is the key, empty without keys or if all keys share it. A run has one entry, that of a
-- copied file has no run.

CREATE TABLE memory (
  agent text COLLATE "C" NOT NULL,
  owner text COLLATE "C" NOT NULL,
  id bigint GENERATED ALWAYS AS IDENTITY,
  run uuid UNIQUE,
  entry bytea NOT NULL,
  PRIMARY KEY (agent, owner, id)
);

-- Requests to runs that another node drives. The owner of the tree performs them and writes the answer.
CREATE TABLE requests (
  id uuid PRIMARY KEY,
  number bigint GENERATED ALWAYS AS IDENTITY,
  root uuid NOT NULL,
  run uuid NOT NULL,
  asker uuid NOT NULL,
  kind text NOT NULL,
  body bytea NOT NULL,
  blobs bytea[] NOT NULL,
  is_taken boolean NOT NULL DEFAULT false,
  answer bytea,
  created timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX requests_open ON requests (root, number) WHERE answer IS NULL;

-- `duties` says which node does what is done once for all. A duty whose node has no row in `nodes` is free.

CREATE TABLE duties (name text COLLATE "C" PRIMARY KEY, node uuid) WITH (fillfactor = 50);
INSERT INTO duties (name) VALUES ('leader');
