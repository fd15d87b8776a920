//! The tool contract, and the door through which a tool reaches the runner. Knows no engine and no provider.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use crate::domain::agent::AdHocSettings;
use crate::domain::attachment::Attachment;
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::run::Scope;
use crate::workdirs::workdir::Workdir;

pub mod call_agent;
pub mod deferred;
pub mod files;
pub mod mcp;
pub mod recall;
pub mod registry;
pub mod shell;
pub mod subagent;
pub mod toolbox;
pub mod web;

/// Something a model may ask to be done.
pub trait Tool: Send + Sync {
    /// How it is offered to the model.
    fn spec(&self) -> ToolSpec;

    /// What a call of it does beside its answer.
    fn effect(&self) -> Effect;

    /// What the arguments are checked against before it is performed; none where it checks them itself.
    fn schema(&self) -> Option<&Schema> {
        None
    }

    /// Whether it works in the run's workdir.
    fn uses_workdir(&self) -> bool {
        false
    }

    /// Performs one call, whose arguments fit the schema. The output goes to the model; an error's text goes there too,
    /// marked as one. Dropped where the run is stopped or overdue, and then what it began must end at once: a process is
    /// killed, a server is told. (One that delegates is not dropped: it ends when its child has.)
    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>>;
}

/// What a tool answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolOutput {
    /// The text that the model reads.
    pub text: String,
    /// Pictures and files beside it.
    pub attachments: Vec<Attachment>,
}

impl From<String> for ToolOutput {
    fn from(text: String) -> Self {
        Self {
            text,
            attachments: Vec::new(),
        }
    }
}

/// What a call does beside its answer: whether another process may perform it again, and who ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: it may be performed again.
    ReadOnly,
    /// Something that may not be done twice.
    Mutating,
    /// It has a child run, which is found again.
    Delegating,
}

/// What a call is performed within.
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    /// The calling run's place in its tree.
    pub scope: &'a Scope,
    /// The name of the key that its root was accepted with, whose part of what tools share it takes.
    pub key: Option<&'a str>,
    /// The directory that its files are in; none where none of its tools uses one.
    pub workdir: Option<&'a Arc<Workdir>>,
    /// The hosts that its agent may ask; empty means every public one.
    pub allowed_hosts: &'a [String],
    /// The one way up: starts child runs of the calling run.
    pub delegate: &'a dyn Delegate,
}

impl CallContext<'_> {
    /// The directory of the run's files.
    ///
    /// # Errors
    /// Where it has none, for the model.
    pub fn workdir(&self) -> Result<Arc<Workdir>, String> {
        let workdir = self.workdir.ok_or("this run has no working directory")?;
        Ok(Arc::clone(workdir))
    }
}

/// Starts children of one run. Lent for one call, already bound to its run, so that no tool can name a false parent.
pub trait Delegate: Send + Sync {
    /// Runs a child to its end and returns its final text, or why it has none.
    fn run_child<'a>(&'a self, request: ChildRequest<'a>) -> BoxFuture<'a, Result<String, String>>;

    /// Whether the tree may have a child without a name of this agent's for this call, or which quota is used up.
    fn check_quota<'a>(&'a self, tool_call_id: &'a str) -> BoxFuture<'a, Result<(), String>>;

    /// Runs a child without a name to its end and returns its result, or why it has none. A result of one whose turns
    /// ran out says so.
    fn run_ad_hoc<'a>(&'a self, request: AdHocRequest<'a>)
    -> BoxFuture<'a, Result<String, String>>;

    /// Searches what is recorded of the run's conversation and its session: at most so many passages, as text.
    fn recall<'a>(&'a self, query: &'a str, limit: usize) -> BoxFuture<'a, Result<String, String>>;
}

/// A wish for a child run.
#[derive(Clone, Copy, Debug)]
pub struct ChildRequest<'a> {
    /// The tool call that asks.
    pub tool_call_id: &'a str,
    /// Whose run it shall be.
    pub agent: &'a str,
    /// What it shall do.
    pub task: &'a str,
    /// What the caller passes along; none where blank.
    pub context: Option<&'a str>,
}

/// A wish for a child run of an unnamed agent, which is the caller's own with what is said here.
#[derive(Clone, Debug)]
pub struct AdHocRequest<'a> {
    /// The tool call that asks.
    pub tool_call_id: &'a str,
    /// What the task is called.
    pub label: &'a str,
    /// The first message of its conversation.
    pub task: &'a str,
    /// Most turns.
    pub max_turns: u32,
    /// Its tools, and whether it sums up.
    pub ad_hoc: AdHocSettings,
}
