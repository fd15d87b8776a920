//! Runs: their identity, position in a tree, state and outcome. Root runs and child runs have the same record.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::domain::content::Content;
use crate::domain::failure::Failure;
use crate::domain::input::{InputRequest, Question};
use crate::domain::score::RunScores;
use crate::domain::suspension::SuspensionCause;
use crate::domain::usage::{TreeUsage, Usage};
use crate::domain::variant::Variant;
use crate::domain::waiting_for::{Wait, WaitingFor};
use crate::domain::warning::RunWarning;

/// The deepest tree that any configuration may allow, in levels below the root.
pub const HARD_MAX_DEPTH: u8 = 5;
/// Levels below a root if its agent sets no `max_depth`.
pub const DEFAULT_MAX_DEPTH: u8 = 3;

/// The id of a run: `run_` and a UUIDv7. Ids sort by the time of creation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(transparent)]
pub struct RunId(#[schemars(with = "String", regex(pattern = "^run_[0-9a-f-]{36}$"))] pub Uuid);

/// The newest id that this process created or found in its store.
static NEWEST_ID: Mutex<RunId> = Mutex::new(RunId(Uuid::nil()));

impl RunId {
    /// A new id, which sorts after all others even if the clock was set back. Ids are created only here.
    #[expect(clippy::disallowed_methods, reason = "ids are created only here")]
    pub fn new() -> Self {
        let id = Self(Uuid::now_v7());
        let mut newest = NEWEST_ID.lock().unwrap_or_else(PoisonError::into_inner);
        *newest = id.bumped_past(*newest);
        *newest
    }

    /// The id's text, written to the buffer.
    pub fn encode(self, buffer: &mut [u8; 40]) -> &str {
        buffer[..4].copy_from_slice(b"run_");
        self.0.hyphenated().encode_lower(&mut buffer[4..]);
        std::str::from_utf8(buffer).unwrap_or_default()
    }

    /// Ensures that all later ids sort after this one.
    pub fn advance_newest(self) {
        let mut newest = NEWEST_ID.lock().unwrap_or_else(PoisonError::into_inner);
        *newest = self.max(*newest);
    }

    /// This id if it sorts after `newest`; otherwise `newest` plus a small random number.
    fn bumped_past(self, newest: Self) -> Self {
        if self > newest {
            return self;
        }
        // A UUIDv7 has 48 bits of milliseconds, 4 of version, 12 random ones, 2 of variant and 62 random ones (RFC 9562).
        const RANDOM: u128 = (1 << 62) - 1;
        let (id_bits, newest_bits) = (self.0.as_u128(), newest.0.as_u128());
        let last = (newest_bits & RANDOM) + (id_bits & 0xffff_ffff) + 1;
        let counted = ((newest_bits >> 80) << 12 | (newest_bits >> 64) & 0xfff) + (last >> 62);
        let (time, count) = (counted >> 12, counted & 0xfff);
        Self(Uuid::from_u128(
            time << 80 | 7 << 76 | count << 64 | 2 << 62 | last & RANDOM,
        ))
    }
}

impl Default for RunId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.encode(&mut [0; 40]))
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a run id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a run's id is run_ and a UUID")]
pub struct InvalidRunId;

impl FromStr for RunId {
    type Err = InvalidRunId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uuid = text
            .strip_prefix("run_")
            .filter(|rest| rest.len() == 36)
            .ok_or(InvalidRunId)?;
        Uuid::try_parse(uuid).map(Self).map_err(|_| InvalidRunId)
    }
}

impl Serialize for RunId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.encode(&mut [0; 40]))
    }
}

impl<'de> Deserialize<'de> for RunId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The levels of a run below its root; 0 for a root run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Depth(pub u8);

/// The position of a run in its tree. Only [`Scope::child`] creates the one of a child run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// This run.
    pub run: RunId,
    /// The root of the tree; the run itself if it is a root run.
    pub root: RunId,
    /// The run whose tool call started this one.
    pub parent: Option<RunId>,
    /// Levels below the root.
    pub depth: Depth,
    /// The deepest level that this run's subtree may reach.
    pub max_depth: u8,
    /// Whether neither this run nor any of its ancestors set that level.
    pub has_default_depth: bool,
}

