//! Metrics, logs and traces.

#[cfg(feature = "otel")]
mod collector;
mod gauges;
mod logs;
pub mod metrics;
#[cfg(feature = "otel")]
mod traces;
