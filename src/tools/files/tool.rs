//! One file tool: parses its arguments, then runs on a blocking thread.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::files::workdir_fs::{SharedState, StopToken, WorkdirFs};
use crate::tools::{CallContext, Effect, Tool, ToolOutput};
use crate::workdirs::handle::WorkdirHandle;

/// Most time that a call may read: it occupies a thread meanwhile.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Executes a call. The error's text is for the model.
pub type FileToolFn<A, O> = fn(&WorkdirFs, A) -> Result<O, String>;

/// A tool with the arguments `A`.
pub struct FileTool<A, O> {
    pub name: &'static str,
    pub description: &'static str,
    pub kind: FileToolKind,
    /// The schema of `A`.
    pub schema: Schema,
    pub execute: FileToolFn<A, O>,
    pub shared: Arc<SharedState>,
}

/// What calls of a tool do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileToolKind {
    /// Only read files.
    Read,
    /// Read files and match a pattern, which may take long: few run at once.
    Search,
    /// Change files. A call is bounded in size, and no timeout stops it halfway.
    Write,
    /// Change a file that is in memory meanwhile: few run at once.
    Edit,
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
            FileToolKind::Write | FileToolKind::Edit => Effect::Mutating,
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
            let permits = match self.kind {
                FileToolKind::Search => &self.shared.search_permits,
                FileToolKind::Read => &self.shared.read_permits,
                FileToolKind::Write => &self.shared.write_permits,
                FileToolKind::Edit => &self.shared.edit_permits,
            };
            let permit = context.acquire(permits).await;
            let stop = match self.kind {
                FileToolKind::Read | FileToolKind::Search => {
                    StopToken::default().with_timeout(READ_TIMEOUT)
                }
                FileToolKind::Write | FileToolKind::Edit => StopToken::default(),
            };
            let _cancel_on_drop = stop.cancel_on_drop();
            let workdir = context.workdir()?;
            let (stopped, shared) = (stop.clone(), Arc::clone(&self.shared));
            let execute = self.execute;
            let work = move || {
                // The work keeps the permit, because it ends a little after a dropped call.
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
