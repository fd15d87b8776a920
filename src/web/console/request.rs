//! A request for a page: who makes it, and what it names.

use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::Uri;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::response::Response;
use serde::de::DeserializeOwned;

use crate::config::KeyScope;
use crate::domain::run::RunId;
use crate::store::inputs::InputQuery;
use crate::web::auth::{self, Principal};
use crate::web::console::layout::{self, MAX_BADGE, Shell};
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::path::visible_run_id;
use crate::web::extract::query::Query;
use crate::web::routes::approvals;
use crate::web::state::AppState;

/// A request of a principal that may read.
pub struct ConsoleRequest {
    pub state: AppState,
    pub principal: Principal,
    pub shell: Shell,
    pub uri: Uri,
    params: Vec<(String, String)>,
}

impl ConsoleRequest {
    /// The address of a page below `/ui`.
    pub fn href(&self, path: &str) -> String {
        self.shell.href(path)
    }

    /// The address of a run's page.
    pub fn run_href(&self, run: RunId) -> String {
        self.href(&format!("/runs/{run}"))
    }

    pub fn may(&self, scope: KeyScope) -> bool {
        self.principal.has_scope(scope)
    }

    /// A variable part of the path.
    pub fn param(&self, name: &str) -> &str {
        let mut params = self.params.iter();
        let found = params.find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }

    /// The query, without the empty values that a form sends for empty fields.
    pub fn query<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        Query::read_form(&self.uri).map(|Query(query)| query)
    }

    /// A run that the principal may see; 404 otherwise.
    pub async fn visible_run(&self, id: &str) -> Result<RunId, Problem> {
        visible_run_id(&self.principal, &self.state, id).await
    }
}

impl FromRequestParts<AppState> for ConsoleRequest {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Response> {
        let Ok(links) = LinkPrefix::from_request_parts(parts, state).await;
        let mut shell = Shell::new(&links, state);
        let principal = match auth::authenticate(&state.settings, &parts.headers) {
            Ok(principal) => principal,
            Err(problem) => {
                let was_sent = parts.headers.contains_key(AUTHORIZATION);
                return Err(layout::sign_in(&shell, was_sent.then_some(&problem)));
            }
        };
        shell.key_name = principal.key_name().map(str::to_owned);
        if let Err(problem) = principal.require_scope(KeyScope::Read) {
            return Err(layout::sign_in(&shell, Some(&problem)));
        }
        let query = InputQuery {
            limit: MAX_BADGE,
            ..InputQuery::default()
        };
        // A page without the number is better than none.
        if let Ok(waiting) = approvals::visible_page(state, &principal, query).await {
            shell.approvals = waiting.inputs.len();
        }
        let params = RawPathParams::from_request_parts(parts, state).await;
        let params = params.map(|params| {
            let pairs = params.iter();
            let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
            pairs.collect()
        });
        Ok(Self {
            state: state.clone(),
            principal,
            shell,
            uri: parts.uri.clone(),
            params: params.unwrap_or_default(),
        })
    }
}
