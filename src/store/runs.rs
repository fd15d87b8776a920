//! The contract for runs: writing them, reading them, and listing them.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::failure::FailureCode;
use crate::domain::input::InputKind;
use crate::domain::run::{Run, RunId, Status};
use crate::domain::run_ref::IdPart;
use crate::domain::score::{ScoreCondition, ScoreFilter};
use crate::domain::search_text::SearchText;
use crate::domain::usage::{Cost, ModelUsage};
use crate::domain::variant::Variant;
use crate::record::entry::RecordedEntry;
use crate::store::{ClaimedRun, IdempotencyKey, ResumeState, StoreError, Write};

/// A page of runs ends when their texts have this many bytes: each run may have megabytes.
pub const PAGE_BYTES: usize = 8 << 20;

/// Characters of a task that [`RunRecords::tree`] shows.
pub const TASK_CHARS: usize = 2_048;

/// The ids that a search for the end of an id reads: no index has the ends, because every run would pay for it.
pub const MAX_SCANNED_IDS: u32 = 1_000_000;
/// The runs that a search for the beginning of an id reads: those of an owner may be few of them.
pub const MAX_SCANNED_ROWS: u32 = 50_000;

/// A child run, and the id of the tool call that started it.
pub type ChildCall = (RunId, Option<String>);

/// Called with the root of each fire-and-forget write that failed, and of each tree that this node has lost to others, on the
/// store's own thread. It must not block.
pub type WriteFailedFn = Box<dyn Fn(RunId) + Send + Sync>;

