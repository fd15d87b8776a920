//! One file tool: reads its arguments, and lets it work on a thread where waiting for a disk stops nobody. Knows no file.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::files::workdir_fs::{SharedState, StopToken, WorkdirFs};
use crate::tools::{CallContext, Effect, Tool, ToolOutput};
use crate::workdirs::handle::WorkdirHandle;

/// Longest that a call may read: its thread is nobody else's meanwhile.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// What a tool does with its arguments: the output for the model, or the error's text.
pub type FileToolFn<A, O> = fn(&WorkdirFs, A) -> Result<O, String>;

/// A tool that takes these arguments.
pub struct FileTool<A, O> {
    /// What models call it by.
    pub name: &'static str,
    /// What models are told about it.
    pub description: &'static str,
    /// What calls of it do.
    pub kind: FileToolKind,
    /// The schema of `A`.
    pub schema: Schema,
    /// What it does.
    pub execute: FileToolFn<A, O>,
    /// What all file tools share.
    pub shared: Arc<SharedState>,
}

/// What calls of a tool do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileToolKind {
    /// They only read.
    Read,
    /// They read, and compute as long as the model's pattern makes them: few at a time.
    Search,
    /// They change files. Each is bounded in size and is not stopped halfway for its time.
    Write,
}

impl<A, O> Tool for FileTool<A, O>
where
    A: DeserializeOwned + Send + 'static,
    O: Into<ToolOutput> + Send + 'static,
{
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(self.name, self.description, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        match self.kind {
            FileToolKind::Read | FileToolKind::Search => Effect::ReadOnly,
            FileToolKind::Write => Effect::Mutating,
        }
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn uses_workdir(&self) -> bool {
        true
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: A = call.parse_arguments()?;
            let permit = match self.kind {
                FileToolKind::Search => Some(self.shared.search_permits.acquire(context.key).await),
                FileToolKind::Read | FileToolKind::Write => None,
            };
            let stop = match self.kind {
                FileToolKind::Read | FileToolKind::Search => {
                    StopToken::default().with_timeout(READ_TIMEOUT)
                }
                FileToolKind::Write => StopToken::default(),
            };
            let _cancel_on_drop = stop.cancel_on_drop();
            let workdir = context.workdir()?;
            let (stopped, shared) = (stop.clone(), Arc::clone(&self.shared));
            let execute = self.execute;
            let work = move || {
                // Held by the work, which ends a little later than the wait for it.
                let _permit = permit;
                stopped.check().map_err(|error| error.to_string())?;
                let fs = WorkdirFs {
                    access: WorkdirHandle::new(workdir),
                    stop: stopped,
                    shared,
                };
                execute(&fs, arguments)
            };
            match tokio::task::spawn_blocking(work).await {
                Ok(result) => result.map(O::into),
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => Err("the daemon is stopping".to_owned()),
            }
        })
    }
}
