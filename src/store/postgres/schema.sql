-- The tables are those of the other engine where nothing is said. Texts that clients and models may choose are `bytea`, because
-- `text` refuses U+0000; names that axed or its configuration checks are `text`, sorted by their bytes. Integers are `bigint`,
-- times are milliseconds since 1970 unless said otherwise.
--
-- `trees` has one row for each tree that has not ended: which node writes it, since how many owners (`epoch`), and the number of
-- its last event. Each write of a tree begins with an update of this row by node and epoch: its owner alone can write. Neither
-- `last_event` nor `epoch` is in an index, so that the updates stay in their page.
-- `nodes` has one row for each process that uses the database; it raises its `beat` while it can write.
-- `input_is_parts` says that an input is the JSON of its parts. Large values are moved out of their rows by the server itself.
-- `entries` has one row a write; its key is what a log is read by. `id` sorts those without events after the ones before them.
-- Sums of usage and of budgets have one row for each writer, which alone changes it; readers add them up.
-- `usage_series.digest` is that of the other values, which may be too long for an index.
--
-- Several nodes are at work at once. `trees.owner`, `agent` and `session` are those of the root. `permit` is 2 for a tree that may
-- run, 1 for one that waits for a permit, 0 for one that waits for a person; `returned` if it had a permit before. `labels` are
-- those that a node needs to drive the tree, null for none; `nodes.labels` those that a node has. `unserved_at` is when no node was seen to have them.
-- `sessions` has the newest run of each session: its runs are accepted one after the other, in the order of their ids.
-- `permit_turns` has in which order the keys (empty: without keys) were given their last permits. Who gives permits locks the row of
-- `permit_lock` first.
-- `nodes.agents` is the digest of the agents that a node has; null until it is known.

