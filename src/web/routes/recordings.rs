//! `GET /runs/{id}/recording`: a tree as a file that `axed test` runs.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::config::KeyScope::Read;
use crate::domain::recording::MAX_BYTES;
use crate::engine::capture::RecordingError;
use crate::web::error::Problem;
use crate::web::extract::path::RunPath;
use crate::web::extract::query::NoQuery;
use crate::web::problem_code::ProblemCode::{self, NotARoot, NotRecorded, RunNotTerminal};
use crate::web::route::{Route, get};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

const TOML: &str = "application/toml";
const EXAMPLE: &str = r#"version = 1
agent = "critic"
input = "Is the earth flat?"
ignore = []

[expect]
completed = true

[[runs]]
path = "critic"
agent = "critic"
definition = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
model = "anthropic/claude-sonnet-5-5"
system = "You name the weakest points of a draft."
message = "Is the earth flat?"

[[runs.turns]]
turn = 1
reply = "It is a sphere."
stop_reason = "end_turn"
usage = { input = 31, output = 9 }
"#;

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/recording", [Read], recording)
            .describe("get_recording", "Returns the recording of a tree")
            .details(
                "A TOML file for `axed test`: what the models of the tree were sent and what came back, what its \
                 tools returned, and what a test expects. Images and files are left out.",
            )
            .text_response(200, TOML, "The recording.")
            .example(EXAMPLE)
            .problems(&[NotARoot, RunNotTerminal, NotRecorded]),
    ]
}

async fn recording(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    let run = require_run(&state, id).await?;
    let text = state.runner.recording(&run).await;
    let text = text.map_err(recording_problem)?;
    if text.len() > MAX_BYTES {
        return Err(Problem::new(
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
    Problem::new(code, error.to_string())
}
