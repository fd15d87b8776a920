//! Reads runs from their columns.

use std::sync::Arc;

use jiff::SignedDuration;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::domain::content::Content;
use crate::domain::run::{Depth, PendingApproval, Run, RunId, now};
use crate::domain::usage::{Cost, ModelUsage, TokenUsage, TreeUsage, Usage};
use crate::store::encoding::columns::columns;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::integers::unsigned;
use crate::store::encoding::run_values;
use crate::store::postgres::rows::{self, StoreResult, StoredText};
use crate::store::runs::TASK_CHARS;
use crate::store::sql::clock::clock;
use crate::store::{ClaimedRun, ResumeState};
use crate::workdirs::file_id::FileId;

/// The columns that [`run`] reads, from `runs AS r` and `tree_sums AS s`. The texts are expressions because not every list
/// reads them.
// A root's row has the number of its own last event only; that of its tree is in `trees`.
macro_rules! run_columns {
    ($what:ident, $input:expr, $input_is_parts:expr, $task:expr, $content:expr, $partial_content:expr) => {
        columns! { $what:
            Id: "r.id",
            Root: "r.root",
            Parent: "r.parent",
            Depth: "r.depth",
            ToolCallId: "r.tool_call_id",
            Agent: "r.agent",
            AgentVersion: "r.agent_version",
            Status: "r.status",
            Input: $input,
            InputIsParts: $input_is_parts,
            Task: $task,
            Label: "r.label",
            CompletionStatus: "r.completion_status",
            Labels: "r.labels",
            Content: $content,
            PartialContent: $partial_content,
            Model: "r.model",
            StopReason: "r.stop_reason",
            Turns: "r.turns",
            Error: "r.error",
            CancelReason: "r.cancel_reason",
            Attempt: "r.attempt",
            CreatedAt: "r.created_at",
            StartedAt: "r.started_at",
            FinishedAt: "r.finished_at",
            LastEvent: "CASE WHEN r.child THEN r.last_event ELSE greatest(r.last_event, \
(SELECT t.last_event FROM trees t WHERE t.root = r.id)) END",
            InputTokens: "r.input_tokens",
            OutputTokens: "r.output_tokens",
            CacheReadTokens: "r.cache_read_tokens",
            CacheWriteTokens: "r.cache_write_tokens",
            ModelCalls: "r.model_calls",
            ToolCalls: "r.tool_calls",
            Cost: "r.cost",
            Unreported: "r.unreported",
            TreeRuns: "coalesce(r.tree_runs, s.runs)",
            TreeInputTokens: "coalesce(r.tree_input_tokens, s.input_tokens)",
            TreeOutputTokens: "coalesce(r.tree_output_tokens, s.output_tokens)",
            TreeCacheReadTokens: "coalesce(r.tree_cache_read_tokens, s.cache_read_tokens)",
            TreeCacheWriteTokens: "coalesce(r.tree_cache_write_tokens, s.cache_write_tokens)",
            TreeModelCalls: "coalesce(r.tree_model_calls, s.model_calls)",
            TreeToolCalls: "coalesce(r.tree_tool_calls, s.tool_calls)",
            TreeCost: "CASE WHEN r.tree_runs IS NULL THEN s.cost ELSE r.tree_cost END",
            TreeUnreported: "coalesce(r.tree_unreported, s.unreported)",
            Owner: "r.owner",
            Structured: "r.structured",
            Session: "r.session",
            Waited: "r.waited",
            WaitingSince: "r.waiting_since",
            WaitingFor: "r.waiting_for",
            Warnings: "r.warnings",
            Fork: "r.fork",
        }
    };
}

run_columns!(names, "", "", "", "", "");

/// A run with its texts.
pub const RUN_COLUMNS: &str = run_columns!(
    list,
    "r.input",
    "r.input_is_parts",
    "r.task",
    "r.content",
    "r.partial_content"
);

/// Bytes of a task that a summary reads: enough for [`TASK_CHARS`] characters and one more, of at most 4 bytes.
const SUMMARY_TASK_BYTES: usize = 4 * (TASK_CHARS + 1);

/// A run without its texts, except for the beginning of its task.
const SUMMARY_COLUMNS: &str = run_columns!(
    list,
    "''::bytea",
    "false",
    "substring(r.task FROM 1 FOR 8196)",
    "NULL::bytea",
    "NULL::bytea"
);

