//! The API of OpenAI's clients. A model is an agent: `agent`, or `agent@provider/model`.

use axum::routing::{MethodRouter, delete, get, post};

use crate::config::KeyScope::{self, Admin, Cancel, Read, Run};
use crate::web::clients::openai::error::ERRORS;
use crate::web::clients::openai::responses::reference::ResponseRef;
use crate::web::route::{Route, of_protocol};
use crate::web::state::AppState;

pub mod chat;
pub mod content;
pub mod create_request;
pub mod error;
pub mod models;
pub mod responses;
pub mod tool_choice;

/// A comment, which clients ignore.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";
/// The end of a stream.
pub const DONE: &str = "data: [DONE]\n\n";
const RESPONSE: &str = "/v1/responses/{id}";

/// Whether a path of the route of one response names an operation of OpenAI's service that does not exist here, such as
/// `/v1/responses/compact`.
pub fn is_unknown_operation(route: &str, path: &str) -> bool {
    let id = path.rsplit('/').next().unwrap_or_default();
    route.ends_with(RESPONSE) && ResponseRef::parse(id).is_none()
}

pub fn routes() -> Vec<Route> {
    vec![
        route("get", "/v1/models", get(models::list), Read),
        route("get", "/v1/models/{name}", get(models::get), Read),
        route("post", "/v1/chat/completions", post(chat::create), Run),
        route("post", "/v1/responses", post(responses::create), Run),
        route("get", RESPONSE, get(responses::get), Read),
        route("delete", RESPONSE, delete(responses::delete), Admin),
        route(
            "post",
            "/v1/responses/{id}/cancel",
            post(responses::cancel),
            Cancel,
        ),
        route(
            "get",
            "/v1/responses/{id}/input_items",
            get(responses::input_items),
            Read,
        ),
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
