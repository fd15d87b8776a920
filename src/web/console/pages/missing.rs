//! Addresses below `/ui/` that are no page.

use axum::http::StatusCode;
use axum::response::Response;

use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

pub async fn page(request: ConsoleRequest) -> Response {
    let why = "the console has no such page";
    let problem = Problem::new(StatusCode::NOT_FOUND, ProblemCode::RouteNotFound, why);
    request.respond(Err(problem))
}
