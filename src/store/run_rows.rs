//! Reads runs from their columns.

use std::borrow::Cow;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::domain::content::Content;
use crate::domain::failure::Failure;
use crate::domain::run::{Depth, PendingInput, Run, RunId, now};
use crate::domain::score::RunScores;
use crate::domain::usage::{Cost, ModelUsage, TokenUsage, TreeUsage, Usage};
use crate::domain::variant::Variant;
use crate::settings::choice::Choice;
use crate::store::ResumeState;
use crate::store::encoding::columns::columns;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::run_values;
use crate::store::inputs::is_of_person;
use crate::store::runs::TASK_CHARS;
use crate::store::scores::{self, scores_of_run};
use crate::store::sql::clock::clock;
use crate::store::sql::dialect::Texts;
use crate::store::sql::row::{self, Column, Row, StoreResult, damaged};
use crate::workdirs::file_id::FileId;

/// The columns that [`run`] reads, from `runs AS r` and `tree_sums AS s`. The texts are expressions because not every list reads them.
// A root's row has the number of its own last event only; that of its tree is in the log, or in `trees`.
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
            Variant: "r.variant",
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
            LastEvent: "CASE WHEN r.child THEN r.last_event ELSE {max|greatest}(r.last_event, {coalesce((SELECT e.last_seq \
                FROM entries e WHERE e.root = r.id ORDER BY e.last_seq DESC LIMIT 1), 0)\
                |(SELECT t.last_event FROM trees t WHERE t.root = r.id)}) END",
            InputTokens: "r.input_tokens",
            OutputTokens: "r.output_tokens",
            CacheReadTokens: "r.cache_read_tokens",
            CacheWriteTokens: "r.cache_write_tokens",
            ModelCalls: "r.model_calls",
            ToolCalls: "r.tool_calls",
            Cost: "r.cost",
            Unreported: "r.unreported",
            TreeRuns: "{r.tree_runs|coalesce(r.tree_runs, s.runs)}",
            TreeInputTokens: "{r.tree_input_tokens|coalesce(r.tree_input_tokens, s.input_tokens)}",
            TreeOutputTokens: "{r.tree_output_tokens|coalesce(r.tree_output_tokens, s.output_tokens)}",
            TreeCacheReadTokens: "{r.tree_cache_read_tokens|coalesce(r.tree_cache_read_tokens, s.cache_read_tokens)}",
            TreeCacheWriteTokens: "{r.tree_cache_write_tokens|coalesce(r.tree_cache_write_tokens, s.cache_write_tokens)}",
            TreeModelCalls: "{r.tree_model_calls|coalesce(r.tree_model_calls, s.model_calls)}",
            TreeToolCalls: "{r.tree_tool_calls|coalesce(r.tree_tool_calls, s.tool_calls)}",
            TreeCost: "{r.tree_cost|CASE WHEN r.tree_runs IS NULL THEN s.cost ELSE r.tree_cost END}",
            TreeUnreported: "{r.tree_unreported|coalesce(r.tree_unreported, s.unreported)}",
            Owner: "r.owner",
            Structured: "r.structured",
            Session: "r.session",
            Waited: "r.waited",
            WaitingSince: "r.waiting_since",
            WaitingFor: "r.waiting_for",
            Warnings: "r.warnings",
            Fork: "r.fork",
            Scores: scores_of_run!(),
        }
    };
}

run_columns!(names, "", "", "", "", "");

/// The input. Long ones are in a table of their own in SQLite.
macro_rules! input {
    () => {
        "{CASE WHEN r.input IS NULL THEN (SELECT t.input FROM texts t WHERE t.run = r.id) ELSE r.input END|r.input}"
    };
}
macro_rules! input_is_parts {
    () => {
        "{typeof(CASE WHEN r.input IS NULL THEN (SELECT t.input FROM texts t WHERE t.run = r.id) ELSE r.input END) = 'blob'\
         |r.input_is_parts}"
    };
}

