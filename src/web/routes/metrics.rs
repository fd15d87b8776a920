//! `/metrics` in the Prometheus text format. A listener of its own serves it if one is configured.

use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

use crate::config::KeyScope::Metrics;
use crate::telemetry::metrics::GaugeSnapshot;
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
    let gauges = GaugeSnapshot {
        body_bytes: state.settings.body_budget.used(),
        ..runner.gauges()
    };
    let text = runner.metrics().render(&gauges);
    let headers = [
        (CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, text).into_response()
}