/// The usage of the trees of runs that have not ended, until now, as `s`. The row of one that has ended contains it.
const TREE_SUMS: &str = "CROSS JOIN LATERAL (WITH RECURSIVE tree AS (\
     SELECT r.id, r.input_tokens, r.output_tokens, r.cache_read_tokens, r.cache_write_tokens, r.model_calls, \
     r.tool_calls, r.cost, r.unreported WHERE r.finished_at IS NULL \
     UNION ALL SELECT c.id, c.input_tokens, c.output_tokens, c.cache_read_tokens, c.cache_write_tokens, c.model_calls, \
     c.tool_calls, c.cost, c.unreported FROM tree JOIN runs c ON c.parent = tree.id) \
     SELECT count(*) AS runs, \
     least(sum(input_tokens), 9223372036854775807)::bigint AS input_tokens, \
     least(sum(output_tokens), 9223372036854775807)::bigint AS output_tokens, \
     least(sum(cache_read_tokens), 9223372036854775807)::bigint AS cache_read_tokens, \
     least(sum(cache_write_tokens), 9223372036854775807)::bigint AS cache_write_tokens, \
     least(sum(model_calls), 9223372036854775807)::bigint AS model_calls, \
     least(sum(tool_calls), 9223372036854775807)::bigint AS tool_calls, \
     CASE WHEN sum(cost) IS NOT NULL THEN least(sum(cost), 9223372036854775807)::bigint END AS cost, \
     least(sum(unreported), 9223372036854775807)::bigint AS unreported FROM tree) s";

/// The calls of unfinished runs and their descendants that wait for approval, as `w`.
const WAITING_CALLS: &str = "CROSS JOIN LATERAL (\
     SELECT (array_agg(a.run ORDER BY a.run, a.seq))[1 : 100] AS runs, \
     (array_agg(p.agent ORDER BY a.run, a.seq))[1 : 100] AS agents, \
     (array_agg(a.request ORDER BY a.run, a.seq))[1 : 100] AS requests \
     FROM approvals a JOIN runs p ON p.id = a.run \
     WHERE r.finished_at IS NULL AND a.root = r.root AND p.status IN ('running', 'waiting') \
     AND (r.parent IS NULL OR r.id IN (WITH RECURSIVE up (id, parent) AS (SELECT p.id, p.parent \
     UNION ALL SELECT q.id, q.parent FROM up JOIN runs q ON q.id = up.parent) SELECT id FROM up))) w";

/// Leaves out trees that are being deleted, in `runs AS r`.
pub const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

/// Selects runs for [`run`].
pub fn select(condition: &str) -> String {
    format!("SELECT {RUN_COLUMNS} FROM runs r {TREE_SUMS} WHERE {condition} AND {NOT_DELETED}")
}

/// Selects runs for [`run_with_approvals`].
pub fn select_with_approvals(condition: &str) -> String {
    format!(
        "SELECT {RUN_COLUMNS}, w.runs AS call_runs, w.agents AS call_agents, w.requests AS call_requests \
         FROM runs r {TREE_SUMS} {WAITING_CALLS} WHERE {condition} AND {NOT_DELETED}"
    )
}

/// Selects runs for [`summary`].
pub fn select_summaries(condition: &str) -> String {
    format!("SELECT {SUMMARY_COLUMNS} FROM runs r {TREE_SUMS} WHERE {condition} AND {NOT_DELETED}")
}

/// Selects runs for [`run`], [`resume_state`] and [`resumed_models`].
pub fn select_with_resume_states(condition: &str) -> String {
    let clock = clock!();
    format!(
        "SELECT {RUN_COLUMNS}, r.definition AS definition, r.deadline_at - {clock} AS deadline_in, \
         r.deadline_seconds AS deadline_seconds, r.timeout AS timeout, r.stream AS stream, r.webhook AS webhooks, \
         r.waiting_since - {clock} AS paused_in, r.held AS held, r.workdir_device AS workdir_device, \
         r.workdir_inode AS workdir_inode, r.model_usage AS model_usage \
         FROM runs r {TREE_SUMS} WHERE {condition} AND {NOT_DELETED}"
    )
}

pub fn run(row: &Row) -> StoreResult<Run> {
    let task = rows::text(row, RunColumn::Task as usize)?;
    run_with_task(row, task)
}

/// A run with the calls of its tree that wait for approval.
pub fn run_with_approvals(row: &Row) -> StoreResult<Run> {
    let mut found = run(row)?;
    found.pending_approvals = pending_approvals(row, found.root_id)?;
    Ok(found)
}

/// A run without its texts, except for the beginning of its task: see [`TASK_CHARS`].
pub fn summary(row: &Row) -> StoreResult<Run> {
    let bytes: Option<&[u8]> = rows::get(row, RunColumn::Task as usize)?;
    let task = bytes.map(|bytes| {
        // The last character may be incomplete.
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(SUMMARY_TASK_BYTES)]);
        text.chars().take(TASK_CHARS + 1).collect()
    });
    run_with_task(row, task)
}

