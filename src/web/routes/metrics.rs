//! `/metrics` in the Prometheus text format. A listener of its own serves it if one is configured.

use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

use crate::telemetry::metrics::GaugeSnapshot;
use crate::web::state::AppState;

/// `GET /metrics`
pub async fn metrics(State(state): State<AppState>) -> Response {
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
