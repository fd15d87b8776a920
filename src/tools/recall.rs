//! `recall`: searches what is recorded of the run's conversation, also what requests leave out.

use std::sync::{Arc, LazyLock};

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::message::{ToolCall, ToolSpec, no_arguments};
use crate::domain::schema::Schema;
use crate::tools::{Context, Effect, Output, Tool};

/// The name that models call it by.
pub const NAME: &str = "recall";
const ABOUT: &str = "Search everything that was recorded of this conversation, also what is no longer part of it because \
                     it was summed up or dropped to keep the conversation short: messages, replies, tool calls and their \
                     results. Gives the passages in which most words of the query occur, the newest first.";
/// Passages of a call that does not say how many.
const DEFAULT_LIMIT: u32 = 5;

static SCHEMA: LazyLock<Option<Schema>> = LazyLock::new(|| Schema::of::<Arguments>().ok());

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Arguments {
    /// Words to look for, such as names, numbers or paths.
    #[schemars(length(min = 1, max = 400))]
    query: String,
    /// Most passages.
    #[schemars(range(min = 1, max = 20))]
    #[serde(default = "default_limit")]
    limit: u32,
}

fn default_limit() -> u32 {
    DEFAULT_LIMIT
}

struct Recall;

/// The tool.
pub fn tool() -> Arc<dyn Tool> {
    Arc::new(Recall)
}

impl Tool for Recall {
    fn spec(&self) -> ToolSpec {
        let parameters = SCHEMA.as_ref().map(|schema| Arc::clone(schema.raw()));
        ToolSpec::new(NAME, ABOUT, &parameters.unwrap_or_else(no_arguments))
    }

    fn effect(&self) -> Effect {
        Effect::Reads
    }

    fn schema(&self) -> Option<&Schema> {
        SCHEMA.as_ref()
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        context: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(async move {
            let Arguments { query, limit } = call.read()?;
            let found = context.delegate.recall(&query, limit as usize).await;
            found.map(Output::from)
        })
    }
}