/// Writes of one caller are committed in the order in which they were passed.
pub trait RunRecords: Send + Sync + 'static {
    /// Commits one write with its entries, all or nothing, and returns the number of its last event (0 without
    /// events). Events are published after the commit.
    fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Commits a write and others in the same transaction, or none of them. A write of `others` to a run that has ended is
    /// left out.
    fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Queues a write and returns before its commit. The store logs a failure. After one, all later writes to the tree fail
    /// until [`RunRecords::clear_failed`], so that the record has no gap.
    fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Sets the callback for failed fire-and-forget writes and lost trees. Only the first call has an effect.
    fn on_write_failed(&self, callback: WriteFailedFn);

    /// Accepts writes to these trees again. They continue from the last commit. Returns the roots of those that this node owns.
    fn clear_failed(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<HashSet<RunId>, StoreError>>;

    /// One run, as committed. `tree` of a run that has not ended is the sum of the committed usage below it.
    fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>>;

    /// A page of runs, newest first. It ends early with the run that reaches [`PAGE_BYTES`], or when the search has read as
    /// many runs, or taken as long, as one page may.
    fn list(&self, filter: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>>;

    /// How many runs of these statuses match a filter, each counted up to [`RunFilter::limit`]. The filter's status, and the
    /// conditions that no index contains, do not count.
    fn count(
        &self,
        filter: RunFilter,
        statuses: Vec<Status>,
    ) -> BoxFuture<'_, Result<Vec<StatusCount>, StoreError>>;

    /// Runs of a session, newest first. The page ends early with the run that reaches [`PAGE_BYTES`].
    fn session_runs(&self, query: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// Runs whose ids begin or end so, newest first, at most `limit`; only those of this owner if one is given. Beginnings are
    /// found among the newest [`MAX_SCANNED_ROWS`] runs that have them, ends among the newest [`MAX_SCANNED_IDS`].
    fn runs_named(
        &self,
        part: IdPart,
        owner: Option<String>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<RunId>, StoreError>>;

    /// The run and all its descendants, in the order in which they were created. They have no inputs and final texts, and
    /// only the first [`TASK_CHARS`] characters of their tasks and one more: a tree may have thousands of runs.
    fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// The direct children of a run, in the order in which they were created.
    fn children(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>>;

    /// The direct children of a run with their tool calls, in the order in which they were created.
    fn child_calls(&self, id: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>>;

    /// Whether a client has paused the run.
    fn is_held(&self, id: RunId) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// The entries of a run, in order.
    fn entries(&self, id: RunId) -> BoxFuture<'_, Result<Vec<RecordedEntry>, StoreError>>;

    /// The recorded definition of a run's agent: see [`ResumeState::definition`]. `None` if an older version accepted the
    /// run.
    fn definition(&self, id: RunId) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>>;

    /// The definitions with this digest: see [`crate::store::NewRun::pinned_agents`].
    fn pinned_agents(&self, digest: Digest) -> BoxFuture<'_, Result<Option<Arc<str>>, StoreError>>;

    /// The bytes with these digests. Digests that no run refers to are left out.
    fn blobs(&self, digests: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>>;

    /// Runs that have not ended and whose tree does not sleep, parents before their children, then oldest first. Their `tree` is
    /// a sum, as in [`RunRecords::run`].
    fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>>;

    /// The runs of these trees that have not ended, as [`RunRecords::unfinished_runs`].
    fn unfinished_trees(
        &self,
        roots: Vec<RunId>,
    ) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>>;

    /// The trees, of these roots or of all, that sleep: all runs of theirs that have not ended wait for a time or an event.
    fn sleeping_trees(
        &self,
        roots: Option<Vec<RunId>>,
    ) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>>;

    /// What the record has of those of these trees whose unfinished runs all wait.
    fn waits_of(&self, roots: Vec<RunId>) -> BoxFuture<'_, Result<Vec<SleepingTree>, StoreError>>;

    /// The run that an idempotency key has accepted, until the key expires.
    fn claimed_run(
        &self,
        key: IdempotencyKey,
    ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>>;
}

/// What the record has of a tree that waits.
#[derive(Clone, Debug)]
pub struct SleepingTree {
    pub root: RunId,
    pub owner: Option<String>,
    pub session: Option<String>,
    /// How many of its calls wait.
    pub waits: u32,
    /// Those that wait for people, and since when.
    pub inputs: Vec<(InputKind, Timestamp)>,
    /// When the first of these ends by itself; `None` if none does.
    pub until: Option<Timestamp>,
    /// Whether something was recorded after the last of them began.
    pub has_changed: bool,
}

/// A run that no process drives, with what its continuation needs.
#[derive(Clone, Debug)]
pub struct UnfinishedRun {
    pub run: Run,
    /// `None` if an older version accepted the run.
    pub resume_state: Option<ResumeState>,
    /// Its usage by model, without tool calls; empty before the first reply.
    pub models: Vec<ModelUsage>,
}

/// Selects the runs of a page. Conditions that are `None` or empty match every run.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    pub agent: Option<String>,
    /// The API key that has accepted the run.
    pub owner: Option<String>,
    pub status: Option<Status>,
    /// Only the tree of this root.
    pub root: Option<RunId>,
    /// If false, and without `root`, only root runs.
    pub include_children: bool,
    pub session: Option<String>,
    /// The run has all of these labels.
    pub labels: Vec<(String, String)>,
    /// The run failed with this code.
    pub error_code: Option<FailureCode>,
    /// The version that the run got of an agent with a rollout.
    pub variant: Option<Variant>,
    /// Its scores match all of these.
    pub scores: Vec<ScoreFilter>,
    /// The run and its descendants cost at least this.
    pub min_cost: Option<Cost>,
    /// The run and its descendants cost at most this.
    pub max_cost: Option<Cost>,
    /// Its input or final text contains this text, or its id begins or ends with it. A whole id finds this run alone, a child too.
    pub text: Option<SearchText>,
    /// Only runs that were accepted at this time or later.
    pub since: Option<Timestamp>,
    /// Only runs that were accepted before this time.
    pub until: Option<Timestamp>,
    /// Only runs that were created before this one (the cursor).
    pub before: Option<RunId>,
    pub limit: usize,
    /// Whether long texts are cut: see [`crate::domain::run_excerpt`].
    pub cut_texts: bool,
}

impl RunFilter {
    /// Whether it has conditions that no index contains: the rows of runs are compared with them.
    pub fn compares_rows(&self) -> bool {
        let has_cost = self.min_cost.is_some() || self.max_cost.is_some();
        let has_row_value = self.error_code.is_some() || self.variant.is_some();
        self.text.is_some() || has_row_value || has_cost || !self.scores.is_empty()
    }

    /// The names of scores that each match has.
    pub fn scored_names(&self) -> impl Iterator<Item = &str> {
        let wanted = self.scores.iter();
        let wanted = wanted.filter(|it| it.condition != ScoreCondition::None);
        wanted.map(|it| it.name.as_str())
    }

    /// Whether a tree of this cost matches.
    pub fn includes_cost(&self, cost: Option<Cost>) -> bool {
        self.min_cost
            .is_none_or(|min| cost.is_some_and(|cost| cost >= min))
            && self
                .max_cost
                .is_none_or(|max| cost.is_some_and(|cost| cost <= max))
    }
}

/// How many runs have a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusCount {
    pub status: Status,
    pub runs: usize,
    /// Whether there may be more.
    pub is_minimum: bool,
}

/// What a search for runs has found, newest first.
#[derive(Debug, Default)]
pub struct Matches {
    /// At most as many as the limit of the filter.
    pub ids: Vec<RunId>,
    /// The search continues before this run; `None` if no more runs match.
    pub next: Option<RunId>,
}

/// A page of runs.
#[derive(Clone, Debug, Default)]
pub struct RunPage {
    /// May be fewer than the limit, or none, although more runs match.
    pub runs: Vec<Run>,
    /// [`RunFilter::before`] of the next page; `None` if no more runs match.
    pub next: Option<RunId>,
}

/// Selects runs of a session.
#[derive(Clone, Debug, Default)]
pub struct SessionQuery {
    /// The API key that the session belongs to; `None` without keys.
    pub owner: Option<String>,
    pub name: String,
    pub agent: Option<String>,
    pub status: Option<Status>,
    /// Only runs that were created before this one (the cursor).
    pub before: Option<RunId>,
    pub limit: usize,
    /// See [`RunFilter::cut_texts`].
    pub cut_texts: bool,
    /// Whether runs whose record is damaged are left out, with a log line, instead of failing the read.
    pub skip_damaged: bool,
}
