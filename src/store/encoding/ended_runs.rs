//! What is counted of a run that has ended: sums of usage for a quarter hour, by owner, session, labels, agent and model.

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::domain::calendar::quarter_of;
use crate::domain::run::Status;
use crate::domain::usage::{ModelUsage, Usage};
use crate::domain::usage_sums::UsageSums;
use crate::store::FinishedRun;
use crate::store::encoding::integers::{signed, unsigned};
use crate::store::encoding::run_values;

/// Names in `usage_values`: sessions, models, names of labels, and, with the label's name, the values of a label.
pub const SESSION: &str = "session";
pub const MODEL: &str = "model";
pub const LABELS: &str = "labels";
pub const LABEL_PREFIX: &str = "label.";

/// What is counted of an ended run.
pub struct EndedRow {
    pub is_child: bool,
    pub agent: String,
    pub model: String,
    pub models: Option<String>,
    pub started_at: Option<i64>,
    /// Those of the root, for a child to be replaced by its root's.
    pub root: RootRow,
}

/// What a root's row has for all runs of its tree.
pub struct RootRow {
    pub created_at: i64,
    pub owner: Option<String>,
    pub session: Option<String>,
    pub labels: Option<String>,
}

/// An ended run, as it is counted.
pub struct EndedRun {
    pub row: EndedRow,
    pub status: Status,
    pub finished_at: i64,
    pub usage: Usage,
}

/// What a sum is about. Empty texts stand for absent values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Series {
    pub owner: String,
    pub session: String,
    /// A JSON object with sorted names.
    pub labels: String,
    pub agent: String,
    pub model: String,
}

impl Series {
    /// Of the values, each with its length.
    pub fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        let Self {
            owner,
            session,
            labels,
            agent,
            model,
        } = self;
        for value in [owner, session, labels, agent, model] {
            digest.update((value.len() as u64).to_be_bytes());
            digest.update(value.as_bytes());
        }
        digest.finalize().into()
    }
}

impl EndedRow {
    pub fn ended(self, finished: &FinishedRun) -> EndedRun {
        EndedRun {
            row: self,
            status: finished.outcome.status(),
            finished_at: finished.finished_at.as_millisecond(),
            usage: finished.progress.usage,
        }
    }
}

impl EndedRun {
    /// Calls `add` with a quarter hour, what the sums are about, and the sums: once for the run's last model, and once for
    /// each other one.
    pub fn for_each_sum<E>(
        self,
        mut add: impl FnMut(i64, &Series, &UsageSums) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self {
            row,
            status,
            finished_at,
            usage,
        } = self;
        let created_at = Timestamp::from_millisecond(row.root.created_at).unwrap_or_default();
        let quarter = quarter_of(created_at);
        let mut models = run_values::model_usage(row.models.as_deref());
        let mut own = own_sums(&row.model, usage, &mut models);
        own.runs = 1;
        own.roots = i128::from(!row.is_child);
        own.failed = i128::from(status == Status::Failed);
        own.cancelled = i128::from(status == Status::Cancelled);
        if let Some(started_at) = row.started_at {
            let milliseconds = finished_at.saturating_sub(started_at);
            own.durations.add(unsigned(milliseconds));
        }
        let mut series = Series {
            owner: row.root.owner.unwrap_or_default(),
            session: row.root.session.unwrap_or_default(),
            labels: row.root.labels.unwrap_or_default(),
            agent: row.agent,
            model: row.model,
        };
        add(quarter, &series, &own)?;
        for ModelUsage { model, usage } in models {
            series.model = model;
            add(quarter, &series, &sums_of(&usage))?;
        }
        Ok(())
    }
}

/// The sums of a run's usage without that of other models than its last. Leaves those in `models`.
fn own_sums(model: &str, usage: Usage, models: &mut Vec<ModelUsage>) -> UsageSums {
    let mut own = sums_of(&usage);
    if models.is_empty() {
        return own;
    }
    let last = models.iter().position(|it| it.model == model);
    let last = last.map(|at| models.remove(at).usage).unwrap_or_default();
    own.priced = i128::from(last.cost.is_some());
    own.reasoning_tokens = last.tokens.reasoning.into();
    for other in models.iter() {
        let others = sums_of(&other.usage);
        own.input_tokens = (own.input_tokens - others.input_tokens).max(0);
        own.output_tokens = (own.output_tokens - others.output_tokens).max(0);
        own.cache_read_tokens = (own.cache_read_tokens - others.cache_read_tokens).max(0);
        own.cache_write_tokens = (own.cache_write_tokens - others.cache_write_tokens).max(0);
        own.model_calls = (own.model_calls - others.model_calls).max(0);
        own.cost = (own.cost - others.cost).max(0);
        own.unreported = (own.unreported - others.unreported).max(0);
    }
    own
}

fn sums_of(usage: &Usage) -> UsageSums {
    // As the run's row has them.
    let number = |count: u64| i128::from(signed(count));
    let tokens = &usage.tokens;
    UsageSums {
        input_tokens: number(tokens.input),
        output_tokens: number(tokens.output),
        cache_read_tokens: number(tokens.cache_read),
        cache_write_tokens: number(tokens.cache_write),
        reasoning_tokens: number(tokens.reasoning),
        model_calls: number(usage.model_calls),
        tool_calls: number(usage.tool_calls),
        cost: usage.cost.map_or(0, |cost| number(cost.0)),
        priced: i128::from(usage.cost.is_some()),
        unreported: number(usage.unreported),
        ..UsageSums::default()
    }
}
