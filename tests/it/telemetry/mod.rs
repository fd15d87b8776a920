//! Metrics, logs and traces.

mod metrics;
#[cfg(feature = "otel")]
mod traces;
