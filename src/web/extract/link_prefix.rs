//! The URLs in responses: their prefix is `server.path_prefix`, after the prefix that a trusted proxy has removed from the path.

use std::convert::Infallible;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::HOST;
use axum::http::request::Parts;

use crate::web::error::Problem;
use crate::web::route::Input;
use crate::web::server::forwarded::{ForwardedOrigin, ForwardedPrefix};
use crate::web::state::{AppState, Settings};

/// Empty, or `/something`.
#[derive(Clone)]
pub struct LinkPrefix {
    settings: Arc<Settings>,
    /// The whole prefix, if a proxy has removed a part of it.
    forwarded: Option<Arc<str>>,
}

impl Deref for LinkPrefix {
    type Target = str;

    fn deref(&self) -> &str {
        let configured = &self.settings.path_prefix;
        self.forwarded.as_deref().unwrap_or(configured)
    }
}

impl Input for LinkPrefix {}

impl FromRequestParts<AppState> for LinkPrefix {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Infallible> {
        let configured = &state.settings.path_prefix;
        let forwarded =
            parts
                .extensions
                .get::<ForwardedPrefix>()
                .map(|prefix| match configured.as_str() {
                    "" => Arc::clone(&prefix.0),
                    configured => format!("{}{configured}", prefix.0).into(),
                });
        Ok(Self {
            settings: Arc::clone(&state.settings),
            forwarded,
        })
    }
}

/// The URL that the client reaches the server at, `https://host/prefix`: that of a trusted proxy, or the request's own host.
pub struct PublicUrl(String);

impl PublicUrl {
    /// The URL of a path that begins with a slash.
    pub fn join(&self, path: &str) -> String {
        format!("{}{path}", self.0)
    }
}

impl Input for PublicUrl {}

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
