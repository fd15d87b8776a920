//! Metrics, logs and traces.

#[cfg(feature = "otel")]
mod collector;
mod metrics;
#[cfg(feature = "otel")]
mod traces;