/// A run with its texts.
const RUN_COLUMNS: &str = run_columns!(
    list,
    input!(),
    input_is_parts!(),
    "{CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END|r.task}",
    "r.content",
    "r.partial_content"
);

/// A run without its texts, except for the beginning of its task: enough bytes for [`TASK_CHARS`] characters and one more, of at most 4
/// bytes.
const SUMMARY_COLUMNS: &str = run_columns!(
    list,
    "''::bytea",
    "false",
    "{substr(CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END, 1, 2049)\
     |substring(r.task FROM 1 FOR 8196)}",
    "NULL::bytea",
    "NULL::bytea"
);

/// What a search compares: see [`compared_row`].
const COMPARED_COLUMNS: &str = concat!(
    "r.id, r.variant, r.finished_at, r.tree_cost, r.error, CASE WHEN :reads_texts::boolean THEN ",
    input!(),
    " END AS input, ",
    input_is_parts!(),
    " AS input_is_parts, CASE WHEN :reads_texts::boolean THEN r.content END AS content, \
     CASE WHEN :reads_texts::boolean THEN r.partial_content END AS partial_content, \
     CASE WHEN :reads_scores::boolean THEN ",
    scores_of_run!(),
    " END AS scores"
);

/// The usage of the trees of runs that have not ended, until now, as `s`. The row of one that has ended contains it. With SQLite the caller
/// adds it up.
const TREE_SUMS: &str = "{|CROSS JOIN LATERAL (WITH RECURSIVE tree AS (\
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
     least(sum(unreported), 9223372036854775807)::bigint AS unreported FROM tree) s}";

/// What of an unfinished run and its descendants waits for people, at most [`MAX_RUN_INPUTS`], as JSON.
///
/// [`MAX_RUN_INPUTS`]: crate::store::inputs::MAX_RUN_INPUTS
const PENDING_INPUTS: &str = concat!(
    "CASE WHEN r.finished_at IS NULL THEN (SELECT \
     {json_group_array(json_array(lower(hex(c.run)), c.agent, CAST(c.request AS text)))\
     |json_agg(json_build_array(c.run, c.agent, c.request))::text} \
     FROM (SELECT a.run, p.agent, a.request FROM inputs a {CROSS |}JOIN runs p ON p.id = a.run \
     WHERE a.root = r.root AND ",
    is_of_person!(),
    " AND p.status IN ('running', 'waiting') \
     AND (r.parent IS NULL OR r.id IN (WITH RECURSIVE up (id, parent) AS (SELECT p.id, p.parent \
     UNION ALL SELECT q.id, q.parent FROM up JOIN runs q ON q.id = up.parent) SELECT id FROM up)) \
     ORDER BY a.run, a.seq LIMIT 100) c) END AS pending_inputs"
);

/// The wait for an event or a time of a waiting run, of a root that of one of its tree, as JSON. An event comes first, as in
/// [`WaitingFor`](crate::domain::waiting_for::WaitingFor).
const WORLD_WAIT: &str = "CASE WHEN r.status = 'waiting' THEN (SELECT {CAST(a.request AS text)|a.request} FROM inputs a \
     WHERE a.root = r.root AND (r.parent IS NULL OR a.run = r.id) AND a.kind IN ('sleep', 'event') \
     ORDER BY a.kind, a.run, a.seq LIMIT 1) END AS world_wait";

/// Leaves out trees that are being deleted, in `runs AS r`.
const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

/// Selects runs for [`run`].
pub fn select(rest: &str) -> Texts {
    select_columns(RUN_COLUMNS, rest)
}

/// Selects runs for [`run_with_inputs`].
pub fn select_with_inputs(rest: &str) -> Texts {
    select_columns(
        &format!("{RUN_COLUMNS}, {PENDING_INPUTS}, {WORLD_WAIT}"),
        rest,
    )
}

/// Selects runs for [`summary`].
pub fn select_summaries(rest: &str) -> Texts {
    select_columns(SUMMARY_COLUMNS, rest)
}

