//! One file tool: reads its arguments, and lets it work on a thread where waiting for a disk stops nobody. Knows no file.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::schema::Schema;
use crate::tools::files::ground::{Ground, Shared, Stop};
use crate::tools::{Context, Effect, Output, Tool};
use crate::workdirs::access::Access;

/// Longest that a call may read: its thread is nobody else's meanwhile.
const MAX_READING: Duration = Duration::from_secs(30);

/// What a tool does with its arguments: the output for the model, or the error's text.
pub type Perform<A, O> = fn(&Ground, A) -> Result<O, String>;

/// A tool that takes these arguments.
pub struct FileTool<A, O> {
    /// What models call it by.
    pub name: &'static str,
    /// What models are told about it.
    pub about: &'static str,
    /// What calls of it do.
    pub kind: Kind,
    /// The schema of `A`.
    pub schema: Schema,
    /// What it does.
    pub perform: Perform<A, O>,
    /// What all file tools share.
    pub shared: Arc<Shared>,
}

/// What calls of a tool do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// They only read.
    Reads,
    /// They read, and compute as long as the model's pattern makes them: few at a time.
    Searches,
    /// They change files. Each is bounded in size and is not stopped halfway for its time.
    Changes,
}

impl<A, O> Tool for FileTool<A, O>
where
    A: DeserializeOwned + Send + 'static,
    O: Into<Output> + Send + 'static,
{
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(self.name, self.about, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        match self.kind {
            Kind::Reads | Kind::Searches => Effect::Reads,
            Kind::Changes => Effect::Changes,
        }
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn uses_workdir(&self) -> bool {
        true
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        context: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(async move {
            let arguments: A = call.read()?;
            let turn = match self.kind {
                Kind::Searches => Some(self.shared.searches.take(context.key).await),
                Kind::Reads | Kind::Changes => None,
            };
            let stop = match self.kind {
                Kind::Reads | Kind::Searches => Stop::default().within(MAX_READING),
                Kind::Changes => Stop::default(),
            };
            let _set_when_nobody_waits = stop.set_on_drop();
            let workdir = context.workdir()?;
            let (stopped, shared) = (stop.clone(), Arc::clone(&self.shared));
            let perform = self.perform;
            let work = move || {
                // Held by the work, which ends a little later than the wait for it.
                let _turn = turn;
                stopped.check().map_err(|error| error.to_string())?;
                let ground = Ground {
                    access: Access::new(workdir),
                    stop: stopped,
                    shared,
                };
                perform(&ground, arguments)
            };
            match tokio::task::spawn_blocking(work).await {
                Ok(done) => done.map(O::into),
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => Err("the daemon is stopping".to_owned()),
            }
        })
    }
}
