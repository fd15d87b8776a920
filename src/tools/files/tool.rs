//! One file tool: reads its arguments, and lets it work on a thread where waiting for a disk stops nobody. Knows no file.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use crate::domain::message::{ToolCall, ToolSpec};
use crate::domain::schema::Schema;
use crate::tools::files::ground::{Ground, Shared, Stop};
use crate::tools::{Context, Effect, Tool};
use crate::workdirs::access::Access;

/// What a tool does with its arguments: the text for the model, or the error's text.
pub type Perform<A> = fn(&Ground, A) -> Result<String, String>;

/// A tool that takes these arguments.
pub struct FileTool<A> {
    /// What models call it by.
    pub name: &'static str,
    /// What models are told about it.
    pub about: &'static str,
    /// Whether it only reads.
    pub effect: Effect,
    /// The schema of `A`.
    pub schema: Schema,
    /// What it does.
    pub perform: Perform<A>,
    /// What all file tools share.
    pub shared: Arc<Shared>,
}

impl<A: DeserializeOwned + Send + 'static> Tool for FileTool<A> {
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(self.name, self.about, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        self.effect
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
    ) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let arguments: A = call.read()?;
            let stop = Stop::default();
            let _set_when_nobody_waits = stop.set_on_drop();
            let workdir = context.workdir()?;
            let (stopped, shared) = (stop.clone(), Arc::clone(&self.shared));
            let perform = self.perform;
            let work = move || {
                stopped.check().map_err(|error| error.to_string())?;
                let ground = Ground {
                    access: Access::new(workdir),
                    stop: stopped,
                    shared,
                };
                perform(&ground, arguments)
            };
            match tokio::task::spawn_blocking(work).await {
                Ok(done) => done,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => Err("the daemon is stopping".to_owned()),
            }
        })
    }
}
