//! The tool contract, and the trait through which a tool starts child runs.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::domain::agent::AdHocSettings;
use crate::domain::attachment::{Attachment, Digest};
use crate::domain::input::Question;
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec, empty_arguments};
use crate::domain::run::{RunId, Scope, Status};
use crate::domain::server_question::{ServerQuestion, ServerQuestions};
use crate::domain::skill::READ_SKILL;
use crate::domain::world_event::WaitedEvent;
use crate::fair::fair_semaphore::{FairSemaphore, Permit};
use crate::workdirs::workdir::Workdir;

pub mod ask_person;
pub mod background;
pub mod call_agent;
pub mod deferred;
pub mod files;
pub mod mcp;
pub mod read_skill;
pub mod recall;
pub mod registry;
pub mod shell;
pub mod subagent;
pub mod toolbox;
pub mod wait;
pub mod web;

/// Something that a model can call.
pub trait Tool: Send + Sync {
    /// The name, description and parameters that the model is offered.
    fn spec(&self) -> ToolSpec;

    /// Whether a call changes something beside its result.
    fn effect(&self) -> Effect;

    /// The schema that arguments are checked against before a call; `None` if the tool checks them itself.
    fn schema(&self) -> Option<&Schema> {
        None
    }

    fn uses_workdir(&self) -> bool {
        false
    }

    /// Executes one call, whose arguments fit the schema. Both the output and an error's text go to the model; the
    /// error is marked as one.
    ///
    /// The future is dropped when the run is stopped or past its deadline. Whatever the call started must end at once
    /// then: processes are killed, servers are notified. A delegating call is not dropped: it ends when its child run
    /// has ended. Neither is one that asks a person: it ends with its wait.
    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>>;

    /// As [`Tool::call`], of a tool whose service may ask people before it ends the call. `answered` has the answers to what
    /// an earlier attempt required.
    fn attempt<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
        _answered: Option<&'a AnsweredQuestions>,
    ) -> BoxFuture<'a, CallStep> {
        Box::pin(async move { CallStep::Ended(self.call(call, context).await) })
    }

    /// Asks the service of the tool whether it performed a call whose end is not known. Without a way to do so: `Unknown`.
    fn probe<'a>(&'a self, _: &'a ToolCall, _: CallContext<'a>) -> BoxFuture<'a, Probed> {
        Box::pin(ready(Probed::Unknown))
    }
}

/// How an attempt of a call ends.
pub enum CallStep {
    Ended(Result<ToolOutput, String>),
    /// The service of the tool asks people first.
    Asks(AskingCall),
}

/// A call that goes on once questions are answered.
pub enum AskingCall {
    /// It has ended, and is made again with the answers.
    Ended(ServerQuestions),
    /// It waits for the answer to one question.
    Open(ServerQuestion, Box<dyn OpenCall>),
}

/// A call in flight whose service waits for an answer. If it is dropped, the call is cancelled.
pub trait OpenCall: Send {
    /// Resolves when the service does not wait for the answer any more. Cancel safe.
    fn lapsed(&mut self) -> BoxFuture<'_, ()>;

    /// Continues with the answer; `None` if the question has lapsed.
    fn resume(self: Box<Self>, answer: Option<AnswerToQuestion>) -> BoxFuture<'static, CallStep>;
}

/// What a call is made again with.
pub struct AnsweredQuestions {
    pub required: ServerQuestions,
    /// In the order of the questions.
    pub answers: Vec<AnswerToQuestion>,
}

/// What a service says of a call that had begun.
#[derive(Debug)]
pub enum Probed {
    /// It was performed, with this result.
    Done(ToolOutput),
    NotDone,
    Unknown,
}

/// The result of a tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolOutput {
    pub text: String,
    /// Images and files that go with the text.
    pub attachments: Vec<Attachment>,
    /// Whether there is no result because the connection broke during the call. The text says why.
    pub is_end_unknown: bool,
}

impl ToolOutput {
    /// Of a call that may have been performed.
    pub fn end_unknown(why: String) -> Self {
        Self {
            is_end_unknown: true,
            ..Self::from(why)
        }
    }
}

impl From<String> for ToolOutput {
    fn from(text: String) -> Self {
        Self {
            text,
            ..Self::default()
        }
    }
}