fn run_with_task(row: &Row, task: Option<String>) -> StoreResult<Run> {
    use RunColumn as C;
    let status = rows::str(row, C::Status as usize)?.and_then(|status| status.parse().ok());
    Ok(Run {
        id: run_id(row)?,
        root_id: rows::id(row, C::Root as usize)?,
        parent_id: rows::optional_id(row, C::Parent as usize)?,
        owner: text(row, C::Owner)?,
        session: text(row, C::Session)?,
        depth: Depth(rows::small(row, C::Depth as usize)?),
        tool_call_id: text(row, C::ToolCallId)?,
        agent: rows::required_text(row, C::Agent as usize)?,
        agent_version: rows::required_text(row, C::AgentVersion as usize)?,
        status: status.ok_or_else(|| rows::damaged("unknown status"))?,
        input: input(row)?,
        task,
        label: text(row, C::Label)?,
        completion_status: text(row, C::CompletionStatus)?,
        labels: rows::json(row, C::Labels as usize)?.unwrap_or_default(),
        content: text(row, C::Content)?,
        structured: rows::get::<Option<bool>>(row, C::Structured as usize)?.unwrap_or(false),
        partial_content: text(row, C::PartialContent)?,
        model: rows::required_text(row, C::Model as usize)?,
        stop_reason: text(row, C::StopReason)?,
        turns: rows::small(row, C::Turns as usize)?,
        usage: usage(row, &OWN_USAGE)?,
        tree: match rows::get::<Option<i64>>(row, C::TreeRuns as usize)? {
            Some(runs) => TreeUsage {
                runs: unsigned(runs),
                usage: usage(row, &TREE_USAGE)?,
            },
            None => TreeUsage::default(),
        },
        error: rows::json(row, C::Error as usize)?,
        cancel_reason: text(row, C::CancelReason)?,
        attempt: rows::small(row, C::Attempt as usize)?,
        created_at: rows::time(row, C::CreatedAt as usize)?.unwrap_or_default(),
        started_at: rows::time(row, C::StartedAt as usize)?,
        finished_at: rows::time(row, C::FinishedAt as usize)?,
        waited_ms: waited_ms(row)?,
        last_event: rows::count(row, C::LastEvent as usize)?,
        waiting_for: rows::json(row, C::WaitingFor as usize)?,
        pending_approvals: Vec::new(),
        is_cut: false,
        warnings: rows::json(row, C::Warnings as usize)?.unwrap_or_default(),
        fork: rows::json(row, C::Fork as usize)?,
    })
}

/// The id of a run, even if the rest cannot be read.
pub fn run_id(row: &Row) -> StoreResult<RunId> {
    rows::id(row, RunColumn::Id as usize)
}

fn text(row: &Row, column: RunColumn) -> StoreResult<Option<String>> {
    rows::text(row, column as usize)
}

fn input(row: &Row) -> StoreResult<Content> {
    let is_parts: bool = rows::get(row, RunColumn::InputIsParts as usize)?;
    match is_parts {
        true => rows::json(row, RunColumn::Input as usize)?
            .ok_or_else(|| rows::damaged("an input is missing")),
        false => rows::required_text(row, RunColumn::Input as usize).map(Content::from),
    }
}

/// How long the run was paused, until now if it is paused.
fn waited_ms(row: &Row) -> StoreResult<u64> {
    let before = rows::get::<Option<i64>>(row, RunColumn::Waited as usize)?.unwrap_or(0);
    let Some(since) = rows::get::<Option<i64>>(row, RunColumn::WaitingSince as usize)? else {
        return Ok(unsigned(before));
    };
    let end = rows::get::<Option<i64>>(row, RunColumn::FinishedAt as usize)?;
    let end = end.unwrap_or_else(|| now().as_millisecond());
    Ok(unsigned(before + (end - since).max(0)))
}

fn pending_approvals(row: &Row, root_id: RunId) -> StoreResult<Vec<PendingApproval>> {
    let Some(runs) = rows::get::<Option<Vec<Uuid>>>(row, "call_runs")? else {
        return Ok(Vec::new());
    };
    let agents: Vec<String> = rows::get(row, "call_agents")?;
    let requests: Vec<StoredText<'_>> = rows::get(row, "call_requests")?;
    let calls = runs.into_iter().zip(agents).zip(requests);
    // A damaged row hides neither its run nor the others.
    let readable = calls.filter_map(|((run, agent), request)| {
        Some(PendingApproval {
            run_id: RunId(run),
            root_id,
            agent,
            request: serde_json::from_str(request.0).ok()?,
        })
    });
    Ok(readable.collect())
}

