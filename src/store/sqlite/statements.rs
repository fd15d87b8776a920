//! The writer's SQL, prepared once. A change of a run touches no row where the run has ended or is not there.

use rusqlite::{Connection, Statement};

/// The run and the body of the idempotency key `?1`, `?2`, `?3` as of the time `?4`.
pub const FIND_CLAIM: &str = "SELECT run, body FROM claims \
     WHERE credential = ?1 AND route = ?2 AND key = ?3 AND expires > ?4 \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = run)";

/// The writer's statements; their parameters stand in the order of their columns.
pub struct Statements<'c> {
    /// Begins a batch.
    pub begin: Statement<'c>,
    /// Commits it.
    pub commit: Statement<'c>,
    /// Writes something.
    pub write_check: Statement<'c>,
    /// A new record.
    pub insert_run: Statement<'c>,
    /// What an idempotency key has accepted, unless it has expired.
    pub find_claim: Statement<'c>,
    /// A new idempotency key, or an expired one anew.
    pub upsert_claim: Statement<'c>,
    /// Removes a few expired idempotency keys.
    pub delete_expired_claims: Statement<'c>,
    /// A definition with the run that has it; of one that is there, that it has more than one.
    pub upsert_definition: Statement<'c>,
    /// A large input.
    pub insert_text: Statement<'c>,
    /// A label of a new record.
    pub insert_label: Statement<'c>,
    /// It left the queue.
    pub start_run: Statement<'c>,
    /// It waits for a person's word.
    pub pause_run: Statement<'c>,
    /// It waits no longer.
    pub unpause_run: Statement<'c>,
    /// Another process goes on with it.
    pub resume_run: Statement<'c>,
    /// Only its last number changes.
    pub update_last_event: Statement<'c>,
    /// It is further.
    pub update_progress: Statement<'c>,
    /// It began a tool call.
    pub count_tool_call: Statement<'c>,
    /// It was asked to stop.
    pub request_cancel: Statement<'c>,
    /// It ended.
    pub finish_run: Statement<'c>,
    /// Events and steps of a write.
    pub insert_entry: Statement<'c>,
    /// Bytes with a digest, unless they are there.
    pub insert_attachment: Statement<'c>,
    /// Whether there are bytes with a digest.
    pub has_attachment: Statement<'c>,
    /// A run that has bytes in its record, if they are there.
    pub insert_attachment_use: Statement<'c>,
    /// One of the digests of a run.
    pub find_attachment_use: Statement<'c>,
    /// A run has these bytes no more.
    pub delete_attachment_use: Statement<'c>,
    /// Removes bytes that no run has, and tells how many they were.
    pub delete_attachment: Statement<'c>,
    /// A delivery, due at once.
    pub insert_delivery: Statement<'c>,
    /// A try of a delivery; it stays due where it was sent again since the try began.
    pub record_attempt: Statement<'c>,
    /// A delivery is due again.
    pub resend_delivery: Statement<'c>,
    /// A tree's last number; no row where there is no such root.
    pub last_seq: Statement<'c>,
    /// Whether there is such a run.
    pub has_run: Statement<'c>,
    /// Whether there is such a root.
    pub has_root: Statement<'c>,
    /// Marks a root whose tree is to be removed.
    pub mark_deletion: Statement<'c>,
    /// Whether a tree is being removed.
    pub has_deletion: Statement<'c>,
    /// Its root is gone.
    pub unmark_deletion: Statement<'c>,
    /// A child of a run.
    pub find_child: Statement<'c>,
    /// A run's labels and definition, and how many bytes of text it has.
    pub run_contents: Statement<'c>,
    /// Removes a label.
    pub delete_label: Statement<'c>,
    /// Removes a run's idempotency keys.
    pub delete_claims: Statement<'c>,
    /// Removes a run's deliveries.
    pub delete_deliveries: Statement<'c>,
    /// Removes a large input.
    pub delete_text: Statement<'c>,
    /// Removes a record.
    pub delete_run: Statement<'c>,
    /// A tree's last entries, with how many bytes of text they have.
    pub last_entries: Statement<'c>,
    /// Removes an entry.
    pub delete_entry: Statement<'c>,
    /// Removes a definition that no other run has had.
    pub delete_own_definition: Statement<'c>,
    /// Removes a few definitions that are older than every run that is left.
    pub delete_old_definitions: Statement<'c>,
    /// The oldest run's id.
    pub oldest_run: Statement<'c>,
}

