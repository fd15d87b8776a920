//! Metrics, logs and traces.

#[cfg(feature = "otel")]
mod collector;
mod gauges;
mod logs;
mod metrics;
#[cfg(feature = "otel")]
mod traces;
