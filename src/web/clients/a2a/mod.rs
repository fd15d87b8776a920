//! A2A 1.0: the HTTP+JSON binding below `/a2a/{agent}/`, and the JSON-RPC binding at `/a2a/{agent}`. A task is a root run of the agent, a context is a session, an
//! approval is input that a task requires.

use axum::routing::{MethodRouter, delete, get, post};

use crate::config::KeyScope::{self, Approve, Read, Run};
use crate::web::clients::a2a::error::ERRORS;
use crate::web::route::{Route, of_protocol};
use crate::web::state::AppState;

pub mod card;
pub mod content;
pub mod context;
pub mod decisions;
pub mod error;
pub mod history;
pub mod list;
pub mod message;
pub mod push;
pub mod push_config;
pub mod response;
pub mod rpc;
pub mod send;
pub mod stream;
pub mod task;
pub mod tasks;
pub mod types;
pub mod version;

pub fn routes() -> Vec<Route> {
    const CARD: &str = "/a2a/{agent}/.well-known/agent-card.json";
    const EXTENDED_CARD: &str = "/a2a/{agent}/extendedAgentCard";
    const TASK: &str = "/a2a/{agent}/tasks/{id}";
    const CONFIGS: &str = "/a2a/{agent}/tasks/{id}/pushNotificationConfigs";
    const CONFIG: &str = "/a2a/{agent}/tasks/{id}/pushNotificationConfigs/{config}";
    vec![
        open("get", "/.well-known/agent-card.json", get(card::all)),
        open("get", CARD, get(card::of_agent)),
        open("get", EXTENDED_CARD, get(card::extended)),
        route("post", "/a2a/{agent}/message:send", post(send::send), Run).with_scope(Approve),
        route(
            "post",
            "/a2a/{agent}/message:stream",
            post(send::stream),
            Run,
        )
        .with_scope(Approve),
        open("get", TASK, get(tasks::get)),
        open("post", TASK, post(tasks::act)),
        route("get", "/a2a/{agent}/tasks", get(list::list), Read),
        route("post", CONFIGS, post(push::create), Run),
        route("get", CONFIGS, get(push::list), Read),
        route("get", CONFIG, get(push::get), Read),
        route("delete", CONFIG, delete(push::delete), Run),
        of_protocol("post", "/a2a/{agent}", post(rpc::post), rpc::ERRORS).with_any_key(),
    ]
}

fn route(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<AppState>,
    scope: KeyScope,
) -> Route {
    of_protocol(method, path, handler, ERRORS).with_scope(scope)
}

/// For every key: the handlers check its scopes.
fn open(method: &'static str, path: &'static str, handler: MethodRouter<AppState>) -> Route {
    of_protocol(method, path, handler, ERRORS).with_any_key()
}
