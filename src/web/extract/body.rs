//! The JSON body of a request, without images and files.

use axum::extract::{FromRequest, Request};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;

use crate::web::body::request_body::{self, RequestBody};
use crate::web::error::Problem;
use crate::web::route::{Input, Route};
use crate::web::state::AppState;

/// The default if the request has no body.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Default + JsonSchema> FromRequest<AppState> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let body = RequestBody::from_request(request, state).await?;
        body.json().map(Self)
    }
}

/// The body as it was sent, which the route describes.
impl FromRequest<AppState> for RequestBody {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Problem> {
        let (parts, body) = request.into_parts();
        Box::pin(request_body::read(
            &parts,
            body,
            state.settings.body_limits(),
        ))
        .await
    }
}

impl Input for RequestBody {}

impl<T: JsonSchema> Input for JsonBody<T> {
    fn describe(route: Route) -> Route {
        route.request_body::<T>()
    }
}
