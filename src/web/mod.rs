//! The HTTP API: routes, the run object, events, errors. Knows no provider, no SQL and no agent file.

pub mod auth;
pub mod batches;
pub mod body;
mod change_errors;
pub mod clients;
pub mod console;
pub mod error;
pub mod evals;
pub mod extract;
pub mod feedback_links;
pub mod openapi;
pub mod problem_code;
pub mod response;
pub mod route;
pub mod router;
pub mod routes;
pub mod server;
pub mod state;
pub mod tickets;
pub mod wait;