/// Whether a call only starts another agent, waits for it or cancels it, or finds tools, and needs no approval.
pub fn is_pure(tool: &str, approve: &[String]) -> bool {
    let pure = [
        call_agent::NAME,
        subagent::NAME,
        background::AWAIT_AGENTS,
        background::CANCEL_AGENT,
        deferred::TOOL_SEARCH,
    ];
    pure.contains(&tool) && !approve.iter().any(|name| name == tool)
}

/// The built-in tools that only read.
const READERS: [&str; 8] = [
    "find_path",
    "grep",
    "list_directory",
    "read_file",
    "url_fetch",
    "web_search",
    recall::NAME,
    READ_SKILL,
];

/// Whether this is a built-in tool that only reads.
pub fn is_reader(tool: &str) -> bool {
    READERS.contains(&tool)
}

/// What a call does beside its result. Decides whether another process may repeat it, and what ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing. It may be repeated.
    ReadOnly,
    /// Something that must not be done twice.
    Mutating,
    /// Something that a service does once for the key of the call, however often it is sent.
    Keyed,
    /// It starts child runs or waits for them, which are found again after a restart.
    Delegating,
    /// It waits for a person, a time or an event; what it waited for is found again after a restart.
    Asking,
}

impl Effect {
    /// Whether the call itself does it, not what it starts or waits for.
    pub fn is_own(self) -> bool {
        matches!(self, Self::ReadOnly | Self::Mutating | Self::Keyed)
    }
}

/// The run that a call belongs to, and what the call may use.
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    /// The calling run's position in its tree.
    pub scope: &'a Scope,
    /// The name of the API key that the root run was accepted with. Shared limits are divided by key.
    pub key: Option<&'a str>,
    /// The run's working directory; `None` if none of its tools uses one.
    pub workdir: Option<&'a Arc<Workdir>>,
    /// The hosts that the agent may fetch from; empty allows every public host.
    pub allowed_hosts: &'a [String],
    /// Starts child runs of the calling run.
    pub delegate: &'a dyn Delegate,
}

impl CallContext<'_> {
    /// The key of the call: the same whenever it is executed again, and another one in each fork.
    pub fn call_key(&self, call: &ToolCall) -> String {
        let named = format!("{} {}", self.scope.run, call.id);
        let mut key = Digest::compute(named.as_bytes()).to_string();
        key.truncate(32);
        key
    }

    /// The run's working directory.
    ///
    /// # Errors
    /// The run has none. The text is for the model.
    pub fn workdir(&self) -> Result<Arc<Workdir>, String> {
        let workdir = self.workdir.ok_or("this run has no working directory")?;
        Ok(Arc::clone(workdir))
    }

    /// Takes a permit for the work of the call. It may have to wait for it until others drive the run.
    pub async fn acquire(&self, permits: &FairSemaphore) -> Permit {
        let permit = permits.acquire(self.key).await;
        self.delegate.wait_until_connected().await;
        permit
    }
}

/// Starts child runs of one run. It is bound to its run and lent for one call, so no tool can name a wrong parent.
pub trait Delegate: Send + Sync {
    /// Runs a child to its end. Returns its final text, or why it has none. Of a child in the background: which run it is, as soon as
    /// it is recorded.
    fn run_child<'a>(&'a self, request: ChildRequest<'a>) -> BoxFuture<'a, Result<String, String>>;

    /// Whether the tree may have another ad-hoc sub-agent for this call. The error names the quota that is used up.
    fn check_quota<'a>(&'a self, tool_call_id: &'a str) -> BoxFuture<'a, Result<(), String>>;

    /// Runs an ad-hoc sub-agent to its end. Returns its result, or why it has none. The result says so if the turns ran
    /// out. For one in the background: see [`Delegate::run_child`].
    fn run_ad_hoc<'a>(&'a self, request: AdHocRequest<'a>)
    -> BoxFuture<'a, Result<String, String>>;