impl<'c> Statements<'c> {
    /// Prepares them all.
    pub fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        let prepare = |text: &str| connection.prepare(text);
        Ok(Self {
            begin: prepare("BEGIN IMMEDIATE")?,
            commit: prepare("COMMIT")?,
            write_check: prepare("INSERT OR REPLACE INTO checks (id, at) VALUES (1, unixepoch())")?,
            insert_run: prepare(
                "INSERT INTO runs (id, root, parent, child, depth, status, agent, created_at, started_at, \
                 last_event, attempt, turns, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, \
                 model_calls, tool_calls, cost, unreported, model, stop_reason, agent_version, tool_call_id, label, \
                 completion_status, labels, cancel_reason, input, task, owner, definition, deadline_at, \
                 deadline_seconds, timeout, stream, webhook, session, workdir_device, workdir_inode) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, \
                 ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35, ?36, ?37, ?38, \
                 ?39, ?40)",
            )?,
            find_claim: prepare(FIND_CLAIM)?,
            upsert_claim: prepare(
                "INSERT OR REPLACE INTO claims (credential, route, key, run, body, expires) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?,
            // More than one, so that a heap of them gets smaller as new ones come.
            delete_expired_claims: prepare(
                "DELETE FROM claims WHERE id IN \
                 (SELECT id FROM claims WHERE expires <= ?1 ORDER BY expires LIMIT 4)",
            )?,
            upsert_definition: prepare(
                "INSERT INTO definitions (hash, body, used_until, only_run) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT (hash) DO UPDATE SET used_until = max(used_until, excluded.used_until), only_run = NULL",
            )?,
            insert_text: prepare("INSERT INTO texts (run, input, task) VALUES (?1, ?2, ?3)")?,
            insert_label: prepare("INSERT INTO labels (key, value, run) VALUES (?1, ?2, ?3)")?,
            start_run: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), started_at = coalesce(started_at, ?3), \
                 deadline_at = ?4, deadline_seconds = ?5, \
                 status = CASE status WHEN 'queued' THEN 'running' ELSE status END \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            pause_run: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), waiting_since = ?3, waiting_for = ?4, \
                 status = CASE status WHEN 'running' THEN 'waiting' ELSE status END \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            unpause_run: prepare(
                // Its deadline moves by the time that it stood still.
                "UPDATE runs SET last_event = max(last_event, ?2), waiting_since = NULL, waiting_for = NULL, \
                 waited = coalesce(waited, 0) + max(0, ?3 - coalesce(deadline_at, ?3)), deadline_at = ?3, \
                 deadline_seconds = ?4, status = CASE status WHEN 'waiting' THEN 'running' ELSE status END \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            resume_run: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), attempt = attempt + 1 \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            update_last_event: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2) WHERE id = ?1 AND finished_at IS NULL",
            )?,
            update_progress: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), turns = ?3, \
                 model = coalesce(nullif(?4, ''), model), stop_reason = ?5, input_tokens = ?6, output_tokens = ?7, \
                 cache_read_tokens = ?8, cache_write_tokens = ?9, model_calls = ?10, \
                 tool_calls = ?11, cost = ?12, unreported = ?13 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            count_tool_call: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), tool_calls = tool_calls + 1 \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            request_cancel: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), status = 'cancelling', \
                 cancel_reason = ?3 WHERE id = ?1 AND finished_at IS NULL AND status <> 'cancelling'",
            )?,
            finish_run: prepare(
                "UPDATE runs SET last_event = max(last_event, ?2), turns = ?3, \
                 model = coalesce(nullif(?4, ''), model), stop_reason = ?5, input_tokens = ?6, output_tokens = ?7, \
                 cache_read_tokens = ?8, cache_write_tokens = ?9, model_calls = ?10, tool_calls = ?11, cost = ?12, \
                 unreported = ?13, status = ?14, finished_at = ?15, content = ?16, partial_content = ?17, \
                 error = ?18, cancel_reason = ?19, tree_runs = ?20, tree_input_tokens = ?21, \
                 tree_output_tokens = ?22, tree_cache_read_tokens = ?23, tree_cache_write_tokens = ?24, \
                 tree_model_calls = ?25, tree_tool_calls = ?26, tree_cost = ?27, tree_unreported = ?28, \
                 structured = ?29, completion_status = coalesce(?30, completion_status) \
                 WHERE id = ?1 AND finished_at IS NULL",
            )?,
            insert_entry: prepare(
                "INSERT INTO entries (root, last_seq, run, count, events, steps) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?,
            insert_attachment: prepare(
                "INSERT OR IGNORE INTO attachments (hash, data) VALUES (?1, ?2)",
            )?,
            has_attachment: prepare("SELECT 1 FROM attachments WHERE hash = ?1")?,
            insert_attachment_use: prepare(
                "INSERT OR IGNORE INTO attachment_uses (run, hash) \
                 SELECT ?1, hash FROM attachments WHERE hash = ?2",
            )?,
            find_attachment_use: prepare(
                "SELECT hash FROM attachment_uses WHERE run = ?1 LIMIT 1",
            )?,
            delete_attachment_use: prepare(
                "DELETE FROM attachment_uses WHERE run = ?1 AND hash = ?2",
            )?,
            delete_attachment: prepare(
                "DELETE FROM attachments WHERE hash = ?1 \
                 AND NOT EXISTS (SELECT 1 FROM attachment_uses u WHERE u.hash = ?1) \
                 RETURNING octet_length(data)",
            )?,
            insert_delivery: prepare(
                "INSERT INTO deliveries (id, run, event, host, url, secret_env, body, status, created_at, since, \
                 tries, next_at, attempts, owner) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 'pending', ?8, ?8, 0, ?8, '[]', \
                 coalesce((SELECT owner FROM runs WHERE id = ?2), ''))",
            )?,
            record_attempt: prepare(
                "UPDATE deliveries SET status = iif(since = ?6, ?2, status), next_at = iif(since = ?6, ?3, next_at), \
                 tries = iif(since = ?6, tries + 1, tries), attempts = json_insert( \
                 CASE WHEN json_array_length(attempts) < ?5 THEN attempts ELSE json_remove(attempts, '$[0]') END, \
                 '$[#]', json(?4)) WHERE id = ?1",
            )?,
            resend_delivery: prepare(
                "UPDATE deliveries SET status = 'pending', next_at = ?3, since = ?3, tries = 0 \
                 WHERE id = ?1 AND run = ?2",
            )?,
            last_seq: prepare(
                "SELECT coalesce((SELECT last_seq FROM entries WHERE root = ?1 ORDER BY last_seq DESC LIMIT 1), 0) \
                 FROM runs WHERE id = ?1",
            )?,
            has_run: prepare("SELECT 1 FROM runs WHERE id = ?1")?,
            has_root: prepare("SELECT 1 FROM runs WHERE id = ?1 AND parent IS NULL")?,
            mark_deletion: prepare("INSERT OR IGNORE INTO deletions (root) VALUES (?1)")?,
            has_deletion: prepare("SELECT 1 FROM deletions WHERE root = ?1")?,
            unmark_deletion: prepare("DELETE FROM deletions WHERE root = ?1")?,
            find_child: prepare("SELECT id FROM runs WHERE parent = ?1 LIMIT 1")?,
            run_contents: prepare(
                "SELECT labels, definition, coalesce(octet_length(content), 0) + \
                 coalesce(octet_length(partial_content), 0) + \
                 coalesce((SELECT octet_length(t.input) FROM texts t WHERE t.run = id), 0) FROM runs WHERE id = ?1",
            )?,
            delete_label: prepare("DELETE FROM labels WHERE key = ?1 AND value = ?2 AND run = ?3")?,
            delete_claims: prepare("DELETE FROM claims WHERE run = ?1")?,
            delete_deliveries: prepare("DELETE FROM deliveries WHERE run = ?1")?,
            delete_text: prepare("DELETE FROM texts WHERE run = ?1")?,
            delete_run: prepare("DELETE FROM runs WHERE id = ?1")?,
            last_entries: prepare(
                "SELECT id, coalesce(octet_length(events), 0) + coalesce(octet_length(steps), 0) FROM entries \
                 WHERE root = ?1 ORDER BY last_seq DESC LIMIT ?2",
            )?,
            delete_entry: prepare("DELETE FROM entries WHERE id = ?1")?,
            delete_own_definition: prepare(
                "DELETE FROM definitions WHERE hash = ?1 AND only_run = ?2",
            )?,
            delete_old_definitions: prepare(
                "DELETE FROM definitions WHERE hash IN \
                 (SELECT hash FROM definitions WHERE used_until < ?1 LIMIT 32)",
            )?,
            oldest_run: prepare("SELECT min(id) FROM runs")?,
        })
    }
}
