//! The prefix of `Location` and of the links in responses: `server.path_prefix`, after the prefix that a trusted proxy has
//! removed from the path.

use std::convert::Infallible;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::web::route::Input;
use crate::web::server::forwarded::ForwardedPrefix;
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
