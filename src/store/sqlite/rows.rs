//! Converts runs, steps and events to columns and back.

use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::types::{FromSql, ToSqlOutput, Type, ValueRef};
use rusqlite::{Row, RowIndex, Statement};

use crate::domain::content::Content;
use crate::domain::run::{Depth, Run, RunId, now};
use crate::domain::usage::{Cost, ModelUsage, TokenUsage, TreeUsage, Usage};
use crate::store::encoding::columns::columns;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::{integers, run_values};
use crate::store::{ClaimedRun, ResumeState};
use crate::workdirs::file_id::FileId;

/// The columns of `runs AS r` that [`run`] reads. The texts are expressions because not every list reads them.
// A root's row has the number of its own last event only; that of its tree is in the log.
macro_rules! run_columns {
    ($what:ident, $input:expr, $task:expr, $content:expr, $partial_content:expr) => {
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
            LastEvent: "CASE WHEN r.child THEN r.last_event ELSE max(r.last_event, coalesce((SELECT e.last_seq \
                FROM entries e WHERE e.root = r.id ORDER BY e.last_seq DESC LIMIT 1), 0)) END",
            InputTokens: "r.input_tokens",
            OutputTokens: "r.output_tokens",
            CacheReadTokens: "r.cache_read_tokens",
            CacheWriteTokens: "r.cache_write_tokens",
            ModelCalls: "r.model_calls",
            ToolCalls: "r.tool_calls",
            Cost: "r.cost",
            Unreported: "r.unreported",
            TreeRuns: "r.tree_runs",
            TreeInputTokens: "r.tree_input_tokens",
            TreeOutputTokens: "r.tree_output_tokens",
            TreeCacheReadTokens: "r.tree_cache_read_tokens",
            TreeCacheWriteTokens: "r.tree_cache_write_tokens",
            TreeModelCalls: "r.tree_model_calls",
            TreeToolCalls: "r.tree_tool_calls",
            TreeCost: "r.tree_cost",
            TreeUnreported: "r.tree_unreported",
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

run_columns!(names, "", "", "", "");

/// A run with its texts.
pub const RUN_COLUMNS: &str = run_columns!(
    list,
    "CASE WHEN r.input IS NULL THEN (SELECT t.input FROM texts t WHERE t.run = r.id) ELSE r.input END",
    "CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END",
    "r.content",
    "r.partial_content"
);

/// A run without its texts, except for the beginning of its task: see [`crate::store::runs::TASK_CHARS`].
pub const SUMMARY_COLUMNS: &str = run_columns!(
    list,
    "''",
    "substr(CASE WHEN r.input IS NULL THEN (SELECT t.task FROM texts t WHERE t.run = r.id) ELSE r.task END, 1, 2049)",
    "NULL",
    "NULL"
);

/// What [`definition_hash`] and [`resume_state`] read besides a run. Their names are unique behind [`RUN_COLUMNS`].
pub const RESUME_COLUMNS: &str = "r.definition AS definition, r.deadline_at AS deadline_at, \
     r.deadline_seconds AS deadline_seconds, r.timeout AS timeout, r.stream AS stream, r.webhook AS webhooks, \
     r.waiting_since AS paused_since, r.held AS held, \
     r.workdir_device AS workdir_device, r.workdir_inode AS workdir_inode, \
     r.model_usage AS model_usage";

/// What [`usage`] reads for [`UsageColumns::find`], from `runs AS r`.
pub const USAGE_COLUMNS: &str = "r.input_tokens AS input_tokens, r.output_tokens AS output_tokens, \
     r.cache_read_tokens AS cache_read_tokens, r.cache_write_tokens AS cache_write_tokens, \
     r.model_calls AS model_calls, r.tool_calls AS tool_calls, r.cost AS cost, r.unreported AS unreported";

/// Reads a run from [`RUN_COLUMNS`] or [`SUMMARY_COLUMNS`]. `tree` of a run that has not ended is empty.
pub fn run(row: &Row<'_>) -> rusqlite::Result<Run> {
    use RunColumn as C;
    let tree = match get::<Option<i64>>(row, C::TreeRuns)? {
        Some(runs) => TreeUsage {
            runs: integers::unsigned(runs),
            usage: usage(row, &TREE_USAGE)?,
        },
        None => TreeUsage::default(),
    };
    Ok(Run {
        id: id(row, C::Id as usize)?,
        root_id: id(row, C::Root as usize)?,
        parent_id: get::<Option<[u8; 16]>>(row, C::Parent)?.map(from_bytes),
        owner: get(row, C::Owner)?,
        session: get(row, C::Session)?,
        depth: Depth(get(row, C::Depth)?),
        tool_call_id: get(row, C::ToolCallId)?,
        agent: get(row, C::Agent)?,
        agent_version: get(row, C::AgentVersion)?,
        status: row
            .get_ref(C::Status as usize)?
            .as_str()?
            .parse()
            .map_err(|()| conversion_error(C::Status as usize, "unknown status"))?,
        input: input(row, C::Input as usize)?,
        task: get(row, C::Task)?,
        label: get(row, C::Label)?,
        completion_status: get(row, C::CompletionStatus)?,
        labels: json(row, C::Labels as usize)?.unwrap_or_default(),
        content: get(row, C::Content)?,
        structured: get::<Option<bool>>(row, C::Structured)?.unwrap_or(false),
        partial_content: get(row, C::PartialContent)?,
        model: get(row, C::Model)?,
        stop_reason: get(row, C::StopReason)?,
        turns: get(row, C::Turns)?,
        usage: usage(row, &OWN_USAGE)?,
        tree,
        error: json(row, C::Error as usize)?,
        cancel_reason: get(row, C::CancelReason)?,
        attempt: get(row, C::Attempt)?,
        created_at: time(row, C::CreatedAt as usize)?.unwrap_or_default(),
        started_at: time(row, C::StartedAt as usize)?,
        finished_at: time(row, C::FinishedAt as usize)?,
        waited_ms: waited_ms(row)?,
        last_event: integers::unsigned(get(row, C::LastEvent)?),
        waiting_for: json(row, C::WaitingFor as usize)?,
        pending_approvals: Vec::new(),
        is_cut: false,
        warnings: json(row, C::Warnings as usize)?.unwrap_or_default(),
        fork: json(row, C::Fork as usize)?,
    })
}

fn get<T: FromSql>(row: &Row<'_>, column: RunColumn) -> rusqlite::Result<T> {
    row.get(column as usize)
}

/// Reads an input: a text, or a blob with the JSON of its parts.
fn input(row: &Row<'_>, column: usize) -> rusqlite::Result<Content> {
    match row.get_ref(column)? {
        ValueRef::Blob(parts) => serde_json::from_slice(parts).map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Blob, Box::new(error))
        }),
        text => Ok(Content::from(text.as_str()?)),
    }
}

