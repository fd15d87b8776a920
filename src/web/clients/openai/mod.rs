//! The API of OpenAI's clients. A model is an agent: `agent`, or `agent@provider/model`.

use axum::routing::{MethodRouter, get};

use crate::config::KeyScope::{self, Read};
use crate::web::clients::openai::error::ERRORS;
use crate::web::route::{Route, of_protocol};
use crate::web::state::AppState;

pub mod error;
pub mod models;

pub fn routes() -> Vec<Route> {
    vec![
        route("get", "/v1/models", get(models::list), Read),
        route("get", "/v1/models/{name}", get(models::get), Read),
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
