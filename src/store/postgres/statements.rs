//! The SQL of the writer, prepared once for each connection, besides the statements of writes, which are in `run_changes`.

use crate::store::run_queries::FIND_CLAIM;
use crate::store::sql::clock::clock;

/// Whether the tree of a request has ended or belongs to this node.
macro_rules! no_other_owner {
    () => {
        " AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.root AND t.node IS DISTINCT FROM :node)"
    };
}

/// Declares the statements as an enum, with the SQL of each.
macro_rules! statements {
    ($($(#[$doc:meta])* $name:ident: $sql:expr,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Sql { $($(#[$doc])* $name,)* }

        /// In the order of the enum.
        pub const STATEMENTS: &[&str] = &[$($sql,)*];
    };
}

// In the order: transactions, owners and permits of trees, sessions, duties, checks, new runs, changes of a run, what belongs to a
// run, sessions, attachments, deliveries, deletions, batches, schedules, requests, memories, usage.
statements! {
    /// The user of the database may have another default.
    Begin: "BEGIN ISOLATION LEVEL READ COMMITTED",
    Commit: "COMMIT",
    Rollback: "ROLLBACK",
    /// Nothing is written for a node that another one has replaced.
    GuardNode: "SELECT 1 FROM nodes WHERE incarnation = :node FOR KEY SHARE",
    /// A tree whose root has ended, but not all of its runs.
    ReviveTree: "INSERT INTO trees (root, node, epoch, last_event, owner, agent, permit) SELECT :root, n.incarnation, 1, \
         coalesce((SELECT last_seq FROM entries WHERE root = :root ORDER BY last_seq DESC LIMIT 1), 0), r.owner, r.agent, 0 \
         FROM nodes n, runs r WHERE n.incarnation = :node AND r.id = :root ON CONFLICT (root) DO NOTHING",
    /// The trees of this node.
    OwnTrees: "SELECT root, epoch FROM trees WHERE node = :node",
    /// Those of these trees that belong to the node. A commit to them whose answer was lost, and which comes late, is waited for, or
    /// is refused for its epoch. The node does not own one whose labels it has not, nor any after its row was removed.
    OwnTreesOf: "WITH c AS MATERIALIZED (SELECT root FROM trees WHERE node = :node AND root = ANY(:roots) ORDER BY root FOR UPDATE) \
         UPDATE trees t SET epoch = t.epoch + 1 FROM c WHERE t.root = c.root RETURNING t.root, t.epoch, \
         EXISTS (SELECT 1 FROM nodes n WHERE n.incarnation = t.node AND (t.labels IS NULL OR t.labels <@ n.labels)) AS is_owner",
    /// Trees without a node that can drive them, in the order of acceptance. The own row is locked: nothing is claimed for a node
    /// that was removed. The nodes are counted because `NOT EXISTS` becomes an anti join, which is not evaluated again for a row that
    /// another node has claimed meanwhile: both would have it.
    ClaimTrees: "WITH alive AS MATERIALIZED (SELECT incarnation, labels FROM nodes WHERE incarnation = :node FOR KEY SHARE), \
         c AS MATERIALIZED (SELECT t.root FROM trees t, alive WHERE (t.labels IS NULL OR t.labels <@ alive.labels) \
         AND (SELECT count(*) FROM nodes n WHERE n.incarnation = t.node AND (t.labels IS NULL OR t.labels <@ n.labels)) = 0 \
         ORDER BY t.root FOR UPDATE OF t SKIP LOCKED LIMIT :max) \
         UPDATE trees t SET node = alive.incarnation, epoch = t.epoch + 1, unserved_at = NULL FROM c, alive \
         WHERE t.root = c.root RETURNING t.root, t.epoch",
    /// Waits for a claim by another node, which the next statement sees then.
    LockTree: "SELECT 1 FROM trees WHERE root = :root FOR UPDATE",
    /// A tree whose labels no node has. It stays free for nodes that have them, and others get its permit.
    ClaimUnserved: "UPDATE trees t SET node = :node, epoch = t.epoch + 1, unserved_at = coalesce(t.unserved_at, now()), \
         permit = least(t.permit, 1), returned = t.returned OR t.permit = 2 \
         WHERE t.root = :root AND NOT EXISTS (SELECT 1 FROM nodes n WHERE t.labels IS NULL OR t.labels <@ n.labels) \
         RETURNING t.epoch",
    /// It needs what it has needed before, too.
    LeaveTree: "UPDATE trees SET node = NULL, labels = ARRAY(SELECT unnest(labels) UNION SELECT unnest(:labels::text[])) \
         WHERE root = :root AND node = :node",
    /// The next run of a session: its id is greater than that of the one before.
    EnterSession: "INSERT INTO sessions AS s (owner, name, last_run) VALUES (:owner, :session, :root) \
         ON CONFLICT (owner, name) DO UPDATE SET last_run = excluded.last_run WHERE s.last_run < excluded.last_run",
    /// Before a transaction enters sessions one by one: nodes lock them in the same order, so that none waits for the other. New
    /// ones are made, before all runs.
    LockSessions: "INSERT INTO sessions AS s (owner, name, last_run) SELECT owner, name, '00000000-0000-0000-0000-000000000000' \
         FROM unnest(:owners::text[], :names::bytea[]) AS b (owner, name) ORDER BY b.owner COLLATE \"C\", b.name \
         ON CONFLICT (owner, name) DO UPDATE SET last_run = excluded.last_run WHERE false",
    /// Affects a row if all other runs of the session have ended, but for known ones.
    RequireKnownRuns: "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM trees WHERE session = :session \
         AND coalesce(owner, '') = :owner AND root <> :root AND root <> ALL(:known::uuid[]))",
    /// Who gives permits does so alone. Another node's transaction is not waited for: the writer has other work.
    LockPermits: "SELECT 1 FROM permit_lock WHERE id = 1 FOR UPDATE SKIP LOCKED",
    CountPermits: "SELECT owner, agent, count(*) AS trees FROM trees WHERE permit = 2 GROUP BY owner, agent",
    /// Of each key those that may come next. A tree waits for those before it in its session, and for a node.
    WaitingTrees: "SELECT root, owner, agent, returned FROM (SELECT t.*, \
         row_number() OVER (PARTITION BY t.owner, t.agent ORDER BY t.returned DESC, t.root) AS place FROM trees t \
         WHERE t.permit = 1 AND t.node IS NOT NULL AND t.unserved_at IS NULL AND (t.session IS NULL OR NOT EXISTS (SELECT 1 FROM trees e WHERE e.session = t.session \
         AND coalesce(e.owner, '') = coalesce(t.owner, '') AND e.root < t.root))) w \
         WHERE place <= :max ORDER BY returned DESC, root",
    PermitTurns: "SELECT owner, turn FROM permit_turns",
    GivePermits: "UPDATE trees SET permit = 2 WHERE root = ANY(:roots) AND permit = 1",
    TakeTurns: "INSERT INTO permit_turns AS p (owner, turn) SELECT * FROM unnest(:owners::text[], :turns::bigint[]) \
         ON CONFLICT (owner) DO UPDATE SET turn = excluded.turn",
    /// A tree that waits for a person.
    ReleasePermit: "UPDATE trees SET permit = 0 WHERE root = :root AND node = :node",
    /// The runs behind it in its session go on.
    GiveUpTree: "UPDATE trees SET permit = 0, session = NULL WHERE root = :root AND node = :node",
    /// All runs of a tree whose root had ended before them have ended.
    RemoveEndedTree: "DELETE FROM trees WHERE root = :root AND node = :node \
         AND NOT EXISTS (SELECT 1 FROM runs WHERE root = :root AND finished_at IS NULL)",
    HandOverTree: "UPDATE trees t SET node = NULL WHERE t.root = :root AND t.node = :node \
         AND EXISTS (SELECT 1 FROM nodes n WHERE n.incarnation <> :node AND (t.labels IS NULL OR t.labels <@ n.labels))",
    /// It comes before those that have not started.
    ReturnToQueue: "UPDATE trees SET permit = 1, returned = true WHERE root = :root AND node = :node AND permit = 0",
    /// Its trees are free at once.
    LeaveNode: "DELETE FROM nodes WHERE incarnation = :node",
    WriteCheck: "INSERT INTO checks (id, at) VALUES (1, :now) ON CONFLICT (id) DO UPDATE SET at = excluded.at",
    /// More rows than fit into the pages of the table and its index.
    TakeSpace: "INSERT INTO checks (id, at) SELECT -n, 0 FROM generate_series(1, 2000) AS n ON CONFLICT (id) DO NOTHING",
    ReturnSpace: "DELETE FROM checks WHERE id < 0",
    FindClaim: FIND_CLAIM,
    /// A new idempotency key, or one that is expired or whose run is being deleted.
    UpsertClaim: "INSERT INTO claims AS c (credential, route, key, run, body, expires, message) \
         VALUES (:credential, :route, :key, :run, :body, :expires, :message) ON CONFLICT (credential, route, key) \
         DO UPDATE SET run = excluded.run, body = excluded.body, expires = excluded.expires, message = excluded.message \
         WHERE c.expires <= :now OR EXISTS (SELECT 1 FROM deletions d WHERE d.root = c.run)",
    /// Removes several, so that a backlog shrinks while new ones arrive.
    DeleteExpiredClaims: "DELETE FROM claims WHERE (credential, route, key) IN \
         (SELECT credential, route, key FROM claims WHERE expires <= :now ORDER BY expires LIMIT 4 FOR UPDATE SKIP LOCKED)",
    /// A root that is not being deleted.
    HasRoot: "SELECT 1 FROM runs WHERE id = :id AND parent IS NULL \
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = :id)",
    /// Inserts a definition with the one run that uses it. If it exists, marks it as used by more than one.
    UpsertDefinition: "INSERT INTO definitions AS d (hash, body, used_until, only_run) \
         VALUES (:hash, :body, :used_until, :run) ON CONFLICT (hash) \
         DO UPDATE SET used_until = greatest(d.used_until, excluded.used_until), only_run = NULL",
    InsertLabel: "INSERT INTO labels (key, value, run) VALUES (:key, :value, :run)",
    RaiseClockSkew: "UPDATE clock SET lead = greatest(lead, :lead), lag = greatest(lag, :lag) \
         WHERE id = 1 AND (lead < :lead OR lag < :lag)",
    /// The list only grows: a shorter one is older.
    UpdateWarnings: "UPDATE runs SET warnings = :warnings \
         WHERE id = :run AND coalesce(octet_length(warnings), 0) < octet_length(:warnings::text)",
    /// Why a write was refused: who owns the tree, and what the run allows.
    ExplainWrite: "SELECT t.node, t.epoch, r.finished_at, r.status FROM runs root LEFT JOIN trees t ON t.root = root.id \
         LEFT JOIN runs r ON r.id = :run WHERE root.id = :root",
    /// `back` is the number of events after the one that requests the approval, in the same write.
    InsertInput: "INSERT INTO inputs (run, seq, root, owner, call, kind, request, wake) \
         SELECT r.id, t.last_event - :back, r.root, r.owner, :call, :kind, :request, :wake \
         FROM runs r JOIN trees t ON t.root = r.root WHERE r.id = :run",
    DeleteInput: "DELETE FROM inputs WHERE run = :run AND call = :call",
    DeleteSessions: "DELETE FROM sessions s USING runs r WHERE r.id = ANY(:runs) AND s.owner = coalesce(r.owner, '') \
         AND s.name = r.session AND s.last_run = r.id",
    DeleteFreeSession: "DELETE FROM sessions s WHERE s.owner = :owner AND s.name = :session \
         AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.session = s.name AND coalesce(t.owner, '') = s.owner)",
    ForgetOwnedSession: "UPDATE runs SET session = NULL WHERE id IN (SELECT id FROM runs WHERE session IS NOT NULL \
         AND owner = :owner AND session = :session AND finished_at IS NOT NULL ORDER BY id LIMIT :limit)",
    ForgetSession: "UPDATE runs SET session = NULL WHERE id IN (SELECT id FROM runs WHERE session IS NOT NULL \
         AND owner IS NULL AND session = :session AND finished_at IS NOT NULL ORDER BY id LIMIT :limit)",
    /// Bytes that exist are only locked, so that another node does not remove them before this run uses them.
    InsertAttachment: "INSERT INTO attachments (hash, data) VALUES (:hash, :data) \
         ON CONFLICT (hash) DO UPDATE SET data = excluded.data WHERE false",
    /// Inserts nothing if the bytes do not exist.
    InsertAttachmentUse: "INSERT INTO attachment_uses (run, hash) SELECT :run, hash FROM attachments WHERE hash = :hash \
         FOR KEY SHARE ON CONFLICT DO NOTHING",
    /// A delivery that is due at once.
    InsertDelivery: concat!("INSERT INTO deliveries (id, run, event, host, url, secret_env, body, status, created_at, since, \
         tries, next_at, attempts, owner, push) VALUES (:id, :run, :event, :host, :url, :secret_env, :body, 'pending', \
         :created_at, :created_at, 0, ", clock!(), ", '{}', coalesce((SELECT owner FROM runs WHERE id = :run), ''), :push)"),
    /// The same for a budget's alert, if this write is the first that records it.
    InsertAlertDelivery: concat!("WITH won AS (INSERT INTO budget_alerts (budget, period, share) VALUES (:budget, :period, :share) \
         ON CONFLICT DO NOTHING RETURNING share) \
         INSERT INTO deliveries (id, run, event, host, url, secret_env, body, status, created_at, since, \
         tries, next_at, attempts, owner, push) SELECT :id, :run, :event, :host, :url, :secret_env, :body, 'pending', \
         :created_at, :created_at, 0, ", clock!(), ", '{}', coalesce((SELECT owner FROM runs WHERE id = :run), ''), :push FROM won"),
    PushTargets: "SELECT id, url FROM push_configs WHERE run = :run",
    MarkDeletion: "INSERT INTO deletions (root) VALUES (:root) ON CONFLICT DO NOTHING",
    Deletions: "SELECT root FROM deletions ORDER BY root LIMIT 64",
    UnmarkDeletion: "DELETE FROM deletions WHERE root = :root",
    /// The end of a tree's log.
    DeleteLastEntries: "DELETE FROM entries WHERE (root, last_seq, id) IN (SELECT root, last_seq, id FROM entries \
         WHERE root = :root ORDER BY last_seq DESC, id DESC LIMIT :limit)",
    /// Those of these roots that exist, with the number of their entries, up to a limit.
    RootsToDelete: "SELECT r.id, (SELECT count(*) FROM (SELECT 1 FROM entries e WHERE e.root = r.id LIMIT :limit) AS first) AS entries \
         FROM runs r WHERE r.id = ANY(:roots) AND r.parent IS NULL AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id) \
         ORDER BY r.id",
    /// The runs of these trees, with their labels, one tree after the other.
    RunsToDelete: "WITH RECURSIVE tree (root, id) AS (SELECT root, root FROM unnest(:roots::uuid[]) AS roots (root) UNION ALL \
         SELECT tree.root, c.id FROM tree JOIN runs c ON c.parent = tree.id) \
         SELECT tree.root, r.id, r.labels FROM tree JOIN runs r ON r.id = tree.id ORDER BY tree.root LIMIT :limit",
    DeleteEntries: "DELETE FROM entries WHERE root = ANY(:roots)",
    /// In the order in which others lock them.
    LockLastSessions: "SELECT 1 FROM sessions s JOIN runs r ON s.owner = coalesce(r.owner, '') AND s.name = r.session \
         AND s.last_run = r.id WHERE r.id = ANY(:runs) ORDER BY s.owner COLLATE \"C\", s.name FOR UPDATE OF s",
    /// Runs of a tree whose descendants are among them, with their labels.
    LastRuns: "WITH RECURSIVE tree (id, depth) AS (VALUES (:root::uuid, 0) UNION ALL \
         SELECT c.id, tree.depth + 1 FROM tree JOIN runs c ON c.parent = tree.id) \
         SELECT r.id, r.labels FROM tree JOIN runs r ON r.id = tree.id ORDER BY tree.depth DESC, r.id DESC LIMIT :limit",
    DeleteLabels: "DELETE FROM labels WHERE (key, value, run) IN \
         (SELECT key, value, run FROM unnest(:keys::bytea[], :values::bytea[], :of::uuid[]) AS gone (key, value, run))",
    /// Waits for runs of other nodes that are about to refer to the same bytes.
    LockAttachments: "SELECT 1 FROM attachments WHERE hash IN \
         (SELECT hash FROM attachment_uses WHERE run = ANY(:runs)) ORDER BY hash FOR UPDATE",
    /// Removes references to bytes, and the bytes to which no other run refers.
    DeleteAttachments: "WITH uses AS (DELETE FROM attachment_uses WHERE run = ANY(:runs) RETURNING hash) \
         DELETE FROM attachments a WHERE a.hash IN (SELECT hash FROM uses) AND NOT EXISTS \
         (SELECT 1 FROM attachment_uses u WHERE u.hash = a.hash AND u.run <> ALL(:runs))",
    DeleteClaims: "DELETE FROM claims WHERE run = ANY(:runs)",
    DeleteDeliveries: "DELETE FROM deliveries WHERE run = ANY(:runs)",
    DeletePushConfigs: "DELETE FROM push_configs WHERE run = ANY(:runs)",
    DeleteInputs: "DELETE FROM inputs WHERE run = ANY(:runs)",
    DeleteScores: "DELETE FROM scores WHERE run = ANY(:runs)",
    InsertScoring: "INSERT INTO scorings (run, scorer) VALUES (:run, :scorer) ON CONFLICT DO NOTHING",
    DeleteScorings: "DELETE FROM scorings WHERE run = ANY(:runs)",
    /// Removes definitions, and other shared texts, that only these runs have used.
    DeleteOwnDefinitions: "DELETE FROM definitions WHERE only_run = ANY(:runs)",
    DeleteRuns: "DELETE FROM runs WHERE id = ANY(:runs)",
    DeleteTrees: "DELETE FROM trees WHERE root = ANY(:roots)",
    OldestRun: "SELECT id FROM runs ORDER BY id LIMIT 1",
    /// Removes a few definitions that were last used before the oldest run was accepted. Another node may use one at this moment:
    /// then it says so in the row.
    DeleteOldDefinitions: "DELETE FROM definitions WHERE used_until < :unused_before AND hash IN \
         (SELECT hash FROM definitions WHERE used_until < :unused_before LIMIT 32)",
    UpsertUsageSeries: "INSERT INTO usage_series AS s (digest, owner, session, labels, agent, model, last_day) \
         VALUES (:digest, :owner, :session, :labels, :agent, :model, :day) \
         ON CONFLICT (digest) DO UPDATE SET last_day = greatest(s.last_day, excluded.last_day) RETURNING id",
    TouchUsageValue: "UPDATE usage_values SET last_day = greatest(last_day, :day) \
         WHERE owner = :owner AND name = :name AND value = :value",
    CountUsageValues: "SELECT count(*) AS count FROM usage_values WHERE owner = :owner AND name = :name",
    InsertUsageValue: "INSERT INTO usage_values (owner, name, value, last_day) VALUES (:owner, :name, :value, :day) \
         ON CONFLICT DO NOTHING",
    UpsertUsageQuarter: "INSERT INTO usage_quarters (start, series, writer, sums) VALUES (:start, :series, :writer, :sums) \
         ON CONFLICT (start, series, writer) DO UPDATE SET sums = excluded.sums",
    UpsertUsageDay: "INSERT INTO usage_days (start, series, writer, sums) VALUES (:start, :series, :writer, :sums) \
         ON CONFLICT (start, series, writer) DO UPDATE SET sums = excluded.sums",
    /// Adds to the amounts of a quarter hour; the largest amount stays.
    ChargeBudget: "INSERT INTO budget_usage AS b (budget, quarter, writer, tokens, cost) \
         VALUES (:budget, :quarter, :writer, :tokens, :cost) ON CONFLICT (budget, quarter, writer) DO UPDATE SET \
         tokens = b.tokens + least(excluded.tokens, 9223372036854775807 - b.tokens), \
         cost = b.cost + least(excluded.cost, 9223372036854775807 - b.cost)",
    InsertBudgetAlert: "INSERT INTO budget_alerts (budget, period, share) VALUES (:budget, :period, :share) \
         ON CONFLICT DO NOTHING",
    TrimBudgetUsage: "DELETE FROM budget_usage WHERE budget = :budget AND quarter < :before \
         AND EXISTS (SELECT 1 FROM budget_usage WHERE budget = :budget AND quarter BETWEEN :before AND :settled)",
    TrimBudgetAlerts: "DELETE FROM budget_alerts WHERE budget = :budget AND period < :before \
         AND EXISTS (SELECT 1 FROM budget_usage WHERE budget = :budget AND quarter BETWEEN :before AND :settled)",
    /// Ignored if an earlier attempt has added it.
    InsertRequest: "INSERT INTO requests (id, root, run, asker, kind, body, blobs) \
         VALUES (:id, :root, :run, :asker, :kind, :body, :blobs) ON CONFLICT (id) DO NOTHING",
    /// The row stays for some minutes, so that it is not added after this.
    VoidRequest: "INSERT INTO requests AS r (id, root, run, asker, kind, body, blobs, answer) \
         VALUES (:id, :root, :run, :asker, :kind, '', '{}', :answer) ON CONFLICT (id) DO UPDATE SET answer = excluded.answer \
         WHERE NOT r.is_taken AND r.answer IS NULL",
    /// Only for a tree that no other node owns.
    TakeRequest: concat!("UPDATE requests r SET is_taken = true WHERE r.id = :id AND r.answer IS NULL", no_other_owner!()),
    AnswerRequest: concat!("UPDATE requests r SET answer = :answer WHERE r.id = :id AND r.answer IS NULL", no_other_owner!()),
    WithdrawRequest: "DELETE FROM requests WHERE id = :id AND NOT is_taken AND answer IS NULL",
    DeleteRequest: "DELETE FROM requests WHERE id = :id",
    TrimRequests: "DELETE FROM requests r WHERE r.created < now() - interval '10 minutes' \
         AND (r.answer IS NOT NULL OR NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.root))",
    TrimUsageQuarters: "DELETE FROM usage_quarters WHERE (start, series, writer) IN (SELECT start, series, writer \
         FROM usage_quarters WHERE start < :before ORDER BY start, series, writer LIMIT :limit)",
    TrimUsageDays: "DELETE FROM usage_days WHERE (start, series, writer) IN (SELECT start, series, writer \
         FROM usage_days WHERE start < :before ORDER BY start, series, writer LIMIT :limit)",
    TrimUsageSeries: "DELETE FROM usage_series WHERE id IN \
         (SELECT id FROM usage_series WHERE last_day < :before ORDER BY last_day LIMIT :limit)",
    TrimUsageValues: "DELETE FROM usage_values WHERE (owner, name, value) IN \
         (SELECT owner, name, value FROM usage_values WHERE last_day < :before ORDER BY last_day LIMIT :limit)",
}
