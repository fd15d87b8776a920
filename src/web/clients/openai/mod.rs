//! The API of OpenAI's clients. A model is an agent: `agent`, or `agent@provider/model`.

use axum::routing::{MethodRouter, get, post};

use crate::config::KeyScope::{self, Read, Run};
use crate::web::clients::openai::error::ERRORS;
use crate::web::route::{Route, of_protocol};
use crate::web::state::AppState;

pub mod call_id;
pub mod chat;
pub mod content;
pub mod error;
pub mod models;
pub mod results;
pub mod stop;
pub mod tools;

pub fn routes() -> Vec<Route> {
    vec![
        route("get", "/v1/models", get(models::list), Read),
        route("get", "/v1/models/{name}", get(models::get), Read),
        route("post", "/v1/chat/completions", post(chat::create), Run),
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