pub fn input_value(input: &Content) -> ToSqlOutput<'_> {
    match input {
        Content::Text(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
        parts @ Content::Parts(_) => {
            let json = serde_json::to_vec(parts).unwrap_or_default();
            ToSqlOutput::Owned(rusqlite::types::Value::Blob(json))
        }
    }
}

/// How long the run was paused, until now if it is paused.
fn waited_ms(row: &Row<'_>) -> rusqlite::Result<u64> {
    let before = get::<Option<i64>>(row, RunColumn::Waited)?.unwrap_or(0);
    let Some(since) = get::<Option<i64>>(row, RunColumn::WaitingSince)? else {
        return Ok(integers::unsigned(before));
    };
    let end = get::<Option<i64>>(row, RunColumn::FinishedAt)?;
    let end = end.unwrap_or_else(|| now().as_millisecond());
    Ok(integers::unsigned(before + (end - since).max(0)))
}

/// Reads [`RESUME_COLUMNS`]; `None` if an older version accepted the run.
pub fn definition_hash(row: &Row<'_>) -> rusqlite::Result<Option<Hash>> {
    row.get("definition")
}

/// Reads [`RESUME_COLUMNS`].
pub fn resume_state(row: &Row<'_>, definition: Arc<str>) -> rusqlite::Result<ResumeState> {
    let count = |column: &str| {
        let count = row.get::<_, Option<i64>>(column)?;
        Ok::<_, rusqlite::Error>(count.map_or(0, integers::unsigned))
    };
    let seconds = count("deadline_seconds")?;
    Ok(ResumeState {
        definition,
        deadline: time(row, "deadline_at")?.map(|at| (at, seconds)),
        timeout: count("timeout")?,
        stream: count("stream")? != 0,
        webhooks: json(row, "webhooks")?.unwrap_or_default(),
        waiting_since: time(row, "paused_since")?,
        is_held: count("held")? != 0,
        workdir: workdir(row)?,
    })
}

fn workdir(row: &Row<'_>) -> rusqlite::Result<Option<FileId>> {
    let device: Option<i64> = row.get("workdir_device")?;
    let inode: Option<i64> = row.get("workdir_inode")?;
    Ok(device.zip(inode).map(|(device, inode)| FileId {
        device: device.cast_unsigned(),
        inode: inode.cast_unsigned(),
    }))
}

