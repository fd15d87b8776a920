//! The shape of errors on routes that speak another protocol: the protocol's own, with the code of the problem in it.

use axum::http::StatusCode;

use crate::web::error::Problem;

/// Renders a problem as the protocol of a route does. Also used for problems that occur before the handler runs, such as
/// an unknown key.
#[derive(Clone, Copy)]
pub struct ErrorShape(pub fn(&Problem) -> ShapedError);

/// The response to a request that fails, as JSON.
pub struct ShapedError {
    pub status: StatusCode,
    pub body: Vec<u8>,
}