/// The key of the definition; `None` if an older version accepted the run.
pub fn definition_hash(row: &Row) -> StoreResult<Option<Hash>> {
    rows::hash(row, "definition")
}

pub fn resume_state(row: &Row, definition: Arc<str>) -> StoreResult<ResumeState> {
    let count = |column| Ok(rows::get::<Option<i64>>(row, column)?.map_or(0, unsigned));
    let flag = |column| Ok(rows::get::<Option<bool>>(row, column)?.unwrap_or(false));
    // By the clock of this node.
    let from_now = |column| {
        let millis: Option<i64> = rows::get(row, column)?;
        let from_now = millis.map(SignedDuration::from_millis);
        StoreResult::Ok(from_now.and_then(|it| now().checked_add(it).ok()))
    };
    let seconds = count("deadline_seconds")?;
    Ok(ResumeState {
        definition,
        deadline: from_now("deadline_in")?.map(|at| (at, seconds)),
        timeout: count("timeout")?,
        stream: flag("stream")?,
        webhooks: rows::json(row, "webhooks")?.unwrap_or_default(),
        waiting_since: from_now("paused_in")?,
        is_held: flag("held")?,
        workdir: workdir(row)?,
    })
}

fn workdir(row: &Row) -> StoreResult<Option<FileId>> {
    let device: Option<i64> = rows::get(row, "workdir_device")?;
    let inode: Option<i64> = rows::get(row, "workdir_inode")?;
    Ok(device.zip(inode).map(|(device, inode)| FileId {
        device: device.cast_unsigned(),
        inode: inode.cast_unsigned(),
    }))
}

pub fn resumed_models(row: &Row, run: &Run) -> StoreResult<Vec<ModelUsage>> {
    let stored = rows::str(row, "model_usage")?;
    Ok(run_values::resumed_models(stored, run))
}

/// Reads the columns `run`, `body` and `message` of a claim.
pub fn claimed_run(row: &Row) -> StoreResult<ClaimedRun> {
    let number: Option<i64> = rows::get(row, "message")?;
    Ok(ClaimedRun {
        run: rows::id(row, "run")?,
        body_hash: rows::hash(row, "body")?.unwrap_or_default(),
        number: number.and_then(|number| u32::try_from(number).ok()),
    })
}

/// Where a row has usage.
struct UsageColumns {
    input_tokens: RunColumn,
    output_tokens: RunColumn,
    cache_read_tokens: RunColumn,
    cache_write_tokens: RunColumn,
    model_calls: RunColumn,
    tool_calls: RunColumn,
    cost: RunColumn,
    unreported: RunColumn,
}

/// A run's own usage.
const OWN_USAGE: UsageColumns = UsageColumns {
    input_tokens: RunColumn::InputTokens,
    output_tokens: RunColumn::OutputTokens,
    cache_read_tokens: RunColumn::CacheReadTokens,
    cache_write_tokens: RunColumn::CacheWriteTokens,
    model_calls: RunColumn::ModelCalls,
    tool_calls: RunColumn::ToolCalls,
    cost: RunColumn::Cost,
    unreported: RunColumn::Unreported,
};

/// The usage of a run's tree.
const TREE_USAGE: UsageColumns = UsageColumns {
    input_tokens: RunColumn::TreeInputTokens,
    output_tokens: RunColumn::TreeOutputTokens,
    cache_read_tokens: RunColumn::TreeCacheReadTokens,
    cache_write_tokens: RunColumn::TreeCacheWriteTokens,
    model_calls: RunColumn::TreeModelCalls,
    tool_calls: RunColumn::TreeToolCalls,
    cost: RunColumn::TreeCost,
    unreported: RunColumn::TreeUnreported,
};

fn usage(row: &Row, columns: &UsageColumns) -> StoreResult<Usage> {
    // A sum over the runs of a tree is null for one that has ended, which has its own.
    let count = |column: RunColumn| rows::count(row, column as usize);
    let cost: Option<i64> = rows::get(row, columns.cost as usize)?;
    Ok(Usage {
        tokens: TokenUsage {
            input: count(columns.input_tokens)?,
            output: count(columns.output_tokens)?,
            cache_read: count(columns.cache_read_tokens)?,
            cache_write: count(columns.cache_write_tokens)?,
            reasoning: 0,
        },
        model_calls: count(columns.model_calls)?,
        tool_calls: count(columns.tool_calls)?,
        cost: cost.map(|cost| Cost(unsigned(cost))),
        unreported: count(columns.unreported)?,
    })
}