/// Selects runs for [`run`], [`resume_state`] and [`resumed_models`].
pub fn select_with_resume_states(rest: &str) -> Texts {
    let clock = clock!();
    let resume = format!(
        "{RUN_COLUMNS}, r.definition AS definition, r.deadline_at - {clock} AS deadline_in, \
         r.deadline_seconds AS deadline_seconds, r.timeout AS timeout, r.stream AS stream, r.webhook AS webhooks, \
         r.waiting_since - {clock} AS paused_in, r.held AS held, r.workdir_device AS workdir_device, \
         r.workdir_inode AS workdir_inode, r.model_usage AS model_usage"
    );
    select_columns(&resume, rest)
}

/// Selects rows for [`compared_row`]; texts are read if `:reads_texts`, scores if `:reads_scores`.
pub fn select_compared(rest: &str) -> Texts {
    Texts::new(&format!(
        "SELECT {COMPARED_COLUMNS} FROM runs r WHERE {rest}"
    ))
}

/// `rest` is a condition, and maybe an order.
fn select_columns(columns: &str, rest: &str) -> Texts {
    Texts::new(&format!(
        "SELECT {columns} FROM runs r {TREE_SUMS} WHERE {NOT_DELETED} AND {rest}"
    ))
}

pub fn run(row: &Row<'_>) -> StoreResult<Run> {
    run_with_task(row, row.get(RunColumn::Task as usize)?)
}

/// A run with the pending inputs of its tree.
pub fn run_with_inputs(row: &Row<'_>) -> StoreResult<Run> {
    let mut found = run(row)?;
    let calls: Option<Vec<(String, String, String)>> = row.json("pending_inputs")?;
    let calls = calls.unwrap_or_default().into_iter();
    // A damaged row hides neither its run nor the others.
    let readable = calls.filter_map(|(run, agent, request)| {
        Some(PendingInput {
            run_id: RunId(Uuid::parse_str(&run).ok()?),
            root_id: found.root_id,
            agent,
            request: serde_json::from_str(&request).ok()?,
        })
    });
    found.pending_inputs = readable.collect();
    found.world_wait = row.json("world_wait").unwrap_or_default();
    Ok(found)
}

/// A run without its texts, except for the beginning of its task: see [`TASK_CHARS`].
pub fn summary(row: &Row<'_>) -> StoreResult<Run> {
    let task: Option<row::Content<'_>> = row.get(RunColumn::Task as usize)?;
    // The last character may be incomplete.
    let task = task.map(|it| String::from_utf8_lossy(it.0).into_owned());
    let task = task.map(|text| text.chars().take(TASK_CHARS + 1).collect());
    run_with_task(row, task)
}