impl Scope {
    /// The scope of a root run. `max_depth` limits the tree; unset means [`DEFAULT_MAX_DEPTH`].
    pub fn root(run: RunId, max_depth: Option<u8>) -> Self {
        Self {
            run,
            root: run,
            parent: None,
            depth: Depth(0),
            max_depth: max_depth.unwrap_or(DEFAULT_MAX_DEPTH).min(HARD_MAX_DEPTH),
            has_default_depth: max_depth.is_none(),
        }
    }

    /// The deepest level of ad-hoc sub-agents below this run, whose agent allows `max_depth`: that level if the tree has
    /// the default limit, otherwise the lower of the two.
    pub fn max_ad_hoc_depth(&self, max_depth: u8) -> u8 {
        match self.has_default_depth {
            true => max_depth.min(HARD_MAX_DEPTH),
            false => self.max_depth.min(max_depth),
        }
    }

    pub fn can_delegate(&self) -> bool {
        self.depth.0 < self.max_depth
    }

    /// The scope of a child. `own_max_depth` is the limit of the child's own agent file; it can only lower the tree's limit.
    /// `None` if this run is at `limit`: its own `max_depth`, or [`Scope::max_ad_hoc_depth`] for an ad-hoc sub-agent.
    pub fn child(&self, run: RunId, own_max_depth: Option<u8>, limit: u8) -> Option<Self> {
        if self.depth.0 >= limit {
            return None;
        }
        let depth = self.depth.0 + 1;
        let max_depth = own_max_depth.map_or(self.max_depth, |levels| {
            self.max_depth.min(depth.saturating_add(levels))
        });
        Some(Self {
            run,
            root: self.root,
            parent: Some(self.run),
            depth: Depth(depth),
            max_depth,
            has_default_depth: self.has_default_depth && own_max_depth.is_none(),
        })
    }
}

/// The status of a run. The last three are terminal: a run never leaves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "RunStatus")]
pub enum Status {
    /// Accepted and stored, but not started yet.
    Queued,
    /// Sending requests to its model, executing tools, or waiting for its children.
    Running,
    /// Waiting for an approval, its client, a batch of its provider, or waiting child runs.
    Waiting,
    /// A cancel was requested; the run or some of its descendants have not ended yet.
    Cancelling,
    /// Ended with a final text.
    Completed,
    /// Ended with an error.
    Failed,
    /// Ended by a cancel request.
    Cancelled,
}

impl Status {
    /// All statuses, in the order of a run's life.
    pub const ALL: [Self; 7] = [
        Self::Queued,
        Self::Running,
        Self::Waiting,
        Self::Cancelling,
        Self::Completed,
        Self::Failed,
        Self::Cancelled,
    ];

    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// The name in JSON, SQL and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Cancelling => "cancelling",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl FromStr for Status {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or(())
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a final text.
    Completed {
        content: String,
        /// Whether JSON was requested and the text is valid.
        structured: bool,
    },
    /// With an error.
    Failed {
        failure: Failure,
        /// The last text of the model.
        partial: Option<String>,
    },
    /// By a cancel request.
    Cancelled {
        reason: String,
        /// The last text of the model.
        partial: Option<String>,
    },
}

impl Outcome {
    pub fn status(&self) -> Status {
        match self {
            Self::Completed { .. } => Status::Completed,
            Self::Failed { .. } => Status::Failed,
            Self::Cancelled { .. } => Status::Cancelled,
        }
    }
}

