//! What the turns of one run share.

use std::sync::{Arc, OnceLock};

use crate::domain::agent::params::Cache;
use crate::domain::attachment::Digest;
use crate::domain::message::{AssistantMessage, ToolCall};
use crate::domain::usage::TokenUsage;
use crate::engine::context::RunContext;
use crate::engine::conversation::Conversation;
use crate::engine::run_loop::delegation::delegate::DriveFn;
use crate::engine::run_loop::ending::LoopState;
use crate::engine::run_loop::request_bounds::RequestBounds;
use crate::engine::run_loop::setup::Setup;
use crate::engine::run_loop::start::PendingWrite;
use crate::engine::run_loop::turn_request::TurnRequest;
use crate::engine::state::prompt::{Prompt, RunInput};
use crate::providers::echo;
use crate::record::entry::{Entry, ReplyReport};
use crate::store::{Change, StoreError};
use crate::tools::toolbox::Toolbox;

pub struct TurnLoop<'a> {
    pub context: &'a RunContext,
    pub state: &'a mut LoopState,
    pub preamble: Preamble,
    pub conversation: Conversation,
    /// `None` if the context window of the model is unknown.
    pub bounds: Option<RequestBounds>,
    /// Identifies the run's conversation, which that of its session is.
    conversation_id: String,
    /// Whether a later run is likely to begin with this conversation.
    is_continued: bool,
    /// What the next commit writes first.
    pub pending_write: Option<Box<PendingWrite>>,
    /// Whether an earlier process has sent the request of the next turn, which is sent again unchanged.
    pub repeats_turn: bool,
    pub drive_child: DriveFn,
}

/// What every request of the run starts with.
pub struct Preamble {
    pub system: String,
    pub toolbox: Arc<Toolbox>,
    hash: OnceLock<u64>,
}

impl Preamble {
    /// Computed only if a reply has thinking.
    pub fn hash(&self) -> u64 {
        let compute = || echo::prefix_hash(&self.system, self.toolbox.offered_specs());
        *self.hash.get_or_init(compute)
    }
}

/// A reply that the conversation has taken.
pub struct NewReply {
    pub turn: u32,
    pub message: AssistantMessage,
    pub report: ReplyReport,
}

impl From<NewReply> for Entry {
    fn from(reply: NewReply) -> Self {
        let NewReply {
            turn,
            message,
            report,
        } = reply;
        Self::Replied {
            turn,
            message,
            report,
        }
    }
}

impl<'a> TurnLoop<'a> {
    pub fn new(
        context: &'a RunContext,
        state: &'a mut LoopState,
        setup: Setup,
        drive_child: DriveFn,
    ) -> Self {
        let Setup {
            prompt,
            toolbox,
            pending_write,
            session,
            ..
        } = setup;
        let Prompt { system, input, .. } = prompt;
        let run = &context.run;
        let is_chat = run.parent.is_none() && run.tree.is_chat;
        Self {
            context,
            state,
            conversation_id: conversation_id(context, session.as_deref()),
            is_continued: is_chat || session.is_some() || !input.earlier.is_empty(),
            conversation: new_conversation(context, input),
            bounds: RequestBounds::new(context, &system, toolbox.offered_specs()),
            preamble: Preamble {
                system,
                toolbox,
                hash: OnceLock::new(),
            },
            pending_write,
            repeats_turn: false,
            drive_child,
        }
    }

    pub fn drop_foreign_thinking(&mut self) {
        let preamble = &self.preamble;
        self.conversation.drop_foreign_thinking(|| preamble.hash());
    }

    fn is_prompt_reused(&self) -> bool {
        let agent = &self.context.run.agent;
        let has_tools = !self.preamble.toolbox.offered_specs().is_empty();
        // Only further runs make an hour worth its price.
        let is_kept = agent.params.cache == Cache::OneHour;
        (has_tools && agent.limits.max_turns > 1) || self.is_continued || is_kept
    }

    pub fn turn_request(&self, turn: u32) -> TurnRequest<'_> {
        TurnRequest {
            turn,
            system: &self.preamble.system,
            messages: self.conversation.messages(),
            tools: self.preamble.toolbox.offered_specs(),
            params: &self.context.run.agent.params,
            is_turn: true,
            is_prompt_reused: self.is_prompt_reused(),
            conversation_id: &self.conversation_id,
            progress: &self.state.progress,
        }
    }

    /// What is recorded of the reply that is the last one in the progress, beside its message.
    pub fn reply_report(&self, tokens: TokenUsage, calls: &[ToolCall]) -> ReplyReport {
        let toolbox = &self.preamble.toolbox;
        ReplyReport {
            model: self.state.progress.model.clone(),
            stop_reason: self.state.progress.stop_reason.clone(),
            tokens,
            tool_calls: calls.iter().map(|call| toolbox.called_tool(call)).collect(),
        }
    }

    pub async fn write_pending(&mut self) -> Result<(), StoreError> {
        match self.pending_write.take() {
            Some(pending_write) => pending_write.write(self.context).await,
            None => Ok(()),
        }
    }

    /// See [`Journal::append_usage`](crate::engine::record::journal::Journal::append_usage).
    pub async fn record_usage(&self) -> Result<(), StoreError> {
        let journal = &self.context.engine.journal;
        let recorded = journal.append_usage(&self.context.run, &self.state.progress);
        recorded.await
    }

    /// Commits entries together with the progress of the run.
    pub async fn record(&self, entries: Vec<Entry>) -> Result<(), StoreError> {
        let change = Change::Progress(self.state.progress.clone());
        let journal = &self.context.engine.journal;
        let committed = journal.append(&self.context.run, change, entries);
        committed.await.map(drop)
    }
}

/// The same for all runs of a session, and a secret to others, who may choose its name.
fn conversation_id(context: &RunContext, session: Option<&str>) -> String {
    let run = &context.run;
    match session {
        None => run.scope.run.to_string(),
        Some(session) => {
            let owner = run.tree.owner.as_deref().unwrap_or_default();
            Digest::compute([owner, &run.agent.name, session].join("\0").as_bytes()).to_string()
        }
    }
}

fn new_conversation(context: &RunContext, input: RunInput) -> Conversation {
    let settings = &context.engine.settings;
    let mut conversation = Conversation::new(
        input.earlier,
        input.message,
        context.run.agent.limits.max_turns,
        settings.runs.max_calls,
        settings.loop_warn,
        settings.loop_stop,
    );
    if let Some(compaction) = input.compaction {
        conversation.compact(compaction);
    }
    conversation
}