fn run_with_task(row: &Row<'_>, task: Option<String>) -> StoreResult<Run> {
    use RunColumn as C;
    let status: &str = row.get(C::Status as usize)?;
    Ok(Run {
        id: run_id(row)?,
        root_id: row.get(C::Root as usize)?,
        parent_id: row.get(C::Parent as usize)?,
        owner: row.get(C::Owner as usize)?,
        session: row.get(C::Session as usize)?,
        depth: Depth(row.get(C::Depth as usize)?),
        tool_call_id: row.get(C::ToolCallId as usize)?,
        agent: row.get(C::Agent as usize)?,
        agent_version: row.get(C::AgentVersion as usize)?,
        variant: variant(row, C::Variant as usize)?,
        status: status.parse().map_err(|()| damaged("unknown status"))?,
        input: input(row)?,
        task,
        label: row.get(C::Label as usize)?,
        completion_status: row.get(C::CompletionStatus as usize)?,
        labels: row.json(C::Labels as usize)?.unwrap_or_default(),
        content: row.get(C::Content as usize)?,
        structured: row
            .get::<Option<bool>>(C::Structured as usize)?
            .unwrap_or(false),
        partial_content: row.get(C::PartialContent as usize)?,
        model: row.get(C::Model as usize)?,
        stop_reason: row.get(C::StopReason as usize)?,
        turns: row.get(C::Turns as usize)?,
        usage: usage(row, C::InputTokens as usize)?,
        tree: match row.get(C::TreeRuns as usize)? {
            Some(runs) => TreeUsage {
                runs,
                usage: usage(row, C::TreeInputTokens as usize)?,
            },
            None => TreeUsage::default(),
        },
        error: row.json(C::Error as usize)?,
        cancel_reason: row.get(C::CancelReason as usize)?,
        attempt: row.get(C::Attempt as usize)?,
        created_at: row.get(C::CreatedAt as usize)?,
        started_at: row.get(C::StartedAt as usize)?,
        finished_at: row.get(C::FinishedAt as usize)?,
        waited_ms: waited_ms(row)?,
        last_event: row.get(C::LastEvent as usize)?,
        waiting_for: row.json(C::WaitingFor as usize)?,
        waiting_since: row.get(C::WaitingSince as usize)?,
        pending_inputs: Vec::new(),
        world_wait: None,
        suspended: None,
        is_cut: false,
        warnings: row.json(C::Warnings as usize)?.unwrap_or_default(),
        fork: row.json(C::Fork as usize)?,
        scores: scores::run_scores(row, C::Scores as usize)?,
    })
}

/// What a search compares of a run.
pub struct ComparedRow<'r> {
    pub id: RunId,
    pub variant: Option<Variant>,
    /// What an ended run cost with its descendants. What another one has cost is in the rows of its tree.
    pub final_cost: Option<Option<Cost>>,
    pub error: Option<Failure>,
    /// Input and final text, in UTF-8.
    pub texts: Vec<Cow<'r, [u8]>>,
    pub scores: RunScores,
}

pub fn compared_row<'r>(row: &Row<'r>) -> StoreResult<ComparedRow<'r>> {
    let finished_at: Option<i64> = row.get("finished_at")?;
    let cost: Option<u64> = row.get("tree_cost")?;
    let input: Option<row::Content<'r>> = row.get("input")?;
    let input = match input {
        Some(parts) if row.get("input_is_parts")? => {
            let parts: Content = serde_json::from_slice(parts.0).map_err(damaged)?;
            Some(Cow::Owned(parts.to_plain_text().into_owned().into_bytes()))
        }
        text => text.map(|text| Cow::Borrowed(text.0)),
    };
    let (content, partial): (Option<row::Content<'r>>, Option<row::Content<'r>>) =
        (row.get("content")?, row.get("partial_content")?);
    let final_text = content.or(partial);
    let final_text = final_text.map(|text| Cow::Borrowed(text.0));
    Ok(ComparedRow {
        id: row.get("id")?,
        variant: variant(row, "variant")?,
        final_cost: finished_at.map(|_| cost.map(Cost)),
        error: row.json("error")?,
        texts: input.into_iter().chain(final_text).collect(),
        scores: scores::run_scores(row, "scores")?,
    })
}

pub fn variant(row: &Row<'_>, column: impl Into<Column>) -> StoreResult<Option<Variant>> {
    let name: Option<&str> = row.get(column)?;
    Ok(name.and_then(Variant::named))
}

/// The id of a run, even if the rest cannot be read.
pub fn run_id(row: &Row<'_>) -> StoreResult<RunId> {
    row.get(RunColumn::Id as usize)
}

/// A text, or the JSON of its parts.
fn input(row: &Row<'_>) -> StoreResult<Content> {
    let is_parts: bool = row.get(RunColumn::InputIsParts as usize)?;
    if !is_parts {
        let text: String = row.get(RunColumn::Input as usize)?;
        return Ok(Content::from(text));
    }
    let parts: row::Content<'_> = row.get(RunColumn::Input as usize)?;
    serde_json::from_slice(parts.0).map_err(damaged)
}

