//! `await_agents` and `cancel_agent`: wait for sub-agents in the background, or cancel one.

use std::sync::{Arc, LazyLock};

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::domain::run::RunId;
use crate::tools::{AwaitRequest, CallContext, Effect, StaticSpec, Tool, ToolOutput};

pub const AWAIT_AGENTS: &str = "await_agents";
pub const CANCEL_AGENT: &str = "cancel_agent";

/// What the argument `background` of the tools that start sub-agents is for.
pub const ARGUMENT: &str = "true: do not wait for the sub-agent. The result is its id at once; you get what it returns as a message, or from \
                            await_agents.";

const AWAIT_DESCRIPTION: &str = "Wait for sub-agents that you have started in the background, and get what they return. Without runs: for all \
                                 whose results you do not have yet. You get each result once: here, or as a message.";
const CANCEL_DESCRIPTION: &str =
    "Cancel a sub-agent that you have started in the background and do not need any more.";

static AWAIT_SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<AwaitArguments>(AWAIT_AGENTS, AWAIT_DESCRIPTION));
static CANCEL_SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<CancelArguments>(CANCEL_AGENT, CANCEL_DESCRIPTION));

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AwaitArguments {
    /// The ids of the sub-agents, as `run` in the results of the calls that started them.
    #[serde(default)]
    runs: Option<Vec<String>>,
    /// Whether to wait only until the first of them has ended.
    #[serde(default)]
    any: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CancelArguments {
    /// The id of the sub-agent, as `run` in the result of the call that started it.
    run: String,
}

struct AwaitAgents;

struct CancelAgent;

/// The tools of an agent that may start others in the background.
pub fn tools() -> [(&'static str, Arc<dyn Tool>); 2] {
    [
        (AWAIT_AGENTS, Arc::new(AwaitAgents)),
        (CANCEL_AGENT, Arc::new(CancelAgent)),
    ]
}

impl Tool for AwaitAgents {
    fn spec(&self) -> ToolSpec {
        AWAIT_SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::Delegating
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let AwaitArguments { runs, any } = call.parse_arguments()?;
            // Models write an empty list for all.
            let runs = runs.filter(|runs| !runs.is_empty());
            let runs = runs.map(|runs| runs.iter().map(|run| parse_id(run)).collect());
            let request = AwaitRequest {
                call: &call.id,
                runs: runs.transpose()?,
                any: any.unwrap_or_default(),
            };
            let ends = context.delegate.await_agents(request).await?;
            let json = serde_json::to_string(&ends).map_err(|error| error.to_string())?;
            Ok(ToolOutput::from(json))
        })
    }
}

impl Tool for CancelAgent {
    fn spec(&self) -> ToolSpec {
        CANCEL_SPEC.to_spec()
    }

    /// A second cancel changes nothing.
    fn effect(&self) -> Effect {
        Effect::ReadOnly
    }

    fn schema(&self) -> Option<&Schema> {
        CANCEL_SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let CancelArguments { run } = call.parse_arguments()?;
            let run = parse_id(&run)?;
            context.delegate.cancel_agent(run).await?;
            Ok(ToolOutput::from(format!("{run} is cancelled.")))
        })
    }
}

fn parse_id(text: &str) -> Result<RunId, String> {
    let parsed = text.trim().parse();
    parsed.map_err(|_| format!("\"{}\" is not the id of a sub-agent", shorten(text, 80)))
}
