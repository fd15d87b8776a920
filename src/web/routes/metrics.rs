//! `/metrics` in the Prometheus text format. A listener of its own serves it if one is configured.

use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

use crate::config::KeyScope::Metrics;
use crate::engine::blocking::run_blocking;
use crate::telemetry::metrics::{GaugeSnapshot, ScrapedState};
use crate::telemetry::process::ProcessStats;
use crate::web::route::{Route, get};
use crate::web::state::AppState;

pub fn route() -> Route {
    get("/metrics", [Metrics], metrics)
        .describe(
            "get_metrics",
            "Returns the daemon's metrics, for Prometheus",
        )
        .details("`docs/operations/metrics.md` describes each metric.")
        .text_response(200, "text/plain", "The Prometheus text format.")
        .example("axed_runs_running 3\n")
}

async fn metrics(State(state): State<AppState>) -> Response {
    let runner = &state.runner;
    let store = state.store_gauges.read(runner).await;
    let process = run_blocking(ProcessStats::read).await;
    let is_store_writable = store.is_writable && runner.store_error().is_none();
    let text = runner.metrics().render(&ScrapedState {
        gauges: GaugeSnapshot {
            body_bytes: state.settings.body_budget.used(),
            ..runner.gauges()
        },
        is_ready: is_store_writable && state.is_accepting(),
        is_store_writable,
        pending_deliveries: store.pending_deliveries,
        commits: runner.store().commits(),
        mcp_calls: runner.mcp_calls(),
        process,
    });
    let headers = [
        (CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, text).into_response()
}