/// The record of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub id: RunId,
    pub root_id: RunId,
    pub parent_id: Option<RunId>,
    /// The name of the key that started its root; `None` without keys. Not visible to clients.
    pub owner: Option<String>,
    /// The session that it continues; only root runs have one.
    pub session: Option<String>,
    /// Levels below the root.
    pub depth: Depth,
    /// The parent's tool call that started it.
    pub tool_call_id: Option<String>,
    pub agent: String,
    /// The version of the definition that it started with.
    pub agent_version: String,
    /// The version that it got; `None` unless it is a root run of an agent with a rollout.
    pub variant: Option<Variant>,
    pub status: Status,
    /// The `input` of a root run as given; the whole message of a child.
    pub input: Content,
    /// The task of a child; `None` for a root run.
    pub task: Option<String>,
    /// The label that the parent gave to an ad-hoc sub-agent.
    pub label: Option<String>,
    /// `complete` or `incomplete`, for an ad-hoc sub-agent.
    pub completion_status: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The final text of a completed run.
    pub content: Option<String>,
    /// Whether JSON was requested and `content` is valid.
    pub structured: bool,
    /// The last text of a run that failed or was cancelled.
    pub partial_content: Option<String>,
    /// The model that the provider reported in its last reply; before the first reply, the requested model.
    pub model: String,
    /// The provider's own reason for the end of its last reply.
    pub stop_reason: Option<String>,
    /// The number of replies.
    pub turns: u32,
    /// The usage of the run alone.
    pub usage: Usage,
    /// The usage of the run with all its descendants.
    pub tree: TreeUsage,
    pub error: Option<Failure>,
    pub cancel_reason: Option<String>,
    /// How often it was started; more than 1 after a restart.
    pub attempt: u32,
    pub created_at: Timestamp,
    /// When it left the admission queue.
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    /// How long it was paused after its start, in milliseconds; its deadline does not count this time.
    pub waited_ms: u64,
    /// The number of its last event; for a root run, of its tree's last event.
    pub last_event: u64,
    /// What it waits for while it is `waiting`.
    pub waiting_for: Option<WaitingFor>,
    /// Since when it waits.
    pub waiting_since: Option<Timestamp>,
    /// What went wrong without failing it.
    pub warnings: Vec<RunWarning>,
    /// What the run and its descendants ask people for, as far as the store has read it.
    pub pending_inputs: Vec<PendingInput>,
    /// The wait for a time or an event; of a root, one of its tree. Only if it is `waiting`.
    pub world_wait: Option<InputRequest>,
    /// Why its tree is suspended. Only the process that drives it knows, and records nothing of it.
    pub suspended: Option<SuspensionCause>,
    /// Whether its texts are only their beginnings.
    pub is_cut: bool,
    /// What it took over; `None` for other runs.
    pub fork: Option<Box<Fork>>,
    pub scores: RunScores,
}

/// The labels of runs that scorers and evaluations start. Clients cannot set them.
pub const MARKS: [&str; 3] = ["scorer", "evaluation", "evaluation.source"];

/// Whether a root run with these labels belongs to a scorer or an evaluation.
pub fn are_marks(labels: &BTreeMap<String, String>) -> bool {
    MARKS.iter().any(|mark| labels.contains_key(*mark))
}

/// What a run took over from the run that it is a copy of: the root of a fork, and the runs that were copied with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fork {
    /// Only of the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<ForkedFrom>,
    /// Replies up to this turn are copies.
    pub copied_turns: u32,
    /// Copied messages that clients had added.
    #[serde(default)]
    pub copied_messages: u32,
    /// Whether the prompt is assembled when the run starts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub assembles_prompt: bool,
    /// By the run and those below it.
    pub reused: Reused,
    /// The children whose results were copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reused_runs: Vec<ReusedRun>,
}

/// Where a run was forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForkedFrom {
    /// The root of the forked tree, which may be deleted.
    pub run: RunId,
    /// The run of that tree at which it was forked.
    pub at_run: RunId,
    /// The first turn of that run that the fork does itself, if only in part; 0 if its prompt is assembled anew.
    pub turn: u32,
}

/// What a fork took over instead of doing it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reused {
    /// Finished runs whose results were copied, and the runs below them.
    pub runs: u64,
    /// Copied replies of models, and the replies of the reused runs.
    pub turns: u64,
}

/// A finished run whose result was copied. It is not in the fork's tree, and may be deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReusedRun {
    /// The run.
    pub id: RunId,
    /// The name of its agent.
    pub agent: String,
    /// The call that it gave the result of.
    pub tool_call_id: String,
}

