//! The URL that the client reaches the server at: that of a trusted proxy, or the request's own host.

use axum::extract::FromRequestParts;
use axum::http::header::HOST;
use axum::http::request::Parts;

use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::server::forwarded::ForwardedOrigin;
use crate::web::state::AppState;

/// `https://host/prefix`
pub struct PublicUrl(String);

impl PublicUrl {
    /// The URL of a path that begins with a slash.
    pub fn join(&self, path: &str) -> String {
        format!("{}{path}", self.0)
    }
}

impl FromRequestParts<AppState> for PublicUrl {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Problem> {
        let Ok(prefix) = LinkPrefix::from_request_parts(parts, state).await;
        let forwarded = parts.extensions.get::<ForwardedOrigin>();
        let scheme = forwarded.and_then(|origin| origin.scheme).unwrap_or("http");
        let own_host = || {
            let header = parts.headers.get(HOST).and_then(|host| host.to_str().ok());
            parts.uri.authority().map(|it| it.as_str()).or(header)
        };
        let host = forwarded.and_then(|origin| origin.host.as_ref());
        let host = host.map(|host| host.as_str()).or_else(own_host);
        let host = host.ok_or_else(|| Problem::internal("a request without a host"))?;
        Ok(Self(format!("{scheme}://{host}{}", &*prefix)))
    }
}