/// Reads the columns `run`, `body` and `message` of a claim.
pub fn claimed_run(row: &Row<'_>) -> rusqlite::Result<ClaimedRun> {
    Ok(ClaimedRun {
        run: id(row, "run")?,
        body_hash: row.get("body")?,
        number: row.get("message")?,
    })
}

/// Where a row has usage.
pub struct UsageColumns {
    input_tokens: usize,
    output_tokens: usize,
    cache_read_tokens: usize,
    cache_write_tokens: usize,
    model_calls: usize,
    tool_calls: usize,
    cost: usize,
    unreported: usize,
}

/// A run's own usage in [`RUN_COLUMNS`].
const OWN_USAGE: UsageColumns = UsageColumns {
    input_tokens: RunColumn::InputTokens as usize,
    output_tokens: RunColumn::OutputTokens as usize,
    cache_read_tokens: RunColumn::CacheReadTokens as usize,
    cache_write_tokens: RunColumn::CacheWriteTokens as usize,
    model_calls: RunColumn::ModelCalls as usize,
    tool_calls: RunColumn::ToolCalls as usize,
    cost: RunColumn::Cost as usize,
    unreported: RunColumn::Unreported as usize,
};

/// The usage of a run's tree in [`RUN_COLUMNS`].
const TREE_USAGE: UsageColumns = UsageColumns {
    input_tokens: RunColumn::TreeInputTokens as usize,
    output_tokens: RunColumn::TreeOutputTokens as usize,
    cache_read_tokens: RunColumn::TreeCacheReadTokens as usize,
    cache_write_tokens: RunColumn::TreeCacheWriteTokens as usize,
    model_calls: RunColumn::TreeModelCalls as usize,
    tool_calls: RunColumn::TreeToolCalls as usize,
    cost: RunColumn::TreeCost as usize,
    unreported: RunColumn::TreeUnreported as usize,
};

impl UsageColumns {
    /// Finds [`USAGE_COLUMNS`] in a statement.
    pub fn find(sql: &Statement<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            input_tokens: sql.column_index("input_tokens")?,
            output_tokens: sql.column_index("output_tokens")?,
            cache_read_tokens: sql.column_index("cache_read_tokens")?,
            cache_write_tokens: sql.column_index("cache_write_tokens")?,
            model_calls: sql.column_index("model_calls")?,
            tool_calls: sql.column_index("tool_calls")?,
            cost: sql.column_index("cost")?,
            unreported: sql.column_index("unreported")?,
        })
    }
}

pub fn usage(row: &Row<'_>, columns: &UsageColumns) -> rusqlite::Result<Usage> {
    let count = |column: usize| row.get::<_, i64>(column).map(integers::unsigned);
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
        cost: row
            .get::<_, Option<i64>>(columns.cost)?
            .map(|cost| Cost(integers::unsigned(cost))),
        unreported: count(columns.unreported)?,
    })
}

/// [`RESUME_COLUMNS`]: the usage of a run by model, without tool calls; empty before the first reply.
pub fn resumed_models(row: &Row<'_>, run: &Run) -> rusqlite::Result<Vec<ModelUsage>> {
    let stored: Option<String> = row.get("model_usage")?;
    Ok(run_values::resumed_models(stored.as_deref(), run))
}

pub fn id_bytes(id: &RunId) -> &[u8; 16] {
    id.0.as_bytes()
}

/// The id of a run, from [`RUN_COLUMNS`].
pub fn run_id(row: &Row<'_>) -> rusqlite::Result<RunId> {
    id(row, RunColumn::Id as usize)
}

pub fn id(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<RunId> {
    row.get(column).map(from_bytes)
}

fn from_bytes(bytes: [u8; 16]) -> RunId {
    RunId(uuid::Uuid::from_bytes(bytes))
}

/// Reads milliseconds since 1970.
pub fn time(row: &Row<'_>, column: impl RowIndex) -> rusqlite::Result<Option<Timestamp>> {
    let column = column.idx(row.as_ref())?;
    row.get::<_, Option<i64>>(column)?
        .map(Timestamp::from_millisecond)
        .transpose()
        .map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, Box::new(error))
        })
}

fn json<T: serde::de::DeserializeOwned>(
    row: &Row<'_>,
    column: impl RowIndex,
) -> rusqlite::Result<Option<T>> {
    let column = column.idx(row.as_ref())?;
    row.get_ref(column)?
        .as_str_or_null()?
        .map(serde_json::from_str)
        .transpose()
        .map_err(|error| {
            rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
        })
}

fn conversion_error(column: usize, reason: &'static str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, reason.into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_summary_reads_one_character_more_than_the_limit() {
        let cut = format!("1, {})", crate::store::runs::TASK_CHARS + 1);
        assert!(super::SUMMARY_COLUMNS.contains(&cut));
    }
}
