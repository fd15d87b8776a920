//! The head of a request that creates a run, for chat completions and responses.

use axum::extract::Request;
use axum::http::Uri;

use crate::domain::trace::TraceContext;
use crate::engine::state::provider_keys::Keys;
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::body::request_body::RequestBody;
use crate::web::error::Problem;
use crate::web::extract::idempotency;
use crate::web::routes::create_run::ParsedRequest;
use crate::web::state::Settings;

pub struct CreateRequest {
    pub body: RequestBody,
    pub claim: Option<IdempotencyClaim>,
    pub trace: Option<Box<TraceContext>>,
    pub provider_keys: Keys,
}

impl CreateRequest {
    /// Reads a POST to `path`.
    pub async fn read(
        settings: &Settings,
        principal: &Principal,
        path: &'static str,
        mut request: Request,
    ) -> Result<Self, Problem> {
        // Some clients add parameters of other services.
        *request.uri_mut() = Uri::from_static(path);
        let parsed = ParsedRequest::read(settings, request).await?;
        let claim = parsed.idempotency_key.map(|(key, body)| {
            let route = format!("POST {path}");
            idempotency::new_claim(principal.key_name(), route, key, body)
        });
        Ok(Self {
            body: parsed.body,
            claim,
            trace: parsed.trace,
            provider_keys: parsed.provider_keys,
        })
    }
}