    /// Waits for children in the background. Returns the ends that this call delivers, in their order.
    fn await_agents<'a>(
        &'a self,
        request: AwaitRequest<'a>,
    ) -> BoxFuture<'a, Result<Vec<AgentEnd>, String>>;

    /// Cancels a child in the background.
    fn cancel_agent(&self, run: RunId) -> BoxFuture<'_, Result<(), String>>;

    /// Waits for an event, whose data it returns, or for the end of the time. The error says why the wait has ended early.
    fn wait(&self, request: WaitRequest) -> BoxFuture<'_, Result<Option<Arc<RawValue>>, String>>;

    /// When this call began to wait, if an earlier process did so.
    fn wait_began(&self, call: &str) -> Option<Timestamp>;

    /// Asks a person, and waits for the answer. The error says why there will be none.
    fn ask(&self, request: AskRequest) -> BoxFuture<'_, Result<AnswerToQuestion, String>>;

    /// Searches the recorded conversation of the run and its session. Returns at most `limit` passages as text.
    fn recall<'a>(&'a self, query: &'a str, limit: usize) -> BoxFuture<'a, Result<String, String>>;

    /// Waits while this daemon begins nothing, because another one may drive the run. Ends only if it still drives it.
    fn wait_until_connected(&self) -> BoxFuture<'_, ()>;
}

#[derive(Clone, Copy, Debug)]
pub struct ChildRequest<'a> {
    /// The tool call that starts the child.
    pub tool_call_id: &'a str,
    /// The agent that the child runs.
    pub agent: &'a str,
    pub task: &'a str,
    /// Additional context from the caller; `None` if blank.
    pub context: Option<&'a str>,
    /// Whether its caller does not wait for its end.
    pub background: bool,
}

/// A wait for children in the background.
#[derive(Clone, Debug)]
pub struct AwaitRequest<'a> {
    /// The id of the call.
    pub call: &'a str,
    /// `None` for all whose ends are not delivered.
    pub runs: Option<Vec<RunId>>,
    /// Whether it ends with the first of them.
    pub any: bool,
}

/// The result of a call that starts a sub-agent in the background.
#[derive(Serialize)]
pub struct StartedAgent<'a> {
    pub run: RunId,
    pub agent: &'a str,
}

impl StartedAgent<'_> {
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The end of a sub-agent in the background.
#[derive(Clone, Debug, Serialize)]
pub struct AgentEnd {
    pub run: RunId,
    /// The name of the agent, or the label of an ad-hoc one.
    pub agent: String,
    pub status: Status,
    /// Its final text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Why it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A wait for a time or an event.
#[derive(Clone, Debug)]
pub struct WaitRequest {
    /// The id of the call.
    pub call: String,
    /// `None` for a time.
    pub event: Option<WaitedEvent>,
    pub limit: Duration,
}

/// A question to a person.
#[derive(Clone, Debug)]
pub struct AskRequest {
    /// Unique in the run, and the same whenever the call is executed again.
    pub id: String,
    pub question: Question,
    /// Cancelled when nobody waits for the answer any more.
    pub withdrawn: Option<CancellationToken>,
}

#[derive(Clone, Debug)]
pub enum AnswerToQuestion {
    /// With JSON that fits the schema.
    Answered(Arc<RawValue>),
    /// Perhaps with a reason.
    Declined(Option<String>),
    TimedOut {
        after: Duration,
        /// The agent's default answer.
        default: Option<Arc<RawValue>>,
    },
}

/// A request for an ad-hoc sub-agent: the caller's agent with these settings.
#[derive(Clone, Debug)]
pub struct AdHocRequest<'a> {
    /// The tool call that starts the child.
    pub tool_call_id: &'a str,
    /// A short name of the task, for people.
    pub label: &'a str,
    /// The first message of the conversation.
    pub task: &'a str,
    pub max_turns: u32,
    /// Its tools, and whether it ends with a summary.
    pub ad_hoc: AdHocSettings,
    /// Whether its caller does not wait for its end.
    pub background: bool,
}

/// Made once for a tool.
pub struct StaticSpec {
    name: &'static str,
    description: &'static str,
    /// `None` if the type has no valid schema; then the arguments are not checked before they are parsed.
    pub schema: Option<Schema>,
}

impl StaticSpec {
    /// `Arguments` is the type of the tool's arguments.
    pub fn new<Arguments: JsonSchema>(name: &'static str, description: &'static str) -> Self {
        Self {
            name,
            description,
            schema: Schema::for_type::<Arguments>().ok(),
        }
    }

    pub fn to_spec(&self) -> ToolSpec {
        let parameters = self.schema.as_ref().map(|schema| Arc::clone(schema.raw()));
        let parameters = parameters.unwrap_or_else(empty_arguments);
        ToolSpec::new(self.name, self.description, &parameters)
    }
}
