//! `/runs/{id}/turns`: what each turn of a run sent, and what came back.

use std::num::NonZeroU32;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::KeyScope::Read;
use crate::domain::run::RunId;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::{Params, RunPath};
use crate::web::extract::query::NoQuery;
use crate::web::problem_code::ProblemCode::{self, TurnNotFound};
use crate::web::response::json::json_response;
use crate::web::response::turns::{TurnDetailView, TurnList, TurnView};
use crate::web::route::{Route, get};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

pub fn routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/turns", [Read], list)
            .describe("list_run_turns", "Lists the turns of a run")
            .details(
                "A turn is listed when its reply is recorded, or when the run has ended without one. Requests that \
                 are no turns, such as those for a summary, are not listed.",
            )
            .response::<TurnList>(200, "The turns.")
            .example(json!({"data": [turn_example()]})),
        get("/runs/{id}/turns/{turn}", [Read], get_turn)
            .describe("get_run_turn", "Returns a turn with its request and its reply")
            .details(
                "`request` is what the provider got: the request that was answered, else the last one. Keys are \
                 left out, and what `[data] redact` of the server's configuration matches.",
            )
            .path::<NonZeroU32>("turn", "The number of the turn, from 1.", TurnNotFound)
            .response::<TurnDetailView>(200, "The turn.")
            .example(detail_example()),
    ]
}

#[derive(Deserialize)]
struct TurnParam {
    turn: String,
}

async fn list(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    _: NoQuery,
) -> Result<Response, Problem> {
    require_run(&state, id).await?;
    let turns = state.runner.store().turns(id).await?;
    let data = turns.into_iter().map(TurnView::new).collect();
    Ok(json_response(StatusCode::OK, &TurnList { data }))
}

async fn get_turn(
    State(state): State<AppState>,
    RunPath(id): RunPath,
    Params(TurnParam { turn: number }): Params<TurnParam>,
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
        ProblemCode::TurnNotFound,
        format!("{run} has no turn {}: {recorded}", quote(number)),
    )
}

fn turn_example() -> Value {
    json!({
        "turn": 1, "provider": "anthropic", "model": "claude-sonnet-5-5", "effort": null, "status": "completed",
        "copied": false, "redacted": false, "request_bytes": 126, "first_token_ms": 640, "duration_ms": 3_480,
        "attempts": [
            {
                "provider": "anthropic", "model": "claude-sonnet-5-5", "status": 529,
                "error": "overloaded: Overloaded", "started_at": "2026-03-01T09:30:00.000Z", "duration_ms": 210
            },
            {
                "provider": "anthropic", "model": "claude-sonnet-5-5", "status": 200, "error": null,
                "started_at": "2026-03-01T09:30:01.000Z", "duration_ms": 2_480
            }
        ],
        "usage": {
            "input_tokens": 1_200, "output_tokens": 85, "cache_read_tokens": 0, "cache_write_tokens": 0,
            "reasoning_tokens": 0
        },
        "cost_usd": 0.004_875, "stop_reason": "tool_use", "tool_calls": 1
    })
}

fn detail_example() -> Value {
    let mut detail = turn_example();
    detail["request"] = json!({
        "method": "POST", "url": "https://api.anthropic.com/v1/messages",
        "headers": {
            "anthropic-version": "2023-06-01", "content-type": "application/json", "user-agent": "axed/1.0.0",
            "x-api-key": "[redacted]"
        },
        "key_variable": "ANTHROPIC_API_KEY",
        "body": {
            "model": "claude-sonnet-5-5", "max_tokens": 8_192,
            "messages": [{"role": "user", "content": "Summarize the report."}]
        }
    });
    detail["reply"] = json!({
        "content": "I read the report first.", "reasoning": null,
        "tool_calls": [{"id": "call_1", "name": "read_file", "arguments": {"path": "report.md"}}], "raw": null
    });
    detail
}
