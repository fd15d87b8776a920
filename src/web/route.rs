//! One route: its method and path, the scope that it needs, its handler and its OpenAPI entry.

use axum::handler::Handler;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{self, MethodRouter};

use crate::config::KeyScope;
use crate::web::auth;
use crate::web::error_shape::ErrorShape;
use crate::web::openapi::operation::Operation;
use crate::web::state::AppState;

pub struct Route {
    /// In lower case.
    pub method: &'static str,
    /// Without the path prefix.
    pub path: &'static str,
    /// The scopes of which a key needs one, if keys are configured. Without any, the route is open to everybody, or its
    /// handler checks the scope.
    pub scopes: Vec<KeyScope>,
    /// Describes the route in the OpenAPI document; `None` for a route of a protocol that has a description of its own.
    pub describe: Option<DescribeOperation>,
    /// Whether any key is accepted, because the handler checks its scope.
    accepts_any_key: bool,
    /// Whether a ticket for the run is accepted in place of a key.
    accepts_ticket: bool,
    /// `None` for problem details.
    error_shape: Option<ErrorShape>,
    handler: MethodRouter<AppState>,
}

impl Route {
    /// Another call adds a scope that is enough as well.
    pub fn with_scope(mut self, scope: KeyScope) -> Self {
        self.scopes.push(scope);
        self
    }

    pub fn with_any_key(self) -> Self {
        Self {
            accepts_any_key: true,
            ..self
        }
    }

    pub fn or_ticket(self) -> Self {
        Self {
            accepts_ticket: true,
            ..self
        }
    }

    /// Of a route of another protocol.
    pub fn error_shape(&self) -> Option<ErrorShape> {
        self.error_shape
    }

    pub fn into_handler(self, state: &AppState) -> MethodRouter<AppState> {
        let error_shape = self.error_shape;
        let handler = self.with_checked_key(state);
        match error_shape {
            None => handler,
            Some(shape) => handler.layer(map_response(move |mut response: Response| {
                response.extensions_mut().insert(shape);
                std::future::ready(response)
            })),
        }
    }

    fn with_checked_key(self, state: &AppState) -> MethodRouter<AppState> {
        match self.scopes.first() {
            Some(scope) if self.accepts_ticket => {
                auth::require_scope_or_ticket(state, *scope, self.handler)
            }
            None if !self.accepts_any_key => self.handler,
            _ => auth::require_key(&state.settings, self.scopes, self.handler),
        }
    }
}

pub type DescribeOperation = fn(Operation<'_>) -> Operation<'_>;

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
        scopes: Vec::new(),
        describe: Some(describe),
        accepts_any_key: false,
        accepts_ticket: false,
        error_shape: None,
        handler,
    }
}

/// A route of another protocol, which has its own shape of errors and is described elsewhere.
pub fn of_protocol(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<AppState>,
    error_shape: ErrorShape,
) -> Route {
    Route {
        method,
        path,
        scopes: Vec::new(),
        describe: None,
        accepts_any_key: false,
        accepts_ticket: false,
        error_shape: Some(error_shape),
        handler,
    }
}

/// A page for people: it checks keys itself, renders its own errors, and is not described in the OpenAPI document.
pub fn page<T: 'static>(path: &'static str, handler: impl Handler<T, AppState>) -> Route {
    Route {
        method: "get",
        path,
        scopes: Vec::new(),
        describe: None,
        accepts_ticket: false,
        accepts_any_key: false,
        error_shape: None,
        handler: routing::get(handler),
    }
}
