//! What `cargo bench --bench axed -- others` measures beside axed: an axum handler whose agents are rig's. It keeps nothing.
//!
//! `rig-handler ADDRESS` asks the provider at this address, listens on a free port and prints it.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use rig_core::agent::Agent;
use rig_core::client::CompletionClient;
use rig_core::completion::{Prompt, ToolDefinition};
use rig_core::providers::openai::CompletionsClient;
use rig_core::tool::Tool;
use serde::{Deserialize, Serialize};

type Model = rig_core::providers::openai::completion::CompletionModel;

struct Agents {
    solo: Agent<Model>,
    root: Agent<Model>,
}

#[derive(Deserialize)]
struct RunRequest {
    input: String,
}

#[derive(Serialize)]
struct RunResponse {
    content: String,
    input_tokens: u64,
    output_tokens: u64,
}

#[derive(Deserialize)]
struct Delegation {
    task: String,
}

/// The tool by which the agent `root` delegates.
struct CallAgent(Agent<Model>);

impl Tool for CallAgent {
    const NAME: &'static str = "call_agent";
    type Error = Infallible;
    type Args = Delegation;
    type Output = String;

    async fn definition(&self, _: String) -> ToolDefinition {
        ToolDefinition {
            name: Self::NAME.to_owned(),
            description: "Delegate a task to a sub-agent.".to_owned(),
            parameters: serde_json::json!({"type": "object", "properties": {
                "agent": {"type": "string"}, "task": {"type": "string"}}}),
        }
    }

    async fn call(&self, delegation: Delegation) -> Result<String, Infallible> {
        Ok(self.0.prompt(delegation.task).await.expect("a reply"))
    }
}

#[tokio::main]
async fn main() {
    let provider = std::env::args().nth(1).expect("the provider's address");
    let client = CompletionsClient::builder()
        .api_key("none")
        .base_url(format!("http://{provider}/v1"))
        .build()
        .expect("a client");
    let leaf = client.agent("leaf").build();
    let agents = Agents {
        solo: client.agent("solo").build(),
        root: client.agent("root").tool(CallAgent(leaf)).build(),
    };
    let routes = Router::new()
        .route("/run", post(run))
        .route("/tree", post(run_tree))
        .with_state(Arc::new(agents));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!("listening on http://{}", listener.local_addr().expect("an address"));
    axum::serve(listener, routes).await.expect("serve");
}

async fn run(
    State(agents): State<Arc<Agents>>,
    Json(request): Json<RunRequest>,
) -> Json<RunResponse> {
    answer(&agents.solo, request).await
}

async fn run_tree(
    State(agents): State<Arc<Agents>>,
    Json(request): Json<RunRequest>,
) -> Json<RunResponse> {
    answer(&agents.root, request).await
}

async fn answer(agent: &Agent<Model>, request: RunRequest) -> Json<RunResponse> {
    let prompt = agent.prompt(request.input).max_turns(4).with_tool_concurrency(3);
    let reply = prompt.extended_details().await.expect("a reply");
    Json(RunResponse {
        content: reply.output,
        input_tokens: reply.usage.input_tokens,
        output_tokens: reply.usage.output_tokens,
    })
}
