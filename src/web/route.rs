//! One route: its method and path, the scope that it needs, its handler and its OpenAPI entry.

use axum::handler::Handler;
use axum::routing::{self, MethodRouter};

use crate::config::KeyScope;
use crate::web::auth;
use crate::web::openapi::operation::Operation;
use crate::web::state::AppState;

pub struct Route {
    /// In lower case.
    pub method: &'static str,
    /// Without the path prefix.
    pub path: &'static str,
    /// The scope that a key needs, if keys are configured; `None` if the route is open to everybody.
    pub scope: Option<KeyScope>,
    /// Describes the route in the OpenAPI document.
    pub describe: fn(Operation<'_>) -> Operation<'_>,
    /// Whether a ticket for the run is accepted in place of a key.
    accepts_ticket: bool,
    handler: MethodRouter<AppState>,
}

impl Route {
    pub fn with_scope(self, scope: KeyScope) -> Self {
        Self {
            scope: Some(scope),
            ..self
        }
    }

    pub fn or_ticket(self) -> Self {
        Self {
            accepts_ticket: true,
            ..self
        }
    }

    pub fn into_handler(self, state: &AppState) -> MethodRouter<AppState> {
        match self.scope {
            Some(scope) if self.accepts_ticket => {
                auth::require_scope_or_ticket(state, scope, self.handler)
            }
            Some(scope) => auth::require_scope(&state.settings, scope, self.handler),
            None => self.handler,
        }
    }
}

type DescribeOperation = fn(Operation<'_>) -> Operation<'_>;

pub fn get<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, AppState>,
    describe: DescribeOperation,
) -> Route {
    route("get", path, routing::get(handler), describe)
}

pub fn post<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, AppState>,
    describe: DescribeOperation,
) -> Route {
    route("post", path, routing::post(handler), describe)
}

pub fn delete<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, AppState>,
    describe: DescribeOperation,
) -> Route {
    route("delete", path, routing::delete(handler), describe)
}

fn route(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<AppState>,
    describe: DescribeOperation,
) -> Route {
    Route {
        method,
        path,
        scope: None,
        describe,
        accepts_ticket: false,
        handler,
    }
}
