//! `recall`: searches the recorded conversation, including what is no longer sent to the model.

use std::sync::{Arc, LazyLock};

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::StaticSpec;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};

pub const NAME: &str = "recall";
const DESCRIPTION: &str = "Search everything that was recorded of this conversation, also what is no longer part of it because \
                     it was summed up or dropped to keep the conversation short: messages, replies, tool calls and their \
                     results. Gives the passages in which most words of the query occur, the newest first.";
/// Passages that a call returns if it sets no limit.
const DEFAULT_LIMIT: u32 = 5;

static SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<Arguments>(NAME, DESCRIPTION));

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

pub fn tool() -> Arc<dyn Tool> {
    Arc::new(Recall)
}

impl Tool for Recall {
    fn spec(&self) -> ToolSpec {
        SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::ReadOnly
    }

    fn schema(&self) -> Option<&Schema> {
        SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let Arguments { query, limit } = call.parse_arguments()?;
            let passages = context.delegate.recall(&query, limit as usize).await;
            passages.map(ToolOutput::from)
        })
    }
}
