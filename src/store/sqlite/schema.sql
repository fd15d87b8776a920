-- One row a run. Its indexes are partial, so that a run changes each of them once: `runs_unfinished` is small and a run leaves
-- it when it ends; a run enters the `runs_finished` ones when it ends, with its final status. `child` is 0 for a root and 1 for
-- other runs: a list has either the roots only or all runs. The index by owner is empty without API keys. The indexes contain
-- `finished_at`: otherwise SQLite checks their condition in the row of every run that a filter skips.
-- Inputs that are not small are in `texts`, because an update writes the whole row again. Whether the content is JSON that
-- matches the requested schema is in `structured`; `waited` is how many milliseconds the run was paused, `held` whether a client
-- has paused it; `model_usage` is the usage by model, if that is not all of its last model's; `fork` is what it took over from
-- another run. The numbers of the working directory are unsigned ones of 64 bits, stored as signed ones.
-- `variant` is which version a root run got whose agent has a rollout; `runs_variant` has these alone.
-- `runs_session` alone tells which run the next one of a session continues; `runs_session_names` sorts the sessions of a key.
CREATE TABLE runs (
  id BLOB NOT NULL PRIMARY KEY,
  root BLOB NOT NULL,
  parent BLOB,
  owner TEXT,
  child INTEGER NOT NULL,
  depth INTEGER NOT NULL,
  status TEXT NOT NULL,
  agent TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  started_at INTEGER,
  finished_at INTEGER,
  last_event INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  turns INTEGER NOT NULL,
  input_tokens INTEGER NOT NULL,
  output_tokens INTEGER NOT NULL,
  cache_read_tokens INTEGER NOT NULL,
  cache_write_tokens INTEGER NOT NULL,
  model_calls INTEGER NOT NULL,
  tool_calls INTEGER NOT NULL,
  cost INTEGER,
  unreported INTEGER NOT NULL,
  tree_runs INTEGER,
  tree_input_tokens INTEGER,
  tree_output_tokens INTEGER,
  tree_cache_read_tokens INTEGER,
  tree_cache_write_tokens INTEGER,
  tree_model_calls INTEGER,
  tree_tool_calls INTEGER,
  tree_cost INTEGER,
  tree_unreported INTEGER,
  model TEXT NOT NULL,
  stop_reason TEXT,
  agent_version TEXT NOT NULL,
  tool_call_id TEXT,
  label TEXT,
  completion_status TEXT,
  labels TEXT,
  definition BLOB,
  deadline_at INTEGER,
  deadline_seconds INTEGER,
  timeout INTEGER,
  stream INTEGER,
  error TEXT,
  cancel_reason TEXT,
  input TEXT,
  task TEXT,
  partial_content TEXT,
  content TEXT,
  webhook TEXT,
  structured INTEGER,
  waiting_since INTEGER,
  session TEXT,
  waited INTEGER,
  workdir_device INTEGER,
  workdir_inode INTEGER,
  waiting_for TEXT,
  warnings TEXT,
  messages INTEGER NOT NULL,
  model_usage TEXT,
  held INTEGER,
  fork TEXT,
  variant TEXT
) WITHOUT ROWID;
CREATE INDEX runs_children ON runs (parent, id) WHERE parent IS NOT NULL;
CREATE INDEX runs_unfinished ON runs (id) WHERE finished_at IS NULL;
CREATE INDEX runs_finished_by_owner ON runs (owner, status, child, id, created_at, agent, finished_at)
  WHERE finished_at IS NOT NULL AND owner IS NOT NULL;
