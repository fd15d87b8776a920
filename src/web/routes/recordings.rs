//! `GET /runs/{id}/recording`: a tree as a file that `axed test` runs.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use crate::domain::recording::MAX_BYTES;
use crate::engine::replay::recording::RecordingError;
use crate::web::error::Problem;
use crate::web::extract::path::RunPath;
use crate::web::extract::query::Query;
use crate::web::problem_code::ProblemCode;
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

pub const TOML: &str = "application/toml";

pub async fn get(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    uri: Uri,
) -> Result<Response, Problem> {
    Query::read(&uri, &[])?;
    let run = require_run(&state, id).await?;
    let text = state.runner.recording(&run).await;
    let text = text.map_err(recording_problem)?;
    if text.len() > MAX_BYTES {
        return Err(Problem::new(
            StatusCode::CONFLICT,
            ProblemCode::NotRecorded,
            format!(
                "the recording of {id} would have {} bytes; at most {MAX_BYTES} are possible",
                text.len()
            ),
        ));
    }
    Ok(([(CONTENT_TYPE, TOML)], text).into_response())
}

fn recording_problem(error: RecordingError) -> Problem {
    let code = match error {
        RecordingError::NotARoot { .. } => ProblemCode::NotARoot,
        RecordingError::NotEnded(_) => ProblemCode::RunNotTerminal,
        RecordingError::RequestsOff(_) | RecordingError::Incomplete { .. } => {
            ProblemCode::NotRecorded
        }
        RecordingError::Store(error) => return error.into(),
    };
    Problem::new(StatusCode::CONFLICT, code, error.to_string())
}