/// How long the run was paused, until now if it is paused.
fn waited_ms(row: &Row<'_>) -> StoreResult<u64> {
    let before: Option<u64> = row.get(RunColumn::Waited as usize)?;
    let Some(since) = row.get::<Option<i64>>(RunColumn::WaitingSince as usize)? else {
        return Ok(before.unwrap_or(0));
    };
    let end: Option<i64> = row.get(RunColumn::FinishedAt as usize)?;
    let end = end.unwrap_or_else(|| now().as_millisecond());
    let waited = u64::try_from(end - since).unwrap_or(0);
    Ok(before.unwrap_or(0) + waited)
}

/// The key of the definition; `None` if an older version accepted the run.
pub fn definition_hash(row: &Row<'_>) -> StoreResult<Option<Hash>> {
    row.get("definition")
}

/// `now` is the value of the query's parameter of this name. Times are by the clock of this node.
pub fn resume_state(
    row: &Row<'_>,
    now: Timestamp,
    definition: Arc<str>,
) -> StoreResult<ResumeState> {
    let count = |column| Ok(row.get::<Option<u64>>(column)?.unwrap_or(0));
    let flag = |column| Ok(row.get::<Option<bool>>(column)?.unwrap_or(false));
    let from_now = |column| {
        let from_now: Option<i64> = row.get(column)?;
        let from_now = from_now.map(SignedDuration::from_millis);
        StoreResult::Ok(from_now.and_then(|it| now.checked_add(it).ok()))
    };
    let device: Option<i64> = row.get("workdir_device")?;
    let inode: Option<i64> = row.get("workdir_inode")?;
    let seconds = count("deadline_seconds")?;
    Ok(ResumeState {
        definition,
        deadline: from_now("deadline_in")?.map(|at| (at, seconds)),
        timeout: count("timeout")?,
        stream: flag("stream")?,
        webhooks: row.json("webhooks")?.unwrap_or_default(),
        waiting_since: from_now("paused_in")?,
        is_held: flag("held")?,
        workdir: device.zip(inode).map(|(device, inode)| FileId {
            device: device.cast_unsigned(),
            inode: inode.cast_unsigned(),
        }),
    })
}

/// The usage of a run by model, without tool calls; empty before the first reply.
pub fn resumed_models(row: &Row<'_>, run: &Run) -> StoreResult<Vec<ModelUsage>> {
    Ok(run_values::resumed_models(row.get("model_usage")?, run))
}

/// What [`usage`] reads, from `runs AS r`.
pub const USAGE_COLUMNS: &str = "r.input_tokens, r.output_tokens, r.cache_read_tokens, r.cache_write_tokens, r.model_calls, \
     r.tool_calls, r.cost, r.unreported";

/// The usage that begins with this column.
pub fn usage(row: &Row<'_>, first: usize) -> StoreResult<Usage> {
    let cost: Option<u64> = row.get(first + 6)?;
    Ok(Usage {
        tokens: TokenUsage {
            input: row.get(first)?,
            output: row.get(first + 1)?,
            cache_read: row.get(first + 2)?,
            cache_write: row.get(first + 3)?,
            reasoning: 0,
        },
        model_calls: row.get(first + 4)?,
        tool_calls: row.get(first + 5)?,
        cost: cost.map(Cost),
        unreported: row.get(first + 7)?,
    })
}

#[cfg(test)]
mod tests {
    use super::{PENDING_INPUTS, SUMMARY_COLUMNS, TASK_CHARS};
    use crate::store::inputs::MAX_RUN_INPUTS;

    #[test]
    fn a_summary_reads_one_character_more_than_the_limit() {
        let cut = format!("1, {})", TASK_CHARS + 1);
        assert!(SUMMARY_COLUMNS.contains(&cut));
        let bytes = format!("1 FOR {})", 4 * (TASK_CHARS + 1));
        assert!(SUMMARY_COLUMNS.contains(&bytes));
        assert!(PENDING_INPUTS.contains(&format!("LIMIT {MAX_RUN_INPUTS})")));
    }
}
