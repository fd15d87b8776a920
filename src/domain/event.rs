//! Entries of a tree's append-only event log. The store numbers an event (`seq`) when it commits it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::comparison::Comparison;
use crate::domain::context::ContextStrategy;
use crate::domain::evaluation::EvalId;
use crate::domain::failure::Failure;
use crate::domain::input::ArgumentsHash;
use crate::domain::json_buffer::JsonBuffer;
use crate::domain::message::ToolCall;
use crate::domain::rollout::Loss;
use crate::domain::run::{ForkedFrom, Reused, RunId};
use crate::domain::score::ScoreValue;
use crate::domain::timestamp_text;
use crate::domain::usage::{TokenUsage, Usage};
use crate::domain::waiting_for::BegunCall;
use crate::domain::world_event::WaitedEvent;

/// An event that has no number yet.
#[derive(Clone, Debug, JsonSchema)]
pub struct Event {
    /// The run that the event is about.
    pub run_id: RunId,
    /// The root of the run's tree.
    pub root_id: RunId,
    /// Levels of the run below the root.
    pub depth: u8,
    /// The name of the run's agent.
    pub agent: Arc<str>,
    /// When the event happened.
    pub time: Timestamp,
    #[schemars(flatten)]
    pub kind: EventKind,
}

impl Event {
    /// Reads what [`Self::append_head`] and [`Self::append_rest`] wrote, with or without a number.
    ///
    /// # Errors
    /// It is not what was written.
    pub fn read(name: EventName, json: &str) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct Head {
            run_id: RunId,
            root_id: RunId,
            depth: u8,
            agent: Arc<str>,
            time: Timestamp,
        }
        let head: Head = serde_json::from_str(json)?;
        let name = name.as_str();
        Ok(Self {
            run_id: head.run_id,
            root_id: head.root_id,
            depth: head.depth,
            agent: head.agent,
            time: head.time,
            kind: serde_json::from_str(&format!(r#"{{"{name}":{json}}}"#))?,
        })
    }

    /// The JSON of an event that gets no number.
    pub fn to_json(&self) -> String {
        let mut json = JsonBuffer::with_capacity(512);
        let written = self
            .append_head(&mut json)
            .and_then(|()| self.append_rest(&mut json));
        match written {
            Ok(()) => String::from_utf8(json.0).unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    /// Appends the beginning of the JSON, which all events of a run have.
    pub fn append_head(&self, json: &mut JsonBuffer) -> serde_json::Result<()> {
        // Ids and times have nothing to escape.
        json.0.extend_from_slice(br#"{"run_id":""#);
        json.0
            .extend_from_slice(self.run_id.encode(&mut [0; 40]).as_bytes());
        json.0.extend_from_slice(br#"","root_id":""#);
        json.0
            .extend_from_slice(self.root_id.encode(&mut [0; 40]).as_bytes());
        json.0.extend_from_slice(br#"","depth":"#);
        serde_json::to_writer(&mut *json, &self.depth)?;
        json.0.extend_from_slice(br#","agent":"#);
        serde_json::to_writer(&mut *json, &*self.agent)?;
        json.0.extend_from_slice(br#","time":""#);
        Ok(())
    }

    /// Appends the JSON behind [`Self::append_head`].
    pub fn append_rest(&self, json: &mut JsonBuffer) -> serde_json::Result<()> {
        timestamp_text::append(self.time, &mut json.0);
        let name = self.kind.name().as_str();
        json.0.extend_from_slice(br#"","type":""#);
        json.0.extend_from_slice(name.as_bytes());
        json.0.push(b'"');
        // The kind's JSON is `{"name":{…}}`. Its fields follow those that all events have.
        let start = json.0.len();
        serde_json::to_writer(&mut *json, &self.kind)?;
        json.0.pop();
        let brace = start + name.len() + r#"{"":"#.len();
        json.0[brace] = b',';
        json.0.drain(start..brace);
        if json.0.ends_with(b",}") {
            json.0.truncate(start);
            json.0.push(b'}');
        }
        Ok(())
    }
}

/// The type and the data of an event.
// serde's `tag` does not read arguments back as they were written, so that the type is written and read by `Event`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(tag = "type")]
pub enum EventKind {
    /// The run is accepted. Always its first event.
    #[serde(rename = "run.queued")]
    RunQueued {
        /// The run that called it; absent for a root run.
        #[serde(skip_serializing_if = "Option::is_none")]
        parent_id: Option<RunId>,
        /// The tool call of the parent that started it; absent for a root run.
        #[serde(skip_serializing_if = "Option::is_none")]
        tool_call_id: Option<String>,
        /// What the request of a root run set besides its input and labels, as in the body.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
        request: Option<Arc<RawValue>>,
    },
    /// The run continues from a copy of a part of another run's record. The second event of a fork.
    #[serde(rename = "run.forked")]
    RunForked {
        /// Where the other run was forked.
        forked_from: ForkedFrom,
        /// The number of copied turns of the root.
        turns: u32,
        /// What the tree took over instead of doing it.
        reused: Reused,
        /// The parts that the request edited.
        edited: Vec<String>,
    },
    /// The run leaves the queue.
    #[serde(rename = "run.started")]
    RunStarted {
        /// The requested model: `provider/model`.
        model: String,
        /// The version of the definition that the run uses.
        agent_version: String,
    },
    /// The run continues after a restart of the daemon, or after a pause.
    #[serde(rename = "run.resumed")]
    RunResumed {
        /// How often the run was started, the last time included.
        attempt: u32,
        /// Why it continues.
        cause: ResumeCause,
        /// The name of the key that resumed it; absent after a restart and without keys.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A client pauses the run: it stops at its next step, and so do all runs below it.
    #[serde(rename = "run.paused")]
    RunPaused {
        /// The name of the key that paused it; absent without keys.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A cancellation is requested; the run ends when its current steps end.
    #[serde(rename = "run.cancelling")]
    RunCancelling {
        /// Why the run is cancelled.
        reason: String,
    },
    /// The run has ended with a final text. Its last event.
    #[serde(rename = "run.completed")]
    RunCompleted {
        /// The number of turns.
        turns: u32,
        /// The length of the final text in characters.
        characters: usize,
        /// The final text; if `truncated`, its first 16 KiB.
        content: String,
        /// Whether `content` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    /// The run has failed. Its last event.
    #[serde(rename = "run.failed")]
    RunFailed {
        /// Why the run failed.
        error: Failure,
    },
    /// The run has ended by a cancellation. Its last event.
    #[serde(rename = "run.cancelled")]
    RunCancelled {
        /// Why the run was cancelled.
        reason: String,
    },
    /// A request goes to the model.
    #[serde(rename = "turn.started")]
    TurnStarted {
        /// The number of the turn, from 1.
        turn: u32,
        /// The number of messages of the conversation so far.
        messages: usize,
        /// The number of tool results that the model has not seen yet.
        results: usize,
    },
    /// The model has replied.
    #[serde(rename = "turn.completed")]
    TurnCompleted {
        /// The number of the turn.
        turn: u32,
        /// The model that replied, as the provider names it.
        model: String,
        /// Why the reply ended, in the provider's own word.
        stop_reason: Option<String>,
        /// Input tokens, cached ones included.
        input_tokens: u64,
        /// Output tokens.
        output_tokens: u64,
        /// The input tokens that were read from the provider's cache.
        cache_read_tokens: u64,
        /// The input tokens that were written to the provider's cache.
        cache_write_tokens: u64,
        /// The output tokens that are reasoning, if the provider reports them.
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning_tokens: Option<u64>,
        /// The tool calls that the reply requests.
        tool_calls: Vec<CalledTool>,
    },
    /// A tool call is executed.
    #[serde(rename = "tool.started")]
    ToolStarted {
        /// The number of the turn whose reply requests the call.
        turn: u32,
        /// The call's id.
        tool_call_id: String,
        /// The name of the tool.
        tool: String,
        /// What the model wrote; if `truncated`, the first 2 KiB of its JSON as a string.
        arguments: Arc<RawValue>,
        /// Whether `arguments` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    /// A tool call has its result.
    #[serde(rename = "tool.completed")]
    ToolCompleted {
        /// The number of the turn whose reply requests the call.
        turn: u32,
        /// The call's id.
        tool_call_id: String,
        /// The name of the tool.
        tool: String,
        /// How long the call took, in milliseconds.
        duration_ms: u64,
        /// Whether the result is an error.
        is_error: bool,
        /// What the model gets; if `truncated`, its first 2 KiB.
        result: String,
        /// Whether `result` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    },
    /// A tool call starts a child run.
    #[serde(rename = "agent.called")]
    AgentCalled {
        /// The call's id.
        tool_call_id: String,
        /// The child run.
        child_id: RunId,
        /// The name of the agent of the child run.
        child_agent: String,
        /// Levels of the child below the root.
        child_depth: u8,
        /// The first 80 characters of the task.
        task: String,
        /// Whether the child is in the background: the call does not wait for its end. Absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        background: bool,
    },
    /// A child run has ended; if it is in the background, its end has reached this run.
    #[serde(rename = "agent.returned")]
    AgentReturned {
        /// The call's id.
        tool_call_id: String,
        /// The child run.
        child_id: RunId,
        /// The name of the agent of the child run.
        child_agent: String,
        /// How long the child run took, in milliseconds.
        duration_ms: u64,
        /// The length of its final text in characters; absent if it has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        characters: Option<usize>,
        /// Why it did not complete; absent if it did.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// Input tokens of the child run and its descendants.
        input_tokens: u64,
        /// Output tokens of the child run and its descendants.
        output_tokens: u64,
        /// Executed tool calls of the child run and its descendants.
        tool_calls: u64,
        /// Of a child in the background: the call of `await_agents` whose result has its end; absent otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        awaited_by: Option<String>,
        /// Of a child in the background: the number of the message that has its end; absent otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<u32>,
    },
    /// A tool call waits for a person's approval.
    #[serde(rename = "approval.requested")]
    ApprovalRequested {
        /// The number of the turn whose reply requests the call.
        turn: u32,
        /// The call's id.
        tool_call_id: String,
        /// The name of the tool.
        tool: String,
        /// What the model wrote; if `truncated`, the beginning of its JSON as a string.
        arguments: Arc<RawValue>,
        /// Identifies the whole arguments: a decision that names it is refused for other ones.
        arguments_hash: ArgumentsHash,
        /// Whether `arguments` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
        /// When the call is denied if nobody decides; absent if it waits without a limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[serde(serialize_with = "timestamp_text::serialize_option")]
        #[schemars(with = "Option<Timestamp>")]
        deadline: Option<Timestamp>,
    },
    /// The call is approved or denied, or nobody decided in time.
    #[serde(rename = "approval.decided")]
    ApprovalDecided {
        /// The call's id.
        tool_call_id: String,
        /// The outcome.
        decision: Decision,
        /// What the call is executed with, if a person changed it; if `truncated`, the beginning of its JSON as a string.
        #[serde(skip_serializing_if = "Option::is_none")]
        arguments: Option<Arc<RawValue>>,
        /// Whether `arguments` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
        /// Why, if a person gave a reason.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// The name of the key that decided; absent without keys.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A question waits for a person's answer.
    #[serde(rename = "input.requested")]
    InputRequested {
        /// The number of the turn whose reply requests the call.
        turn: u32,
        /// The id of the question.
        input_id: String,
        /// The id of the call that asks it.
        tool_call_id: String,
        /// The question.
        question: String,
        /// The JSON Schema of the answer; absent if every answer fits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<serde_json::Value>")]
        schema: Option<Arc<RawValue>>,
        /// Suggested answers; absent without any.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        options: Vec<String>,
        /// The MCP server that asks; absent if the model does.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<String>,
        /// The call that had begun, if the daemon asks whether it was done; absent for other questions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        begun: Option<BegunCall>,
        /// When the wait ends if nobody answers; absent if it has no limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[serde(serialize_with = "timestamp_text::serialize_option")]
        #[schemars(with = "Option<Timestamp>")]
        deadline: Option<Timestamp>,
    },
    /// The question is answered or declined, or nobody answered in time.
    #[serde(rename = "input.answered")]
    InputAnswered {
        /// The id of the question.
        input_id: String,
        /// The outcome.
        outcome: InputOutcome,
        /// The answer, or the agent's default one if nobody answered in time; absent if there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<serde_json::Value>")]
        answer: Option<Arc<RawValue>>,
        /// Why it was declined, if a person gave a reason.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// The name of the key that answered; absent without keys.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A call waits for a time, or for an event of the world outside.
    #[serde(rename = "wait.started")]
    WaitStarted {
        /// The number of the turn whose reply requests the call.
        turn: u32,
        /// The id of the call.
        tool_call_id: String,
        /// The event that it waits for; absent if it waits for a time.
        #[serde(default, flatten, skip_serializing_if = "Option::is_none")]
        event: Option<WaitedEvent>,
        /// When the wait ends by itself; absent if it does not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[serde(serialize_with = "timestamp_text::serialize_option")]
        #[schemars(with = "Option<Timestamp>")]
        until: Option<Timestamp>,
    },
    /// The time has come, or the event.
    #[serde(rename = "wait.ended")]
    WaitEnded {
        /// The id of the call.
        tool_call_id: String,
        /// The data of the event; absent if none came.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<serde_json::Value>")]
        data: Option<Arc<RawValue>>,
    },
    /// A client added a message to the run; its next request includes it.
    #[serde(rename = "message.added")]
    MessageAdded {
        /// Counts the messages that were added to the run, from 1.
        number: u32,
        /// The text of the message; if `truncated`, its first 16 KiB.
        content: String,
        /// Whether `content` is only the beginning; absent if not.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
        /// The name of the key that sent it; absent without keys.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// A request to the model failed and is repeated.
    #[serde(rename = "retry.scheduled")]
    RetryScheduled {
        /// The number of the turn.
        turn: u32,
        /// The model that did not reply.
        model: String,
        /// The number of the attempt that failed, from 1.
        attempt: u32,
        /// The delay before the next attempt, in milliseconds.
        wait_ms: u64,
        /// Why the request failed.
        reason: String,
    },
    /// A request waits before it is sent. Once for each request that waits longer than a second.
    #[serde(rename = "turn.delayed")]
    TurnDelayed {
        /// The number of the turn.
        turn: u32,
        /// Why it waits.
        reason: DelayReason,
        /// When it is sent, as far as that is known; null if not.
        #[serde(serialize_with = "timestamp_text::serialize_option")]
        #[schemars(with = "Option<Timestamp>")]
        until: Option<Timestamp>,
    },
    /// The request is in a batch of the provider.
    #[serde(rename = "batch.submitted")]
    BatchSubmitted {
        /// The number of the turn.
        turn: u32,
        /// The model that will reply.
        model: String,
        /// The provider's id of the batch.
        batch_id: String,
    },
    /// The agent has more memory entries than its limit.
    #[serde(rename = "memory.warning")]
    MemoryWarning {
        /// The warning, for people.
        message: String,
    },
    /// Some tools of the run are unavailable.
    #[serde(rename = "tools.warning")]
    ToolsWarning {
        /// The warning, for people.
        message: String,
    },
    /// The model repeats the same tool calls with the same results.
    #[serde(rename = "loop.warning")]
    LoopWarning {
        /// The number of the turn.
        turn: u32,
        /// The number of repetitions.
        repeats: u32,
        /// The warning, for people.
        message: String,
    },
    /// A setting does not fit the model and was changed or ignored.
    #[serde(rename = "model.warning")]
    ModelWarning {
        /// The number of the turn.
        turn: u32,
        /// The warning, for people.
        message: String,
    },
    /// The conversation was shortened to fit the model's window.
    #[serde(rename = "context.compacted")]
    ContextCompacted {
        /// The number of the turn.
        turn: u32,
        /// How it was shortened.
        strategy: ContextStrategy,
        /// The first turn that was shortened.
        from_turn: u32,
        /// The last turn that was shortened.
        to_turn: u32,
        /// The number of messages that were replaced.
        messages: usize,
        /// The number of tool results that were replaced.
        results: usize,
        /// Estimated tokens of the request before.
        tokens_before: u64,
        /// Estimated tokens of the request after.
        tokens_after: u64,
        /// The model that wrote the summary; absent if there is none.
        #[serde(skip_serializing_if = "Option::is_none")]
        model: Option<String>,
        /// Input tokens of the summary.
        input_tokens: u64,
        /// Output tokens of the summary.
        output_tokens: u64,
    },
    /// A reply of the run made a budget over time reach a share that causes an alert.
    #[serde(rename = "budget.alert")]
    BudgetAlert {
        /// The name of the budget.
        budget: String,
        /// The share of the budget, from 0.001 to 1.
        share: f64,
        /// When the budget starts again.
        #[serde(serialize_with = "timestamp_text::serialize")]
        #[schemars(with = "Timestamp")]
        resets_at: Timestamp,
    },
    /// The run was scored after its end; see `POST /runs/{id}/scores`.
    #[serde(rename = "score.added")]
    ScoreAdded {
        /// What is scored.
        name: String,
        /// A number, or a label.
        value: ScoreValue,
        /// Who scored it: the name of a key, `scorer:` and the name of a scorer, or `feedback`; absent without keys.
        #[serde(skip_serializing_if = "Option::is_none")]
        author: Option<String>,
        /// Why.
        #[serde(skip_serializing_if = "Option::is_none")]
        comment: Option<String>,
        /// The turn that the score is about; absent if it is about the whole run.
        #[serde(skip_serializing_if = "Option::is_none")]
        turn: Option<u32>,
        /// Whether it replaces a score of the same name and author.
        replaced: bool,
    },
    /// A scorer of the agent could not score the run.
    #[serde(rename = "score.failed")]
    ScoreFailed {
        /// The name of the scorer.
        name: String,
        /// Why, for people.
        message: String,
    },
    /// The candidate of the agent's rollout was taken off, because its runs are worse; the run is its newest one.
    #[serde(rename = "rollout.stopped")]
    RolloutStopped {
        /// The version of the candidate.
        candidate: String,
        /// The agent's current version.
        current: String,
        /// Why.
        loss: Loss,
    },
    /// A scheduled evaluation of the agent was worse than the one before; the run is its newest one.
    #[serde(rename = "eval.regressed")]
    EvalRegressed {
        /// The evaluation.
        eval: EvalId,
        /// The evaluation that it is compared with.
        against: EvalId,
        /// The scorers whose interval of the difference lies below 0.
        scorers: BTreeMap<String, Comparison>,
    },
    /// The model reasons. Live only.
    #[serde(rename = "reasoning.started")]
    ReasoningStarted {
        /// The number of the turn.
        turn: u32,
    },
    /// A piece of a summary of the model's reasoning. Live only.
    #[serde(rename = "reasoning.delta")]
    ReasoningDelta {
        /// The number of the turn.
        turn: u32,
        /// The piece.
        text: String,
    },
    /// A piece of the reply's text. Live only.
    #[serde(rename = "text.delta")]
    TextDelta {
        /// The number of the turn.
        turn: u32,
        /// The piece.
        text: String,
    },
    /// The text of the turn so far is not part of the reply. Live only.
    #[serde(rename = "text.withdrawn")]
    TextWithdrawn {
        /// The number of the turn.
        turn: u32,
        /// Why the text is withdrawn.
        reason: String,
    },
}

/// Why a run continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResumeCause {
    /// The daemon was restarted, or its store works again.
    Restart,
    /// A client resumed the run.
    Request,
}

/// Why a request waits before it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DelayReason {
    /// The limits of the provider leave nothing for it yet.
    RateLimit,
}

/// The outcome of a request for approval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ApprovalOutcome")]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The call is executed.
    Approved,
    /// A person denied the call.
    Denied,
    /// Nobody decided in time.
    TimedOut,
}

impl EventKind {
    /// For what a wait that starts waits, for people; `None` for other events.
    pub fn waits(&self) -> Option<String> {
        let Self::WaitStarted { event, until, .. } = self else {
            return None;
        };
        let event = event
            .as_ref()
            .map(|it| format!("for {} {}", it.event, it.key));
        let until = until.map(|until| format!("until {until:.0}"));
        let parts: Vec<String> = event.into_iter().chain(until).collect();
        Some(parts.join(", "))
    }
}

impl Decision {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Approved => "approved",
            Self::Denied => "denied",
            Self::TimedOut => "timed_out",
        }
    }
}

/// The outcome of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputOutcome {
    /// A person answered.
    Answered,
    /// A person declined to answer.
    Declined,
    /// Nobody answered in time.
    TimedOut,
}

impl InputOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Declined => "declined",
            Self::TimedOut => "timed_out",
        }
    }
}

/// A tool call of a reply.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CalledTool {
    /// The call's id.
    pub id: String,
    /// The name of the tool.
    pub name: String,
}

impl From<&ToolCall> for CalledTool {
    fn from(call: &ToolCall) -> Self {
        Self {
            id: call.id.clone(),
            name: call.name.clone(),
        }
    }
}

impl EventKind {
    /// What the reply of a turn used, or the summary of a compaction; `None` for other events.
    pub fn tokens(&self) -> Option<TokenUsage> {
        match *self {
            Self::TurnCompleted {
                input_tokens,
                output_tokens,
                cache_read_tokens,
                cache_write_tokens,
                reasoning_tokens,
                ..
            } => Some(TokenUsage {
                input: input_tokens,
                output: output_tokens,
                cache_read: cache_read_tokens,
                cache_write: cache_write_tokens,
                reasoning: reasoning_tokens.unwrap_or(0),
            }),
            Self::ContextCompacted {
                input_tokens,
                output_tokens,
                ..
            } => Some(TokenUsage {
                input: input_tokens,
                output: output_tokens,
                ..TokenUsage::default()
            }),
            _ => None,
        }
    }
}

/// Declares the names of the kinds, first of those that are stored.
macro_rules! event_names {
    (stored: [$($stored:ident = $stored_text:literal,)+] live: [$($live:ident = $live_text:literal,)+]) => {
        /// The type of an event, without its data.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EventName {
            $($stored,)+
            $($live,)+
        }

        /// The names of all numbered events, in the order of [`EventKind`].
        pub const STORED_EVENT_NAMES: &[&str] = &[$($stored_text,)+];

        impl EventName {
            /// The `type` in JSON.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$stored => $stored_text,)+
                    $(Self::$live => $live_text,)+
                }
            }

            pub fn parse(name: &str) -> Option<Self> {
                match name {
                    $($stored_text => Some(Self::$stored),)+
                    $($live_text => Some(Self::$live),)+
                    _ => None,
                }
            }
        }

        impl EventKind {
            pub fn name(&self) -> EventName {
                match self {
                    $(Self::$stored { .. } => EventName::$stored,)+
                    $(Self::$live { .. } => EventName::$live,)+
                }
            }
        }
    };
}

event_names! {
    stored: [
        RunQueued = "run.queued",
        RunForked = "run.forked",
        RunStarted = "run.started",
        RunResumed = "run.resumed",
        RunPaused = "run.paused",
        RunCancelling = "run.cancelling",
        RunCompleted = "run.completed",
        RunFailed = "run.failed",
        RunCancelled = "run.cancelled",
        TurnStarted = "turn.started",
        TurnCompleted = "turn.completed",
        ToolStarted = "tool.started",
        ToolCompleted = "tool.completed",
        AgentCalled = "agent.called",
        AgentReturned = "agent.returned",
        ApprovalRequested = "approval.requested",
        ApprovalDecided = "approval.decided",
        InputRequested = "input.requested",
        InputAnswered = "input.answered",
        WaitStarted = "wait.started",
        WaitEnded = "wait.ended",
        MessageAdded = "message.added",
        RetryScheduled = "retry.scheduled",
        TurnDelayed = "turn.delayed",
        BatchSubmitted = "batch.submitted",
        MemoryWarning = "memory.warning",
        ToolsWarning = "tools.warning",
        LoopWarning = "loop.warning",
        ModelWarning = "model.warning",
        ContextCompacted = "context.compacted",
        BudgetAlert = "budget.alert",
        ScoreAdded = "score.added",
        ScoreFailed = "score.failed",
        RolloutStopped = "rollout.stopped",
        EvalRegressed = "eval.regressed",
    ]
    live: [
        ReasoningStarted = "reasoning.started",
        ReasoningDelta = "reasoning.delta",
        TextDelta = "text.delta",
        TextWithdrawn = "text.withdrawn",
    ]
}

impl EventName {
    /// Whether it is about the run as a whole: `run.…`.
    pub fn is_about_run(self) -> bool {
        self.as_str().starts_with("run.")
    }

    /// Whether it is a warning for people.
    pub fn is_warning(self) -> bool {
        self.as_str().ends_with(".warning")
    }

    /// Whether it is the last of a run.
    pub fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::RunCompleted | Self::RunFailed | Self::RunCancelled
        )
    }
}

impl fmt::Display for EventName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A stored event, as subscribers receive it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvent {
    /// Counts from 1 without gaps over the tree.
    pub seq: u64,
    /// The run it is about.
    pub run_id: RunId,
    pub name: EventName,
    /// The whole `data` object as JSON text, including the number.
    pub data: String,
}

impl StoredEvent {
    /// Whether it is the last of `run`.
    pub fn ends(&self, run: RunId) -> bool {
        self.run_id == run && self.name.is_terminal()
    }

    /// As it was written.
    ///
    /// # Errors
    /// It is not what was written.
    pub fn read(&self) -> serde_json::Result<Event> {
        Event::read(self.name, &self.data)
    }
}

/// An event without a number, such as `text.delta`, as subscribers receive it.
#[derive(Debug)]
pub struct LiveEvent {
    pub event: Event,
    /// The `data` object as JSON.
    pub data: String,
}

impl From<Event> for LiveEvent {
    fn from(event: Event) -> Self {
        let data = event.to_json();
        Self { event, data }
    }
}

/// Adds the number as the first member of an event's JSON.
pub fn with_seq(seq: u64, json: &str) -> String {
    format!("{{\"seq\":{seq},{}", json.strip_prefix('{').unwrap_or(json))
}

/// The input tokens, output tokens and tool calls for `agent.returned`, which counts the whole subtree.
pub fn usage_totals(usage: &Usage) -> (u64, u64, u64) {
    (usage.tokens.input, usage.tokens.output, usage.tool_calls)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::value::RawValue;

    use super::{Event, EventKind, EventName, STORED_EVENT_NAMES, with_seq};
    use crate::domain::run::RunId;

    #[test]
    fn an_event_is_read_by_the_type_that_wrote_it() {
        let json = r#"{"n": 1.0, "id": 123456789012345678901234567890, "text": "},\\\""}"#;
        let arguments = RawValue::from_string(json.to_owned()).expect("JSON");
        let kinds = [
            EventKind::RunPaused { by: None },
            EventKind::RunCompleted {
                turns: 1,
                characters: 2,
                content: "{}".to_owned(),
                truncated: true,
            },
            EventKind::ToolStarted {
                turn: 1,
                tool_call_id: "c1".to_owned(),
                tool: "grep".to_owned(),
                arguments: arguments.into(),
                truncated: false,
            },
        ];
        let ends = [
            r#""type":"run.paused"}"#,
            r#""type":"run.completed","turns":1,"characters":2,"content":"{}","truncated":true}"#,
            &format!(
                r#""type":"tool.started","turn":1,"tool_call_id":"c1","tool":"grep","arguments":{json}}}"#
            ),
        ];
        for (kind, end) in kinds.into_iter().zip(ends) {
            let event = Event {
                run_id: RunId::new(),
                root_id: RunId::new(),
                depth: 1,
                agent: "reader of \"files\"".into(),
                time: Timestamp::UNIX_EPOCH,
                kind,
            };
            let (name, written) = (event.kind.name(), event.to_json());
            assert!(written.ends_with(end), "{written}");
            for json in [&written, &with_seq(7, &written)] {
                let read = Event::read(name, json).expect("an event");
                assert_eq!(read.to_json(), written);
            }
            assert!(Event::read(EventName::RunStarted, &written).is_err());
            assert_eq!(EventName::parse(name.as_str()), Some(name));
        }
    }

    #[test]
    fn every_event_with_a_number_has_its_name_in_the_list() {
        let schema = serde_json::to_value(schemars::schema_for!(EventKind)).expect("JSON");
        let kinds = schema["oneOf"].as_array().expect("kinds");
        let names = kinds
            .iter()
            .map(|kind| &kind["properties"]["type"]["const"]);
        let names: Vec<&str> = names.map(|name| name.as_str().expect("a name")).collect();
        let stored = names
            .into_iter()
            .filter(|name| !name.starts_with("text.") && !name.starts_with("reasoning."));
        assert_eq!(stored.collect::<Vec<_>>(), STORED_EVENT_NAMES);
        assert_eq!(EventName::parse("run.strolled"), None);
    }
}