/// A tool call that waits for approval, or a question that waits for its answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "PendingApproval")]
pub struct PendingInput {
    /// The run that made the call: decide on it there.
    pub run_id: RunId,
    /// The root of the run's tree.
    pub root_id: RunId,
    /// The name of the run's agent.
    pub agent: String,
    #[serde(flatten)]
    pub request: InputRequest,
}

impl Run {
    /// A run of that agent that is accepted now.
    pub fn queued(scope: &Scope, agent: String) -> Self {
        Self {
            id: scope.run,
            root_id: scope.root,
            parent_id: scope.parent,
            owner: None,
            session: None,
            depth: scope.depth,
            tool_call_id: None,
            agent,
            agent_version: String::new(),
            variant: None,
            status: Status::Queued,
            input: Content::default(),
            task: None,
            label: None,
            completion_status: None,
            labels: BTreeMap::new(),
            content: None,
            structured: false,
            partial_content: None,
            model: String::new(),
            stop_reason: None,
            turns: 0,
            usage: Usage::default(),
            tree: TreeUsage::default(),
            error: None,
            cancel_reason: None,
            attempt: 1,
            created_at: now(),
            started_at: None,
            finished_at: None,
            waited_ms: 0,
            waiting_for: None,
            waiting_since: None,
            pending_inputs: Vec::new(),
            world_wait: None,
            suspended: None,
            is_cut: false,
            fork: None,
            scores: RunScores::new(),
            warnings: Vec::new(),
            last_event: 0,
        }
    }

    /// Whether it belongs to a scorer or an evaluation: it is never scored by itself, and its scores are not counted.
    pub fn is_marked(&self) -> bool {
        are_marks(&self.labels)
    }

    /// Its wait; `None` unless its status is `waiting`.
    pub fn wait(&self) -> Option<Wait> {
        let reason = self
            .waiting_for
            .filter(|_| self.status == Status::Waiting)?;
        let is_for_world = matches!(reason, WaitingFor::Sleep | WaitingFor::Event);
        let world = self.world_wait.as_ref().filter(|_| is_for_world);
        let deadlines = self.pending_inputs.iter().map(|it| it.request.deadline);
        let mut questions = self.pending_questions().map(|(_, question)| question);
        let reconciled = questions.find(|it| it.begun.is_some());
        let reconciled = reconciled.filter(|_| reason == WaitingFor::Reconcile);
        Some(Wait {
            reason,
            since: self.waiting_since?,
            until: match world {
                Some(world) => world.deadline,
                None => deadlines.flatten().min().filter(|_| reason.is_input()),
            },
            event: world.and_then(|it| it.waited_event()),
            call_id: reconciled.map(|it| it.call_id.clone()),
            begun: reconciled.and_then(|it| it.begun.clone()),
        })
    }

    /// The calls of the run and its descendants that wait for approval.
    pub fn pending_approvals(&self) -> impl Iterator<Item = &PendingInput> + Clone {
        let inputs = self.pending_inputs.iter();
        inputs.filter(|it| it.request.question.is_none())
    }

    /// The questions of the run and its descendants that wait for an answer.
    pub fn pending_questions(&self) -> impl Iterator<Item = (&PendingInput, &Question)> + Clone {
        let inputs = self.pending_inputs.iter();
        inputs.filter_map(|it| Some((it, it.request.question.as_deref()?)))
    }

    /// Whether the run does nothing until a person resumes it, or answers what it or a descendant asks for, or until its
    /// client sends the results of tools.
    pub fn waits_for_person(&self) -> bool {
        let is_paused = self.waiting_for == Some(WaitingFor::Resume);
        self.status == Status::Waiting
            && (!self.pending_inputs.is_empty() || is_paused || self.waits_for_client())
    }

    /// Whether the run does nothing until its client sends the results of tools.
    pub fn waits_for_client(&self) -> bool {
        self.status == Status::Waiting && self.waiting_for == Some(WaitingFor::ClientTools)
    }

    /// The size in bytes of the texts of clients and models, which make up most of a record.
    pub fn text_bytes(&self) -> usize {
        let texts = [&self.content, &self.partial_content, &self.task];
        let texts = texts.into_iter().flatten();
        let messages = self.warnings.iter().map(|warning| &warning.message);
        self.input.text_bytes() + texts.chain(messages).map(String::len).sum::<usize>()
    }

