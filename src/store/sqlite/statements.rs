//! The writer's SQL, prepared once. A change of a run touches no row if the run has ended or does not exist.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use rusqlite::Connection;

#[cfg(doc)]
use crate::store::changes::Changes;
use crate::store::row_changes::{
    ENDED_COLUMNS, ENDED_ROOT_COLUMNS, NEW_COLUMNS, NEW_VALUES, RowChange, SET_LAST_EVENT,
};
use crate::store::run_queries::FIND_CLAIM;
use crate::store::sql::dialect::Dialect;
use crate::store::sqlite::prepared::PreparedStatement;

/// Declares a struct with one prepared statement a field.
macro_rules! statements {
    ($(#[$doc:meta])* pub struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $sql:expr,)* }) => {
        $(#[$doc])*
        pub struct $name<'c> {
            $($(#[$field_doc])* pub $field: PreparedStatement<'c>,)*
            /// By [`RowChange`].
            row_changes: Vec<PreparedStatement<'c>>,
            /// Those of [`Changes`].
            by_text: HashMap<&'static str, PreparedStatement<'c>>,
        }

        impl<'c> $name<'c> {
            pub fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
                Ok(Self {
                    $($field: PreparedStatement::new(connection, $sql)?,)*
                    row_changes: RowChange::ALL
                        .iter()
                        .map(|change| PreparedStatement::new(connection, &update_row(change)))
                        .collect::<rusqlite::Result<_>>()?,
                    by_text: HashMap::new(),
                })
            }
        }
    };
}

statements! {
    /// The writer's statements, in the order: transactions, new runs, changes of a run, the log, sessions, inputs,
    /// attachments, deliveries, deletions,
    /// batches, schedules, usage.
    pub struct Statements {
        begin: "BEGIN IMMEDIATE",
        commit: "COMMIT",
        write_check: "INSERT OR REPLACE INTO checks (id, at) VALUES (1, unixepoch())",
        insert_run: &Dialect::Sqlite.text(&format!("INSERT INTO runs ({NEW_COLUMNS}) VALUES ({NEW_VALUES})")),
        find_claim: FIND_CLAIM,
        /// A new idempotency key, or an expired one that is used again.
        upsert_claim: "INSERT OR REPLACE INTO claims (credential, route, key, run, body, expires, message) \
             VALUES (:credential, :route, :key, :run, :body, :expires, :message)",
        /// Removes several, so that a backlog shrinks while new ones arrive.
        delete_expired_claims: "DELETE FROM claims WHERE id IN \
             (SELECT id FROM claims WHERE expires <= :now ORDER BY expires LIMIT 4)",
        /// Inserts a definition with the one run that uses it. If it exists, marks it as used by more than one.
        upsert_definition: "INSERT INTO definitions (hash, body, used_until, only_run) \
             VALUES (:hash, :body, :used_until, :run) \
             ON CONFLICT (hash) DO UPDATE SET used_until = max(used_until, excluded.used_until), only_run = NULL",
        insert_text: "INSERT INTO texts (run, input, task) VALUES (:run, :input, :task)",
        insert_label: "INSERT INTO labels (key, value, run) VALUES (:key, :value, :run)",
        /// What is counted of an ended run. `RETURNING` would take twice as long as this.
        ended_run: &format!("SELECT {}, {ENDED_COLUMNS} FROM runs r WHERE r.id = :id", ENDED_ROOT_COLUMNS.replace("root.", "r.")),
        /// The list only grows: a shorter one is older.
        update_warnings: "UPDATE runs SET warnings = :warnings \
             WHERE id = :id AND coalesce(octet_length(warnings), 0) < octet_length(:warnings)",
        insert_entry: "INSERT INTO entries (root, last_seq, run, count, entries, texts, turns) \
             VALUES (:root, :last_seq, :run, :count, :entries, :texts, :turns)",
        /// The number of a tree's last event; no row if the root does not exist.
        last_seq: "SELECT coalesce((SELECT last_seq FROM entries WHERE root = :root ORDER BY last_seq DESC LIMIT 1), 0) \
             AS last_seq FROM runs WHERE id = :root",
        has_run: "SELECT 1 FROM runs WHERE id = :id",
        has_unfinished_run: "SELECT 1 FROM runs WHERE id = :id AND finished_at IS NULL",
        /// Whether a client can change the run.
        is_changeable: "SELECT 1 FROM runs WHERE id = :id AND finished_at IS NULL AND status <> 'cancelling'",
        /// The oldest runs of a session.
        session_runs: "SELECT id FROM runs INDEXED BY runs_session_names WHERE session IS NOT NULL AND owner IS :owner \
             AND session = :session ORDER BY id LIMIT :limit",
        forget_session: "UPDATE runs SET session = NULL WHERE id = :id",
        insert_input: "INSERT INTO inputs (run, seq, root, owner, call, kind, request, wake) \
             SELECT id, :seq, root, owner, :call, :kind, :request, :wake FROM runs WHERE id = :run",
        delete_input: "DELETE FROM inputs WHERE run = :run AND call = :call",
        delete_inputs: "DELETE FROM inputs WHERE run = :run",
        delete_scores: "DELETE FROM scores WHERE run = :run",
        insert_scoring: "INSERT OR IGNORE INTO scorings (run, scorer) VALUES (:run, :scorer)",
        delete_scorings: "DELETE FROM scorings WHERE run = :run",
        insert_attachment: "INSERT OR IGNORE INTO attachments (hash, data) VALUES (:hash, :data)",
        has_attachment: "SELECT 1 FROM attachments WHERE hash = :hash",
        /// Inserts nothing if the bytes do not exist.
        insert_attachment_use: "INSERT OR IGNORE INTO attachment_uses (run, hash) \
             SELECT :run, hash FROM attachments WHERE hash = :hash",
        find_attachment_use: "SELECT hash FROM attachment_uses WHERE run = :run LIMIT 1",
        delete_attachment_use: "DELETE FROM attachment_uses WHERE run = :run AND hash = :hash",
        /// Removes bytes that no run uses, and returns how many they were.
        delete_attachment: "DELETE FROM attachments WHERE hash = :hash \
             AND NOT EXISTS (SELECT 1 FROM attachment_uses u WHERE u.hash = :hash) \
             RETURNING octet_length(data) AS bytes",
        /// A delivery that is due at once.
        insert_delivery: "INSERT INTO deliveries (id, run, event, host, url, secret_env, body, status, created_at, since, \
             tries, next_at, attempts, owner) \
             VALUES (:id, :run, :event, :host, :url, :secret_env, :body, 'pending', :created_at, :created_at, \
             0, :created_at, '[]', coalesce((SELECT owner FROM runs WHERE id = :run), ''))",
        push_targets: "SELECT id, url FROM push_configs WHERE run = :run",
        insert_push_delivery: "INSERT INTO deliveries (id, run, event, host, url, body, status, created_at, since, \
             tries, next_at, attempts, owner, push) \
             VALUES (:id, :run, :event, :host, :url, '', 'pending', :created_at, :created_at, \
             0, :created_at, '[]', coalesce((SELECT owner FROM runs WHERE id = :run), ''), :push)",
        delete_push_configs: "DELETE FROM push_configs WHERE run = :run",
        has_root: "SELECT 1 FROM runs WHERE id = :id AND parent IS NULL",
        mark_deletion: "INSERT OR IGNORE INTO deletions (root) VALUES (:root)",
        has_deletion: "SELECT 1 FROM deletions WHERE root = :root",
        unmark_deletion: "DELETE FROM deletions WHERE root = :root",
        find_child: "SELECT id FROM runs WHERE parent = :parent LIMIT 1",
        /// A run's labels, and the number of bytes of its texts.
        run_contents: "SELECT labels, coalesce(octet_length(content), 0) + \
             coalesce(octet_length(partial_content), 0) + \
             coalesce((SELECT octet_length(t.input) FROM texts t WHERE t.run = id), 0) AS bytes FROM runs WHERE id = :id",
        delete_label: "DELETE FROM labels WHERE key = :key AND value = :value AND run = :run",
        delete_claims: "DELETE FROM claims WHERE run = :run",
        delete_deliveries: "DELETE FROM deliveries WHERE run = :run",
        delete_text: "DELETE FROM texts WHERE run = :run",
        delete_run: "DELETE FROM runs WHERE id = :run",
        /// A tree's last entries, with the number of bytes of their texts.
        last_entries: "SELECT id, coalesce(octet_length(entries), 0) + coalesce(octet_length(texts), 0) + \
             coalesce(octet_length(turns), 0) AS bytes \
             FROM entries WHERE root = :root ORDER BY last_seq DESC LIMIT :limit",
        delete_entry: "DELETE FROM entries WHERE id = :id",
        /// Removes definitions, and other shared texts, that only this run has used.
        delete_own_definitions: "DELETE FROM definitions WHERE only_run = :run",
        /// Removes a few definitions that were last used before the oldest run was accepted.
        delete_old_definitions: "DELETE FROM definitions WHERE hash IN \
             (SELECT hash FROM definitions WHERE used_until < :unused_before LIMIT 32)",
        oldest_run: "SELECT min(id) AS id FROM runs",
        /// What a root's row has for the usage of all runs of its tree.
        usage_root: "SELECT created_at, owner, session, labels FROM runs WHERE id = :id",
        upsert_usage_series: "INSERT INTO usage_series (owner, session, labels, agent, model, last_day) \
             VALUES (:owner, :session, :labels, :agent, :model, :day) \
             ON CONFLICT (owner, session, labels, agent, model) DO UPDATE SET last_day = max(last_day, excluded.last_day) \
             RETURNING id",
        touch_usage_value: "UPDATE usage_values SET last_day = max(last_day, :day) \
             WHERE owner = :owner AND name = :name AND value = :value",
        count_usage_values: "SELECT count(*) AS count FROM usage_values WHERE owner = :owner AND name = :name",
        insert_usage_value: "INSERT INTO usage_values (owner, name, value, last_day) VALUES (:owner, :name, :value, :day)",
        find_usage_quarter: "SELECT sums FROM usage_quarters WHERE start = :start AND series = :series",
        find_usage_day: "SELECT sums FROM usage_days WHERE start = :start AND series = :series",
        upsert_usage_quarter: "INSERT INTO usage_quarters (start, series, sums) VALUES (:start, :series, :sums) \
             ON CONFLICT (start, series) DO UPDATE SET sums = excluded.sums",
        upsert_usage_day: "INSERT INTO usage_days (start, series, sums) VALUES (:start, :series, :sums) \
             ON CONFLICT (start, series) DO UPDATE SET sums = excluded.sums",
        /// Adds to the amounts of a quarter hour; the largest amount stays.
        charge_budget: "INSERT INTO budget_usage (budget, quarter, tokens, cost) \
             VALUES (:budget, :quarter, :tokens, :cost) ON CONFLICT (budget, quarter) DO UPDATE SET \
             tokens = tokens + min(excluded.tokens, 9223372036854775807 - tokens), \
             cost = cost + min(excluded.cost, 9223372036854775807 - cost)",
        insert_budget_alert: "INSERT OR IGNORE INTO budget_alerts (budget, period, share) \
             VALUES (:budget, :period, :share)",
        trim_budget_usage: "DELETE FROM budget_usage WHERE budget = :budget AND quarter < :before \
         AND EXISTS (SELECT 1 FROM budget_usage WHERE budget = :budget AND quarter BETWEEN :before AND :settled)",
        trim_budget_alerts: "DELETE FROM budget_alerts WHERE budget = :budget AND period < :before \
         AND EXISTS (SELECT 1 FROM budget_usage WHERE budget = :budget AND quarter BETWEEN :before AND :settled)",
        trim_usage_quarters: "DELETE FROM usage_quarters WHERE (start, series) IN \
             (SELECT start, series FROM usage_quarters WHERE start < :before ORDER BY start, series LIMIT :limit)",
        trim_usage_days: "DELETE FROM usage_days WHERE (start, series) IN \
             (SELECT start, series FROM usage_days WHERE start < :before ORDER BY start, series LIMIT :limit)",
        trim_usage_series: "DELETE FROM usage_series WHERE id IN \
             (SELECT id FROM usage_series WHERE last_day < :before ORDER BY last_day LIMIT :limit)",
        trim_usage_values: "DELETE FROM usage_values WHERE (owner, name, value) IN \
             (SELECT owner, name, value FROM usage_values WHERE last_day < :before ORDER BY last_day LIMIT :limit)",
    }
}

/// A change of a run that has not ended.
fn update_row((set, condition): &(&str, &str)) -> String {
    let sql = format!(
        "UPDATE runs AS r SET {SET_LAST_EVENT}{set} WHERE r.id = :run AND r.finished_at IS NULL{condition}"
    );
    Dialect::Sqlite.text(&sql).into_owned()
}

impl<'c> Statements<'c> {
    pub fn row_change(&mut self, change: RowChange) -> &mut PreparedStatement<'c> {
        &mut self.row_changes[change as usize]
    }

    /// A statement of [`Changes`], prepared when it is executed first.
    pub fn by_text(
        &mut self,
        connection: &'c Connection,
        sql: &'static str,
    ) -> rusqlite::Result<&mut PreparedStatement<'c>> {
        Ok(match self.by_text.entry(sql) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let text = Dialect::Sqlite.text(sql);
                new.insert(PreparedStatement::new(connection, &text)?)
            }
        })
    }
}
