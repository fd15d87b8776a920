//! The route table, on one page: the router and the OpenAPI document are built from it.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::middleware::from_fn;
use axum::routing::{self, MethodRouter};

use crate::config::KeyScope::{self, Admin, Cancel, Metrics, Read, Run};
use crate::web::browser::OriginGuard;
use crate::web::frame::frame;
use crate::web::openapi::{self, Operation, operations as tell};
use crate::web::state::AppState;
use crate::web::{
    agents, approvals, auth, create, deliveries, error, health, metrics, runs, sessions, sse,
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
    pub told: fn(Operation<'_>) -> Operation<'_>,
    handler: MethodRouter<AppState>,
}

/// All of them; `metrics` says whether `/metrics` is answered here.
pub fn table(metrics: bool) -> Vec<Route> {
    let mut table = vec![
        get("/agents", agents::list, tell::list_agents).by(Read),
        get("/agents/{name}", agents::get, tell::agent).by(Read),
        post("/agents/{name}/runs", create::create, tell::create).by(Run),
        post("/agents/{name}/dry-run", create::dry_run, tell::dry_run).by(Run),
        get("/agents/{name}/memory", agents::memory, tell::memory).by(Read),
        post("/agents/{name}/gc", agents::gc, tell::gc).by(Admin),
        get("/runs", runs::list, tell::list_runs).by(Read),
        get("/runs/{id}", runs::get, tell::run).by(Read),
        delete("/runs/{id}", runs::delete, tell::delete).by(Admin),
        get("/runs/{id}/events", sse::events, tell::events).by(Read),
        get("/runs/{id}/tree", runs::tree, tell::tree).by(Read),
        get("/runs/{id}/children", runs::children, tell::children).by(Read),
        get("/runs/{id}/messages", runs::messages, tell::messages).by(Read),
        post("/runs/{id}/cancel", runs::cancel, tell::cancel).by(Cancel),
        get("/sessions/{name}", sessions::get, tell::session).by(Read),
        post(
            "/runs/{id}/approvals/{call}",
            approvals::decide,
            tell::decide,
        )
        .by(Run),
        get("/runs/{id}/deliveries", deliveries::list, tell::deliveries).by(Admin),
        post(
            "/runs/{id}/deliveries/{delivery}/resend",
            deliveries::resend,
            tell::resend,
        )
        .by(Admin),
        get("/livez", health::livez, tell::livez),
        get("/readyz", health::readyz, tell::readyz),
        get("/version", health::version, tell::version),
        get("/openapi.json", openapi::get, tell::openapi),
    ];
    if metrics {
        table.push(scrape());
    }
    table
}

/// All routes with what surrounds them. Each carries the path prefix; only the probes answer without it too. Where keys
/// are configured each asks for one with its scope, but for those that name none.
pub fn router(state: AppState) -> Router {
    let prefix = &state.settings.path_prefix;
    let mut routes = Router::new();
    for route in table(state.settings.metrics) {
        routes = routes.route(&format!("{prefix}{}", route.path), route.guarded(&state));
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
    surrounded(routes, guard, state)
}

/// What the metrics' own listener answers, whatever the path prefix: it is not meant to be reached through a proxy.
/// `loopback_port` is its port where it listens on loopback.
pub fn metrics_router(state: AppState, loopback_port: Option<u16>) -> Router {
    let route = scrape();
    let routes = Router::new().route(route.path, route.guarded(&state));
    let guard = OriginGuard {
        loopback_port,
        path_prefix: String::new(),
    };
    surrounded(routes, guard, state)
}

fn scrape() -> Route {
    get("/metrics", metrics::metrics, tell::metrics).by(Metrics)
}

fn surrounded(routes: Router<AppState>, guard: OriginGuard, state: AppState) -> Router {
    let guard = Arc::new(guard);
    routes
        .fallback(error::no_route)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(from_fn(move |request, next| {
            frame(Arc::clone(&guard), request, next)
        }))
        .with_state(state)
}

impl Route {
    fn by(self, scope: KeyScope) -> Self {
        Self {
            scope: Some(scope),
            ..self
        }
    }

    fn guarded(self, state: &AppState) -> MethodRouter<AppState> {
        match self.scope {
            Some(scope) => auth::scoped(&state.settings, scope, self.handler),
            None => self.handler,
        }
    }
}

type Told = fn(Operation<'_>) -> Operation<'_>;

fn get<T: 'static>(path: &'static str, handler: impl Handler<T, AppState>, told: Told) -> Route {
    route("get", path, routing::get(handler), told)
}

fn post<T: 'static>(path: &'static str, handler: impl Handler<T, AppState>, told: Told) -> Route {
    route("post", path, routing::post(handler), told)
}

fn delete<T: 'static>(path: &'static str, handler: impl Handler<T, AppState>, told: Told) -> Route {
    route("delete", path, routing::delete(handler), told)
}

fn route(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<AppState>,
    told: Told,
) -> Route {
    Route {
        method,
        path,
        scope: None,
        told,
        handler,
    }
}