    /// Milliseconds from start to end, or to `now` while it runs; 0 before it starts.
    pub fn duration_ms(&self, now: Timestamp) -> u64 {
        let Some(started) = self.started_at else {
            return 0;
        };
        let end = self.finished_at.unwrap_or(now);
        u64::try_from(end.as_millisecond() - started.as_millisecond()).unwrap_or(0)
    }

    /// As [`Run::duration_ms`], without the time that it was paused.
    pub fn active_ms(&self, now: Timestamp) -> u64 {
        self.duration_ms(now).saturating_sub(self.waited_ms)
    }
}

/// The current time in whole milliseconds, the precision of records.
pub fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::{RunId, Scope, Status};

    #[test]
    fn an_id_reads_back() {
        let id = RunId::new();
        assert_eq!(id.to_string().parse(), Ok(id));
        let unhyphenated = "run_00000000000000000000000000000000";
        for bad in ["", "run_", "run_x", "0198", unhyphenated] {
            assert!(bad.parse::<RunId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn new_ids_always_sort_last() {
        let id = |text: &str| text.parse::<RunId>().expect("an id");
        let id_now = id("run_01900000-0000-7000-8000-000000000009");
        for (newest, wanted) in [
            (
                "run_018fffff-ffff-7fff-bfff-ffffffffffff",
                "run_01900000-0000-7000-8000-000000000009",
            ),
            (
                "run_01910000-0000-7abc-8000-000000000001",
                "run_01910000-0000-7abc-8000-00000000000b",
            ),
            (
                "run_01910000-0000-7abc-bfff-fffffffffffe",
                "run_01910000-0000-7abd-8000-000000000008",
            ),
            (
                "run_01910000-0000-7fff-bfff-ffffffffffff",
                "run_01910000-0001-7000-8000-000000000009",
            ),
        ] {
            assert_eq!(id_now.bumped_past(id(newest)), id(wanted), "after {newest}");
        }
        let last = (0..1000).map(|_| RunId::new()).collect::<Vec<_>>();
        assert!(last.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn the_roots_limit_applies_and_a_child_can_only_lower_it() {
        let root = Scope::root(RunId::new(), Some(2));
        let child = root
            .child(RunId::new(), None, root.max_depth)
            .expect("a child");
        assert_eq!(
            (child.depth.0, child.max_depth, child.parent),
            (1, 2, Some(root.run))
        );
        let tight = root
            .child(RunId::new(), Some(0), root.max_depth)
            .expect("a child");
        assert!(!tight.can_delegate());
        let loose = root
            .child(RunId::new(), Some(5), root.max_depth)
            .expect("a child");
        assert_eq!(loose.max_depth, 2);
        let leaf = child
            .child(RunId::new(), None, child.max_depth)
            .expect("a grandchild");
        assert!(leaf.child(RunId::new(), None, leaf.max_depth).is_none());
        assert_eq!(Scope::root(RunId::new(), Some(9)).max_depth, 5);
    }

    #[test]
    fn ad_hoc_depth_is_looser_by_default() {
        let root = Scope::root(RunId::new(), None);
        assert_eq!((root.max_ad_hoc_depth(5), root.max_ad_hoc_depth(1)), (5, 1));
        let set = Scope::root(RunId::new(), Some(2));
        assert_eq!((set.max_ad_hoc_depth(5), set.max_ad_hoc_depth(1)), (2, 1));
        let mut deep = root;
        for depth in 1..=5 {
            deep = deep
                .child(RunId::new(), None, deep.max_ad_hoc_depth(5))
                .expect("a child");
            assert_eq!((deep.depth.0, deep.can_delegate()), (depth, depth < 3));
        }
        assert_eq!(
            deep.child(RunId::new(), None, deep.max_ad_hoc_depth(5)),
            None
        );
        let tight = root.child(RunId::new(), Some(1), 3).expect("a child");
        assert_eq!(tight.max_ad_hoc_depth(5), 2);
    }

    #[test]
    fn statuses_read_back() {
        for status in Status::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
        }
    }
}
