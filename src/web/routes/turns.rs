//! `/runs/{id}/turns`: what each turn of a run sent, and what came back.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use crate::domain::run::RunId;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::{RunPath, TurnPath};
use crate::web::extract::query::NoQuery;
use crate::web::problem_code::ProblemCode;
use crate::web::response::json::json_response;
use crate::web::response::turns::{TurnDetailView, TurnList, TurnView};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

/// `GET /runs/{id}/turns`
pub async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let turns = state.runner.store().turns(id).await?;
    let data = turns.into_iter().map(TurnView::new).collect();
    Ok(json_response(StatusCode::OK, &TurnList { data }))
}

/// `GET /runs/{id}/turns/{turn}`
pub async fn get(
    State(state): State<AppState>,
    TurnPath(id, number): TurnPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let store = state.runner.store();
    let found = match number.parse() {
        Ok(number) => store.turn(id, number).await?,
        Err(_) => None,
    };
    let Some(turn) = found else {
        let turns = store.turns(id).await?;
        let last = turns.last().map(|last| last.turn);
        return Err(turn_not_found(id, &number, last));
    };
    let turn = TurnDetailView::new(turn, &state.settings.redactor);
    Ok(json_response(StatusCode::OK, &turn))
}

fn turn_not_found(run: RunId, number: &str, last: Option<u32>) -> Problem {
    let recorded = match last {
        Some(1) => "it has turn 1".to_owned(),
        Some(last) => format!("it has the turns 1 to {last}"),
        None => "no turn of it is recorded yet, or it was recorded by an older version".to_owned(),
    };
    Problem::new(
        StatusCode::NOT_FOUND,
        ProblemCode::TurnNotFound,
        format!("{run} has no turn {}: {recorded}", quote(number)),
    )
}