CREATE INDEX runs_finished ON runs (status, child, id, created_at, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_session ON runs (session, owner, id, agent, status) WHERE session IS NOT NULL;
CREATE INDEX runs_finished_by_agent ON runs (agent, status, child, id, created_at, finished_at)
  WHERE finished_at IS NOT NULL;
CREATE INDEX runs_session_names ON runs (owner, session, id) WHERE session IS NOT NULL;
CREATE INDEX runs_variant ON runs (agent, agent_version, variant, status, id) WHERE variant IS NOT NULL;
CREATE TABLE texts (
  run BLOB NOT NULL PRIMARY KEY,
  input TEXT NOT NULL,
  task TEXT
) WITHOUT ROWID;
CREATE TABLE labels (
  key TEXT NOT NULL,
  value TEXT NOT NULL,
  run BLOB NOT NULL,
  PRIMARY KEY (key, value, run)
) WITHOUT ROWID;

-- One row for each content that a run was accepted with; the key is its SHA-256. Turns keep texts here that several runs send.
-- `used_until` is the latest time at which a run was accepted with it (milliseconds, as in the ids of runs); `only_run` is the
-- run that uses it while there is only one. An index of the runs by definition would slow down every accepted run.
CREATE TABLE definitions (
  hash BLOB NOT NULL PRIMARY KEY,
  body TEXT NOT NULL,
  used_until INTEGER NOT NULL,
  only_run BLOB
) WITHOUT ROWID;
CREATE INDEX definitions_used ON definitions (used_until);
CREATE INDEX definitions_only_run ON definitions (only_run) WHERE only_run IS NOT NULL;

-- One row a write: the entries that it added to the record of its run, a JSON array, with the long texts of these beside them
-- (`src/record/stored.rs`), and what it added to the run's turns. `count` is the number of their events. `last_seq` is the number of the tree's last event after the write. The table is
-- append-only with a separate index, because SQLite is slow with rows of this size in a clustered table: a third more runs a
-- second.
CREATE TABLE entries (
  id INTEGER PRIMARY KEY,
  root BLOB NOT NULL,
  last_seq INTEGER NOT NULL,
  run BLOB NOT NULL,
  count INTEGER NOT NULL,
  entries TEXT,
  texts TEXT,
  turns BLOB
);
CREATE INDEX entries_log ON entries (root, last_seq, run);

-- One row for each idempotency key; `message` is which message of the run it belongs to, null for the run itself.
CREATE TABLE claims (
  id INTEGER PRIMARY KEY,
  credential TEXT NOT NULL,
  route TEXT NOT NULL,
  key TEXT NOT NULL,
  run BLOB NOT NULL,
  body BLOB NOT NULL,
  expires INTEGER NOT NULL,
  message INTEGER,
  UNIQUE (credential, route, key)
);
CREATE INDEX claims_expiry ON claims (expires);
CREATE INDEX claims_run ON claims (run);

-- One row for each event that is sent to a webhook. `deliveries_due` has only pending ones: `next_at` is null after a delivery
-- has succeeded or was given up. `attempts` is a JSON array, `owner` the key of the run, empty without one: owners take turns.
-- `push` is the id of the configuration that it is for.
CREATE TABLE deliveries (
  id BLOB NOT NULL PRIMARY KEY,
  run BLOB NOT NULL,
  event TEXT NOT NULL,
  host TEXT NOT NULL,
  url TEXT NOT NULL,
  secret_env TEXT,
  body TEXT NOT NULL,
  status TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  since INTEGER NOT NULL,
  tries INTEGER NOT NULL,
  next_at INTEGER,
  attempts TEXT NOT NULL,
  owner TEXT NOT NULL,
  push TEXT
) WITHOUT ROWID;
CREATE INDEX deliveries_run ON deliveries (run, id);
CREATE INDEX deliveries_due ON deliveries (owner, host, next_at) WHERE next_at IS NOT NULL;
CREATE TABLE push_configs (
  run BLOB NOT NULL,
  id TEXT NOT NULL,
  url TEXT NOT NULL,
  context TEXT NOT NULL,
  token TEXT,
  scheme TEXT,
  credentials TEXT,
  PRIMARY KEY (run, id)
) WITHOUT ROWID;

-- What runs wait for: people, times and events; with the number of the event that requests it. A row is removed with the answer, or with
-- the end of its run.
CREATE TABLE inputs (
  run BLOB NOT NULL,
  seq INTEGER NOT NULL,
  root BLOB NOT NULL,
  owner TEXT,
  call TEXT NOT NULL,
  kind TEXT NOT NULL,
  request TEXT NOT NULL,
  wake TEXT,
  received BLOB,
  PRIMARY KEY (run, seq)
) WITHOUT ROWID;
CREATE INDEX inputs_root ON inputs (root);
CREATE INDEX inputs_owner ON inputs (owner) WHERE owner IS NOT NULL;
CREATE INDEX inputs_wake ON inputs (wake) WHERE wake IS NOT NULL;
CREATE INDEX inputs_received ON inputs (received) WHERE received IS NOT NULL;

-- Events of the world outside, which runs of the same owner wait for ('' without keys), and which runs have received them. `woken`
-- counts those that did when it came. An event with an id of its client stays longer, so that it counts once.
CREATE TABLE world_events (
  id BLOB NOT NULL PRIMARY KEY,
  owner TEXT NOT NULL,
  wake TEXT NOT NULL,
  client_id TEXT,
  data TEXT NOT NULL,
  at INTEGER NOT NULL,
  woken INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX world_events_owner ON world_events (owner, at);
CREATE INDEX world_events_wake ON world_events (wake, at);
CREATE UNIQUE INDEX world_events_client_id ON world_events (owner, client_id) WHERE client_id IS NOT NULL;
CREATE TABLE event_receipts (event BLOB NOT NULL, run BLOB NOT NULL, PRIMARY KEY (event, run)) WITHOUT ROWID;

-- The bytes of pictures and files, once for each digest, and which runs refer to them: the bytes are deleted with the last of
-- these. The table has an integer key, because SQLite stores large values well in such tables.
CREATE TABLE attachments (id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE attachment_uses (run BLOB NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (run, hash)) WITHOUT ROWID;
CREATE INDEX attachment_users ON attachment_uses (hash);

-- The roots whose trees are being deleted.
CREATE TABLE deletions (root BLOB NOT NULL PRIMARY KEY) WITHOUT ROWID;

-- The skew of the ids, see clock.rs: a small one, which hardly any run exceeds, so that searches by time read few ids.
CREATE TABLE clock (id INTEGER PRIMARY KEY, lead INTEGER NOT NULL, lag INTEGER NOT NULL);
INSERT INTO clock (id, lead, lag) VALUES (1, 20, 20);

-- The usage of ended runs. `usage_series` has the values that runs are counted under: empty texts stand for absent ones,
-- `last_day` is the last day (of 1970) on which a run had them. `usage_quarters` has one row for each series and quarter hour in
-- which roots were accepted, `usage_days` the same sums by day in UTC, so that a long period is read quickly. `usage_values` has
-- the distinct values of each owner, whose number is limited.
CREATE TABLE usage_series (
  id INTEGER PRIMARY KEY,
  owner TEXT NOT NULL,
  session TEXT NOT NULL,
  labels TEXT NOT NULL,
  agent TEXT NOT NULL,
  model TEXT NOT NULL,
  last_day INTEGER NOT NULL,
  UNIQUE (owner, session, labels, agent, model)
);
CREATE INDEX usage_series_days ON usage_series (last_day);
CREATE TABLE usage_values (
  owner TEXT NOT NULL,
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  last_day INTEGER NOT NULL,
  PRIMARY KEY (owner, name, value)
) WITHOUT ROWID;
CREATE INDEX usage_values_days ON usage_values (last_day);
CREATE TABLE usage_quarters (start INTEGER NOT NULL, series INTEGER NOT NULL, sums BLOB NOT NULL, PRIMARY KEY (start, series)) WITHOUT ROWID;
CREATE TABLE usage_days (start INTEGER NOT NULL, series INTEGER NOT NULL, sums BLOB NOT NULL, PRIMARY KEY (start, series)) WITHOUT ROWID;

-- What was charged to budgets over time, by the quarter hour in which replies were recorded, and the alerts that are recorded:
-- `period` is the first quarter hour of a budget's period, `share` is in thousandths.
CREATE TABLE budget_usage (
  budget TEXT NOT NULL,
  quarter INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  cost INTEGER NOT NULL,
  PRIMARY KEY (budget, quarter)
) WITHOUT ROWID;
CREATE TABLE budget_alerts (
  budget TEXT NOT NULL,
  period INTEGER NOT NULL,
  share INTEGER NOT NULL,
  PRIMARY KEY (budget, period, share)
) WITHOUT ROWID;

-- What is known of the schedules of agents. `times` is the cron and the zone that it is about; times in seconds.
CREATE TABLE schedules (
  agent TEXT NOT NULL,
  name TEXT NOT NULL,
  times TEXT NOT NULL,
  handled_at INTEGER NOT NULL,
  held_at INTEGER,
  is_paused INTEGER NOT NULL,
  last_at INTEGER,
  last_run BLOB,
  last_eval BLOB,
  error TEXT,
  PRIMARY KEY (agent, name)
) WITHOUT ROWID;

-- What is known of the candidates of agents: from when on runs and scores count, and the sums of scores at that time (`baseline`,
-- JSON); a share that replaces the file's, in thousandths of a percent; why the candidate was taken off (`loss`, JSON); and with which
-- text it became the current version, from which one. `fixed_at` is when the first node had another file than that.
CREATE TABLE rollouts (
  agent TEXT NOT NULL,
  candidate TEXT NOT NULL,
  started_at INTEGER NOT NULL,
  baseline TEXT NOT NULL,
  percent INTEGER,
  file_percent INTEGER,
  stopped_at INTEGER,
  loss TEXT,
  promoted_at INTEGER,
  promoted_from TEXT,
  promoted_version TEXT,
  promoted_text TEXT,
  fixed_at INTEGER,
  PRIMARY KEY (agent, candidate)
) WITHOUT ROWID;

-- Batches of runs and their lines. A line has its request until its run starts, or until a problem is known.
CREATE TABLE batches (
  id BLOB NOT NULL PRIMARY KEY,
  agent TEXT NOT NULL,
  owner TEXT,
  lines INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  finished_at INTEGER,
  cancel_reason TEXT,
  body_hash BLOB NOT NULL,
  key_owner TEXT,
  key TEXT,
  key_expires INTEGER
) WITHOUT ROWID;
CREATE UNIQUE INDEX batches_key ON batches (key_owner, agent, key) WHERE key IS NOT NULL;
CREATE INDEX batches_unfinished ON batches (id) WHERE finished_at IS NULL;
CREATE TABLE batch_lines (
  id INTEGER PRIMARY KEY,
  batch BLOB NOT NULL,
  line INTEGER NOT NULL,
  body TEXT,
  run BLOB,
  problem TEXT,
  UNIQUE (batch, line)
);
-- Evaluations, their cases, and the runs of these that have started. Cases without an evaluation are those of a request that ended
-- early. `result` and `ending` are JSON; `reason` is also there while an evaluation is to be cancelled.
CREATE TABLE evals (
  id BLOB NOT NULL PRIMARY KEY,
  owner TEXT,
  agent TEXT NOT NULL,
  request TEXT NOT NULL,
  definitions TEXT NOT NULL,
  state TEXT NOT NULL,
  planned INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  spent INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  finished_at INTEGER,
  reason TEXT,
  result TEXT
) WITHOUT ROWID;
CREATE INDEX evals_unfinished ON evals (id) WHERE finished_at IS NULL;
CREATE TABLE eval_cases (
  eval BLOB NOT NULL,
  number INTEGER NOT NULL,
  id TEXT NOT NULL,
  request TEXT NOT NULL,
  expected TEXT,
  source BLOB,
  PRIMARY KEY (eval, number)
) WITHOUT ROWID;
CREATE TABLE eval_runs (
  eval BLOB NOT NULL,
  number INTEGER NOT NULL,
  repetition INTEGER NOT NULL,
  version INTEGER NOT NULL,
  run BLOB,
  ending TEXT,
  PRIMARY KEY (eval, number, repetition, version)
) WITHOUT ROWID;
-- `scores` has one row for each run, name and author, who is empty without keys. `value` is in billionths, and null of a label;
-- `revision` counts how often it was replaced; `series` is null if it is not counted. `score_sums` has the counted ones by the
-- day (of 1970, in UTC) on which the root was accepted: how many, and their sums and sums of squares, in parts of six digits
-- (`src/store/scores.rs`). The id of a series is the beginning of the digest of its values.
CREATE TABLE scores (
  run BLOB NOT NULL,
  name TEXT NOT NULL,
  author TEXT NOT NULL,
  value INTEGER,
  label TEXT,
  comment TEXT,
  turn INTEGER,
  at INTEGER NOT NULL,
  revision INTEGER NOT NULL,
  day INTEGER NOT NULL,
  series BLOB,
  PRIMARY KEY (run, name, author)
) WITHOUT ROWID;
CREATE INDEX scores_name ON scores (name, run);
-- The runs that scorers have still to score.
CREATE TABLE scorings (
  run BLOB NOT NULL,
  scorer TEXT NOT NULL,
  PRIMARY KEY (run, scorer)
) WITHOUT ROWID;
CREATE TABLE score_series (
  id BLOB NOT NULL PRIMARY KEY,
  owner TEXT NOT NULL,
  agent TEXT NOT NULL,
  version TEXT NOT NULL,
  variant TEXT NOT NULL,
  labels TEXT NOT NULL,
  name TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX score_series_owner ON score_series (owner);
CREATE TABLE score_sums (
  day INTEGER NOT NULL,
  series BLOB NOT NULL,
  label TEXT NOT NULL,
  n INTEGER NOT NULL,
  sum_2 INTEGER NOT NULL,
  sum_1 INTEGER NOT NULL,
  sum_0 INTEGER NOT NULL,
  square_4 INTEGER NOT NULL,
  square_3 INTEGER NOT NULL,
  square_2 INTEGER NOT NULL,
  square_1 INTEGER NOT NULL,
  square_0 INTEGER NOT NULL,
  PRIMARY KEY (day, series, label)
) WITHOUT ROWID;
CREATE INDEX score_sums_series ON score_sums (series);

-- What links are signed with: one row, made when it is first needed.
CREATE TABLE link_secret (id INTEGER PRIMARY KEY, secret BLOB NOT NULL);
CREATE TABLE checks (id INTEGER PRIMARY KEY, at INTEGER NOT NULL);
