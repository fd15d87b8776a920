//! Other protocols over the same runs, for clients that people already have. Each folder speaks one.

use crate::config::clients::Clients;
use crate::web::error::ErrorShape;
use crate::web::route::Route;

pub mod a2a;
pub mod ag_ui;
pub mod attachment;
pub mod call_id;
pub mod client_tools;
pub mod history;
pub mod mcp;
pub mod openai;
pub mod results;
pub mod run_meta;
pub mod run_wait;
pub mod start;
pub mod stop;

/// The routes of the protocols that the configuration leaves on.
pub fn routes(clients: Clients) -> Vec<Route> {
    let mut routes = Vec::new();
    if clients.openai {
        routes.extend(openai::routes());
    }
    if clients.a2a {
        routes.extend(a2a::routes());
    }
    if clients.ag_ui {
        routes.extend(ag_ui::routes());
    }
    if clients.mcp {
        routes.extend(mcp::routes());
    }
    routes
}

/// The beginnings of paths that belong to one protocol, with the shape of its errors.
pub fn error_shapes(clients: Clients) -> Vec<(&'static str, ErrorShape)> {
    let mut shapes = Vec::new();
    if clients.openai {
        shapes.push(("/v1/", openai::error::ERRORS));
    }
    if clients.a2a {
        shapes.push(("/a2a/", a2a::error::ERRORS));
    }
    shapes
}
