//! Addresses below `/ui/` that are no page.

use crate::web::console::layout::Page;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

pub async fn page(_: ConsoleRequest) -> Result<Page, Problem> {
    let why = "the console has no such page";
    Err(Problem::new(ProblemCode::RouteNotFound, why))
}
