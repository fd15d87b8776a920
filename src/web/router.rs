//! The route table, on one page: the router and the OpenAPI document are built from it.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::middleware::from_fn;
use axum::routing::{self, MethodRouter};

use crate::config::KeyScope::{self, Admin, Cancel, Metrics, Read, Run};
use crate::web::middleware::handle_request;
use crate::web::openapi::{self, Operation, operations as tell};
use crate::web::origin_guard::OriginGuard;
use crate::web::state::AppState;
use crate::web::{
    agents, approvals, auth, create_run, deliveries, error, health, metrics, runs, sessions, sse,
};

/// What is answered.
pub struct Route {
    /// In small letters.
    pub method: &'static str,
    /// Without the path prefix.
    pub path: &'static str,
    /// What a key needs for it, where keys are configured; none for those that are open to anyone.
    pub scope: Option<KeyScope>,
    /// What the OpenAPI document says of it.
    pub describe: fn(Operation<'_>) -> Operation<'_>,
    handler: MethodRouter<AppState>,
}

/// All of them; `metrics` says whether `/metrics` is answered here.
pub fn route_table(metrics: bool) -> Vec<Route> {
    let mut table = vec![
        get("/agents", agents::list, tell::list_agents).with_scope(Read),
        get("/agents/{name}", agents::get, tell::agent).with_scope(Read),
        post("/agents/{name}/runs", create_run::create, tell::create).with_scope(Run),
        post("/agents/{name}/dry-run", create_run::dry_run, tell::dry_run).with_scope(Run),
        get("/agents/{name}/memory", agents::memory, tell::memory).with_scope(Read),
        post("/agents/{name}/gc", agents::gc, tell::gc).with_scope(Admin),
        get("/runs", runs::list, tell::list_runs).with_scope(Read),
        get("/runs/{id}", runs::get, tell::run).with_scope(Read),
        delete("/runs/{id}", runs::delete, tell::delete).with_scope(Admin),
        get("/runs/{id}/events", sse::events, tell::events).with_scope(Read),
        get("/runs/{id}/tree", runs::tree, tell::tree).with_scope(Read),
        get("/runs/{id}/children", runs::children, tell::children).with_scope(Read),
        get("/runs/{id}/messages", runs::messages, tell::messages).with_scope(Read),
        post("/runs/{id}/cancel", runs::cancel, tell::cancel).with_scope(Cancel),
        get("/sessions/{name}", sessions::get, tell::session).with_scope(Read),
        post(
            "/runs/{id}/approvals/{call}",
            approvals::decide,
            tell::decide,
        )
        .with_scope(Run),
        get("/runs/{id}/deliveries", deliveries::list, tell::deliveries).with_scope(Admin),
        post(
            "/runs/{id}/deliveries/{delivery}/resend",
            deliveries::resend,
            tell::resend,
        )
        .with_scope(Admin),
        get("/livez", health::livez, tell::livez),
        get("/readyz", health::readyz, tell::readyz),
        get("/version", health::version, tell::version),
        get("/openapi.json", openapi::get, tell::openapi),
    ];
    if metrics {
        table.push(metrics_route());
    }
    table
}

/// All routes with what surrounds them. Each carries the path prefix; only the probes answer without it too. Where keys
/// are configured each asks for one with its scope, but for those that name none.
pub fn router(state: AppState) -> Router {
    let prefix = &state.settings.path_prefix;
    let mut routes = Router::new();
    for route in route_table(state.settings.metrics) {
        routes = routes.route(
            &format!("{prefix}{}", route.path),
            route.into_handler(&state),
        );
    }
    if !prefix.is_empty() {
        routes = routes
            .route("/livez", routing::get(health::livez))
            .route("/readyz", routing::get(health::readyz));
    }
    let guard = OriginGuard {
        loopback_port: state.settings.loopback_port,
        path_prefix: prefix.clone(),
    };
    with_middleware(routes, guard, state)
}

/// What the metrics' own listener answers, whatever the path prefix: it is not meant to be reached through a proxy.
/// `loopback_port` is its port where it listens on loopback.
pub fn metrics_router(state: AppState, loopback_port: Option<u16>) -> Router {
    let route = metrics_route();
    let routes = Router::new().route(route.path, route.into_handler(&state));
    let guard = OriginGuard {
        loopback_port,
        path_prefix: String::new(),
    };
    with_middleware(routes, guard, state)
}

fn metrics_route() -> Route {
    get("/metrics", metrics::metrics, tell::metrics).with_scope(Metrics)
}

fn with_middleware(routes: Router<AppState>, guard: OriginGuard, state: AppState) -> Router {
    let guard = Arc::new(guard);
    routes
        .fallback(error::route_not_found)
        .method_not_allowed_fallback(error::method_not_allowed)
        .layer(from_fn(move |request, next| {
            handle_request(Arc::clone(&guard), request, next)
        }))
        .with_state(state)
}

impl Route {
    fn with_scope(self, scope: KeyScope) -> Self {
        Self {
            scope: Some(scope),
            ..self
        }
    }

    fn into_handler(self, state: &AppState) -> MethodRouter<AppState> {
        match self.scope {
            Some(scope) => auth::require_scope(&state.settings, scope, self.handler),
            None => self.handler,
        }
    }
}

type DescribeOperation = fn(Operation<'_>) -> Operation<'_>;

fn get<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, AppState>,
    describe: DescribeOperation,
) -> Route {
    route("get", path, routing::get(handler), describe)
}

fn post<T: 'static>(
    path: &'static str,
    handler: impl Handler<T, AppState>,
    describe: DescribeOperation,
) -> Route {
    route("post", path, routing::post(handler), describe)
}

fn delete<T: 'static>(
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
        handler,
    }
}