CREATE TABLE nodes (
  incarnation uuid PRIMARY KEY,
  id text NOT NULL,
  beat bigint NOT NULL,
  version text NOT NULL,
  labels text[] NOT NULL DEFAULT '{}',
  agents text COLLATE "C"
) WITH (fillfactor = 50);
CREATE TABLE trees (
  root uuid PRIMARY KEY,
  node uuid,
  epoch bigint NOT NULL,
  last_event bigint NOT NULL,
  owner text COLLATE "C",
  agent text COLLATE "C",
  session bytea,
  permit bigint NOT NULL DEFAULT 2,
  returned boolean NOT NULL DEFAULT false,
  labels text[],
  unserved_at timestamptz
) WITH (fillfactor = 50);
CREATE INDEX trees_session ON trees (session, root) WHERE session IS NOT NULL;
CREATE INDEX trees_labels ON trees (root) WHERE labels IS NOT NULL;
CREATE TABLE runs (
  id uuid PRIMARY KEY,
  root uuid NOT NULL,
  parent uuid,
  owner text COLLATE "C",
  child boolean NOT NULL,
  depth bigint NOT NULL,
  status text COLLATE "C" NOT NULL,
  agent text COLLATE "C" NOT NULL,
  created_at bigint NOT NULL,
  started_at bigint,
  finished_at bigint,
  last_event bigint NOT NULL,
  attempt bigint NOT NULL,
  turns bigint NOT NULL,
  input_tokens bigint NOT NULL,
  output_tokens bigint NOT NULL,
  cache_read_tokens bigint NOT NULL,
  cache_write_tokens bigint NOT NULL,
  model_calls bigint NOT NULL,
  tool_calls bigint NOT NULL,
  cost bigint,
  unreported bigint NOT NULL,
  tree_runs bigint,
  tree_input_tokens bigint,
  tree_output_tokens bigint,
  tree_cache_read_tokens bigint,
  tree_cache_write_tokens bigint,
  tree_model_calls bigint,
  tree_tool_calls bigint,
  tree_cost bigint,
  tree_unreported bigint,
  model bytea NOT NULL,
  stop_reason bytea,
  agent_version text NOT NULL,
  tool_call_id bytea,
  label bytea,
  completion_status text,
  labels text,
  definition bytea,
  deadline_at bigint,
  deadline_seconds bigint,
  timeout bigint,
  stream boolean NOT NULL,
  error bytea,
  cancel_reason bytea,
  input bytea NOT NULL,
  input_is_parts boolean NOT NULL,
  task bytea,
  partial_content bytea,
  content bytea,
  structured boolean,
  webhook text,
  waiting_for text,
  waiting_since bigint,
  waited bigint,
  warnings text,
  session bytea,
  workdir_device bigint,
  workdir_inode bigint,
  messages bigint NOT NULL,
  held boolean,
  model_usage text,
  fork text,
  variant text COLLATE "C"
) WITH (fillfactor = 80);
CREATE INDEX runs_children ON runs (parent, id) WHERE parent IS NOT NULL;
CREATE INDEX runs_unfinished ON runs (id) WHERE finished_at IS NULL;
CREATE INDEX runs_finished ON runs (status, child, id) INCLUDE (created_at, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_finished_by_agent ON runs (agent, status, child, id) INCLUDE (created_at, finished_at)
  WHERE finished_at IS NOT NULL;
CREATE INDEX runs_finished_by_owner ON runs (owner, status, child, id) INCLUDE (created_at, agent, finished_at)
  WHERE finished_at IS NOT NULL AND owner IS NOT NULL;
CREATE INDEX runs_session ON runs (session, id) WHERE session IS NOT NULL;
CREATE INDEX runs_session_names ON runs (owner, session, id) WHERE session IS NOT NULL;
CREATE INDEX runs_variant ON runs (agent, agent_version, variant, status, id) WHERE variant IS NOT NULL;
CREATE TABLE definitions (
  hash bytea PRIMARY KEY,
  body bytea NOT NULL,
  used_until bigint NOT NULL,
  only_run uuid
);
CREATE INDEX definitions_used ON definitions (used_until);
CREATE INDEX definitions_only_run ON definitions (only_run) WHERE only_run IS NOT NULL;
CREATE TABLE claims (
  credential text COLLATE "C" NOT NULL,
  route text COLLATE "C" NOT NULL,
  key bytea NOT NULL,
  run uuid NOT NULL,
  body bytea NOT NULL,
  expires bigint NOT NULL,
  message bigint,
  PRIMARY KEY (credential, route, key)
);
CREATE INDEX claims_expiry ON claims (expires);
CREATE INDEX claims_run ON claims (run);
CREATE TABLE labels (
  key bytea NOT NULL,
  value bytea NOT NULL,
  run uuid NOT NULL,
  PRIMARY KEY (key, value, run)
);
CREATE TABLE entries (
  root uuid NOT NULL,
  last_seq bigint NOT NULL,
  id bigint GENERATED ALWAYS AS IDENTITY,
  run uuid NOT NULL,
  count bigint NOT NULL,
  entries bytea,
  texts bytea,
  turns bytea,
  PRIMARY KEY (root, last_seq, id) INCLUDE (run)
);
CREATE TABLE checks (id bigint PRIMARY KEY, at bigint NOT NULL);
CREATE TABLE clock (id bigint PRIMARY KEY, lead bigint NOT NULL, lag bigint NOT NULL);
INSERT INTO clock (id, lead, lag) VALUES (1, 1000, 1000);
CREATE TABLE deletions (root uuid PRIMARY KEY);
CREATE TABLE attachments (hash bytea PRIMARY KEY, data bytea NOT NULL);
-- What was compressed before does not get smaller.
ALTER TABLE attachments ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE attachment_uses (run uuid NOT NULL, hash bytea NOT NULL, PRIMARY KEY (run, hash));
CREATE INDEX attachment_users ON attachment_uses (hash);
CREATE TABLE inputs (
  run uuid NOT NULL,
  seq bigint NOT NULL,
  root uuid NOT NULL,
  owner text COLLATE "C",
  call bytea NOT NULL,
  kind text NOT NULL,
  request text NOT NULL,
  wake bytea,
  received uuid,
  PRIMARY KEY (run, seq)
);
CREATE INDEX inputs_root ON inputs (root, run, seq);
CREATE INDEX inputs_owner ON inputs (owner, run, seq) WHERE owner IS NOT NULL;
CREATE INDEX inputs_wake ON inputs (wake) WHERE wake IS NOT NULL;
CREATE INDEX inputs_received ON inputs (received) WHERE received IS NOT NULL;
CREATE TABLE world_events (
  id uuid PRIMARY KEY,
  owner text COLLATE "C" NOT NULL,
  wake bytea NOT NULL,
  client_id bytea,
  data bytea NOT NULL,
  at bigint NOT NULL,
  woken bigint NOT NULL
);
CREATE INDEX world_events_owner ON world_events (owner, at);
CREATE INDEX world_events_wake ON world_events (wake, at);
CREATE UNIQUE INDEX world_events_client_id ON world_events (owner, client_id) WHERE client_id IS NOT NULL;
CREATE TABLE event_receipts (event uuid NOT NULL, run uuid NOT NULL, PRIMARY KEY (event, run));
CREATE TABLE event_locks (id bigint PRIMARY KEY);
INSERT INTO event_locks SELECT generate_series(0, 63);
CREATE TABLE deliveries (
  id uuid PRIMARY KEY,
  run uuid NOT NULL,
  event text NOT NULL,
  host text COLLATE "C" NOT NULL,
  url bytea NOT NULL,
  secret_env text,
  body bytea NOT NULL,
  status text NOT NULL,
  created_at bigint NOT NULL,
  since bigint NOT NULL,
  tries bigint NOT NULL,
  next_at bigint,
  attempts text[] NOT NULL,
  owner text COLLATE "C" NOT NULL,
  push bytea
);
CREATE INDEX deliveries_run ON deliveries (run, id);
CREATE INDEX deliveries_due ON deliveries (owner, host, next_at, id) WHERE next_at IS NOT NULL;
CREATE TABLE push_configs (
  run uuid NOT NULL,
  id bytea NOT NULL,
  url bytea NOT NULL,
  context bytea NOT NULL,
  token bytea,
  scheme bytea,
  credentials bytea,
  PRIMARY KEY (run, id)
);
CREATE TABLE usage_series (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  digest bytea NOT NULL UNIQUE,
  owner text NOT NULL,
  session bytea NOT NULL,
  labels text NOT NULL,
  agent text NOT NULL,
  model bytea NOT NULL,
  last_day bigint NOT NULL
);
CREATE INDEX usage_series_days ON usage_series (last_day);
CREATE TABLE usage_values (
  owner text COLLATE "C" NOT NULL,
  name bytea NOT NULL,
  value bytea NOT NULL,
  last_day bigint NOT NULL,
  PRIMARY KEY (owner, name, value)
);
CREATE INDEX usage_values_days ON usage_values (last_day);
CREATE TABLE usage_quarters (
  start bigint NOT NULL,
  series bigint NOT NULL,
  writer uuid NOT NULL,
  sums bytea NOT NULL,
  PRIMARY KEY (start, series, writer)
) WITH (fillfactor = 70);
CREATE TABLE usage_days (
  start bigint NOT NULL,
  series bigint NOT NULL,
  writer uuid NOT NULL,
  sums bytea NOT NULL,
  PRIMARY KEY (start, series, writer)
) WITH (fillfactor = 70);
CREATE TABLE budget_usage (
  budget text COLLATE "C" NOT NULL,
  quarter bigint NOT NULL,
  writer uuid NOT NULL,
  tokens bigint NOT NULL,
  cost bigint NOT NULL,
  PRIMARY KEY (budget, quarter, writer)
) WITH (fillfactor = 50);
CREATE TABLE budget_alerts (
  budget text COLLATE "C" NOT NULL,
  period bigint NOT NULL,
  share bigint NOT NULL,
  PRIMARY KEY (budget, period, share)
);
CREATE TABLE schedules (
  agent text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  times text NOT NULL,
  handled_at bigint NOT NULL,
  held_at bigint,
  is_paused boolean NOT NULL,
  last_at bigint,
  last_run uuid,
  last_eval uuid,
  error bytea,
  PRIMARY KEY (agent, name)
);
CREATE TABLE rollouts (
  agent text COLLATE "C" NOT NULL,
  candidate text COLLATE "C" NOT NULL,
  started_at bigint NOT NULL,
  baseline bytea NOT NULL,
  percent bigint,
  file_percent bigint,
  stopped_at bigint,
  loss bytea,
  promoted_at bigint,
  promoted_from text,
  promoted_version text,
  promoted_text bytea,
  fixed_at bigint,
  PRIMARY KEY (agent, candidate)
);
CREATE TABLE scores (
  run uuid NOT NULL,
  name text COLLATE "C" NOT NULL,
  author text COLLATE "C" NOT NULL,
  value bigint,
  label text COLLATE "C",
  comment bytea,
  turn bigint,
  at bigint NOT NULL,
  revision bigint NOT NULL,
  day bigint NOT NULL,
  series uuid,
  PRIMARY KEY (run, name, author)
);
CREATE INDEX scores_name ON scores (name, run);
CREATE TABLE scorings (
  run uuid NOT NULL,
  scorer text COLLATE "C" NOT NULL,
  PRIMARY KEY (run, scorer)
);
CREATE TABLE score_series (
  id uuid PRIMARY KEY,
  owner text COLLATE "C" NOT NULL,
  agent text COLLATE "C" NOT NULL,
  version text NOT NULL,
  variant text NOT NULL,
  labels text NOT NULL,
  name text COLLATE "C" NOT NULL
);
CREATE INDEX score_series_owner ON score_series (owner);
CREATE TABLE score_sums (
  day bigint NOT NULL,
  series uuid NOT NULL,
  label text COLLATE "C" NOT NULL,
  n bigint NOT NULL,
  sum_2 bigint NOT NULL,
  sum_1 bigint NOT NULL,
  sum_0 bigint NOT NULL,
  square_4 bigint NOT NULL,
  square_3 bigint NOT NULL,
  square_2 bigint NOT NULL,
  square_1 bigint NOT NULL,
  square_0 bigint NOT NULL,
  PRIMARY KEY (day, series, label)
) WITH (fillfactor = 70);
CREATE INDEX score_sums_series ON score_sums (series);
CREATE TABLE batches (
  id uuid PRIMARY KEY,
  agent text COLLATE "C" NOT NULL,
  owner text COLLATE "C",
  lines bigint NOT NULL,
  created_at bigint NOT NULL,
  finished_at bigint,
  cancel_reason bytea,
  body_hash bytea NOT NULL,
  key_owner text COLLATE "C",
  key bytea,
  key_expires bigint
);
CREATE UNIQUE INDEX batches_key ON batches (key_owner, agent, key) WHERE key IS NOT NULL;
CREATE INDEX batches_unfinished ON batches (id) WHERE finished_at IS NULL;
CREATE TABLE batch_lines (
  batch uuid NOT NULL,
  line bigint NOT NULL,
  body bytea,
  run uuid,
  problem bytea,
  PRIMARY KEY (batch, line)
);
-- Evaluations, their cases, and the runs of these that have started. Cases without an evaluation are those of a request that ended
-- early. `result` and `ending` are JSON; `reason` is also there while an evaluation is to be cancelled.
CREATE TABLE evals (
  id uuid NOT NULL PRIMARY KEY,
  owner text COLLATE "C",
  agent text COLLATE "C" NOT NULL,
  request bytea NOT NULL,
  definitions bytea NOT NULL,
  state text NOT NULL,
  planned bigint NOT NULL,
  ended bigint NOT NULL,
  spent bigint NOT NULL,
  created_at bigint NOT NULL,
  finished_at bigint,
  reason bytea,
  result bytea
);
CREATE INDEX evals_unfinished ON evals (id) WHERE finished_at IS NULL;
CREATE TABLE eval_cases (
  eval uuid NOT NULL,
  number bigint NOT NULL,
  id bytea NOT NULL,
  request bytea NOT NULL,
  expected bytea,
  source uuid,
  PRIMARY KEY (eval, number)
);
CREATE TABLE eval_runs (
  eval uuid NOT NULL,
  number bigint NOT NULL,
  repetition bigint NOT NULL,
  version bigint NOT NULL,
  run uuid,
  ending bytea,
  PRIMARY KEY (eval, number, repetition, version)
);
CREATE TABLE sessions (
  owner text COLLATE "C" NOT NULL,
  name bytea NOT NULL,
  last_run uuid NOT NULL,
  PRIMARY KEY (owner, name)
) WITH (fillfactor = 50);
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

-- What all nodes sign links and tickets for events with.
CREATE TABLE link_secret (id bigint PRIMARY KEY, secret bytea NOT NULL);
