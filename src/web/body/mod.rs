//! Reads the body of a request within limits of size, time and memory, and turns it into checked values. Knows neither the
//! routes nor the state of the server: the limits are parameters.

pub mod body_budget;
pub mod content;
pub mod form;
pub mod gzip;
pub mod json_body;
pub mod known_fields;
pub mod large_body;
pub mod request_body;
