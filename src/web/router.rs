//! The route table: the router and the OpenAPI document are built from it.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, OriginalUri, State};
use axum::http::header::{CONTENT_ENCODING, VARY};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing;
use bytes::Bytes;

use crate::config::KeyScope::{Admin, Approve, Cancel, Metrics, Read, Run};
use crate::config::clients::Clients;
use crate::web::clients;
use crate::web::clients::openai::is_unknown_operation;
use crate::web::console;
use crate::web::error::{self, Problem};
use crate::web::error_shape::ErrorShape;
use crate::web::extract::gzip;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::query::NoQuery;
use crate::web::openapi::{
    batch_operations, document, operations as describe, recordings as describe_recordings,
    schedule_operations as describe_schedules, start_run, steering, trigger_operations,
    turn_operations as describe_turns, usage_operations,
};
use crate::web::response::revalidation::{IfNoneMatch, entity_tag};
use crate::web::route::{Route, delete, get, post};
use crate::web::routes::{
    agents, approvals, batches, create_run, deliveries, diffs, events, forks, health, messages,
    metrics, pause, recordings, runs, schedules, sessions, tickets, triggers, turns, usage,
};
use crate::web::server::middleware::{self, MiddlewareConfig};
use crate::web::server::origin_guard::OriginGuard;
use crate::web::state::{AppState, OpenApiDocument};

/// All routes; `metrics` tells whether `/metrics` is one of them, `clients` which other protocols have routes.
pub fn route_table(metrics: bool, clients: Clients) -> Vec<Route> {
    let mut table = vec![
        get("/agents", agents::list, describe::list_agents).with_scope(Read),
        get("/agents/{name}", agents::get, describe::agent).with_scope(Read),
        post("/agents/{name}/runs", create_run::create, start_run::create).with_scope(Run),
        post(
            "/agents/{name}/dry-run",
            create_run::dry_run,
            start_run::dry_run,
        )
        .with_scope(Run),
        get("/agents/{name}/memory", agents::memory, describe::memory).with_scope(Read),
        post("/agents/{name}/gc", agents::gc, describe::gc).with_scope(Admin),
        get("/runs", runs::list, describe::list_runs).with_scope(Read),
        get("/runs/{id}", runs::get, describe::run).with_scope(Read),
        delete("/runs/{id}", runs::delete, describe::delete).with_scope(Admin),
        get("/runs/{id}/events", events::list, describe::events)
            .with_scope(Read)
            .or_ticket(),
        post(
            "/runs/{id}/events/ticket",
            tickets::create,
            describe::ticket,
        )
        .with_scope(Read),
        get("/runs/{id}/tree", runs::tree, describe::tree).with_scope(Read),
        get("/runs/{id}/children", runs::children, describe::children).with_scope(Read),
        get("/runs/{id}/messages", runs::messages, describe::messages).with_scope(Read),
        post("/runs/{id}/messages", messages::add, steering::add_message).with_scope(Run),
        get(
            "/runs/{id}/recording",
            recordings::get,
            describe_recordings::recording,
        )
        .with_scope(Read),
        post("/runs/{id}/pause", pause::pause, steering::pause).with_scope(Run),
        post("/runs/{id}/resume", pause::resume, steering::resume).with_scope(Run),
        get("/runs/{id}/diff/{other}", diffs::diff, start_run::diff).with_scope(Read),
        post("/runs/{id}/fork", forks::fork, start_run::fork).with_scope(Run),
        post("/runs/{id}/cancel", runs::cancel, describe::cancel).with_scope(Cancel),
        post(
            "/runs/{id}/approvals/{tool_call_id}",
            approvals::decide,
            steering::decide,
        )
        .with_scope(Run)
        .with_scope(Approve),
        get("/approvals", approvals::list, steering::list_approvals).with_scope(Read),
        get(
            "/runs/{id}/deliveries",
            deliveries::list,
            describe::deliveries,
        )
        .with_scope(Admin),
        post(
            "/runs/{id}/deliveries/{delivery}/resend",
            deliveries::resend,
            describe::resend,
        )
        .with_scope(Admin),
        get("/usage", usage::usage, usage_operations::usage).with_scope(Read),
        get("/livez", health::livez, describe::livez),
        get("/readyz", health::readyz, describe::readyz),
        get("/version", health::version, describe::version),
        get("/openapi.json", openapi_document, describe::openapi),
    ];
    table.extend(turn_routes());
    table.extend(session_routes());
    table.extend(schedule_routes());
    table.extend(batch_routes());
    table.extend(clients::routes(clients));
    if clients.console {
        table.extend(console::routes());
    }
    if metrics {
        table.push(metrics_route());
    }
    table
}

fn turn_routes() -> Vec<Route> {
    vec![
        get("/runs/{id}/turns", turns::list, describe_turns::list_turns).with_scope(Read),
        get("/runs/{id}/turns/{turn}", turns::get, describe_turns::turn).with_scope(Read),
    ]
}

fn session_routes() -> Vec<Route> {
    vec![
        get("/sessions", sessions::list, describe::list_sessions).with_scope(Read),
        get("/sessions/{name}", sessions::get, describe::session).with_scope(Read),
        get(
            "/sessions/{name}/messages",
            sessions::messages,
            describe::session_messages,
        )
        .with_scope(Read),
        delete(
            "/sessions/{name}",
            sessions::delete,
            describe::delete_session,
        )
        .with_scope(Cancel),
    ]
}

fn batch_routes() -> Vec<Route> {
    vec![
        post(
            "/agents/{name}/runs:batch",
            batches::create,
            batch_operations::create,
        )
        .with_scope(Run),
        get("/batches", batches::list, batch_operations::list).with_scope(Read),
        get("/batches/{id}", batches::get, batch_operations::get).with_scope(Read),
        get(
            "/batches/{id}/results",
            batches::results,
            batch_operations::results,
        )
        .with_scope(Read),
        post(
            "/batches/{id}/cancel",
            batches::cancel,
            batch_operations::cancel,
        )
        .with_scope(Cancel),
    ]
}

fn schedule_routes() -> Vec<Route> {
    vec![
        get("/schedules", schedules::list, describe_schedules::list).with_scope(Read),
        post(
            "/schedules/{agent}/{name}/trigger",
            schedules::trigger,
            describe_schedules::trigger,
        )
        .with_scope(Run),
        post(
            "/schedules/{agent}/{name}/pause",
            schedules::pause,
            describe_schedules::pause,
        )
        .with_scope(Run),
        post(
            "/schedules/{agent}/{name}/resume",
            schedules::resume,
            describe_schedules::resume,
        )
        .with_scope(Run),
        // Open: the signature takes the place of a key.
        post(
            "/triggers/{agent}/{name}",
            triggers::receive,
            trigger_operations::receive,
        ),
    ]
}

/// The API. Every route has the path prefix; `/livez` and `/readyz` answer without it too. If keys are configured, each
/// route requires one with its scope, except the routes without a scope.
pub fn router(state: AppState) -> Router {
    let prefix = &state.settings.path_prefix;
    let mut routes = Router::new();
    let below = clients::error_shapes(state.settings.clients);
    let below = below
        .into_iter()
        .map(|(path, shape)| (format!("{prefix}{path}"), shape));
    let mut shapes = ErrorShapes {
        below: below.collect(),
        ..ErrorShapes::default()
    };
    for route in route_table(state.settings.metrics, state.settings.clients) {
        if let Some(shape) = route.error_shape() {
            shapes
                .of_routes
                .insert(format!("{prefix}{}", route.path), shape);
        }
        routes = routes.route(route.path, route.into_handler(&state));
    }
    if !prefix.is_empty() {
        routes = Router::new()
            .nest(prefix, routes)
            .route("/livez", routing::get(health::livez))
            .route("/readyz", routing::get(health::readyz));
        if state.settings.clients.console {
            // The prefix alone is the `/` of the routes below it.
            let redirect = routing::get(console::layout::redirect_to_console);
            routes = routes.route(&format!("{prefix}/"), redirect);
        }
    }
    let cors = state.settings.cors.as_ref();
    let config = MiddlewareConfig {
        guard: OriginGuard {
            loopback_port: state.settings.loopback_port,
            path_prefix: prefix.clone(),
            allowed_origins: cors.map(|cors| cors.origins.clone()),
        },
        proxies: state.settings.trusted_proxies.clone(),
        cors: cors.cloned(),
        compression: state.settings.compression,
    };
    with_middleware(routes, shapes, config, state)
}

/// The router of the listener that serves only `/metrics`, without the path prefix: clients reach it without a proxy.
/// `loopback_port` is its port, if it listens on a loopback address.
pub fn metrics_router(state: AppState, loopback_port: Option<u16>) -> Router {
    let route = metrics_route();
    let routes = Router::new().route(route.path, route.into_handler(&state));
    let config = MiddlewareConfig {
        guard: OriginGuard {
            loopback_port,
            ..OriginGuard::default()
        },
        ..MiddlewareConfig::default()
    };
    with_middleware(routes, ErrorShapes::default(), config, state)
}

fn metrics_route() -> Route {
    get("/metrics", metrics::metrics, describe::metrics).with_scope(Metrics)
}

/// The shapes of errors of other protocols, by path with the path prefix.
#[derive(Default)]
struct ErrorShapes {
    of_routes: HashMap<String, ErrorShape>,
    /// By the beginning of a path, for paths without a route.
    below: Vec<(String, ErrorShape)>,
}

impl ErrorShapes {
    fn below(&self, path: &str) -> Option<ErrorShape> {
        let mut below = self.below.iter();
        let found = below.find(|(beginning, _)| path.starts_with(beginning.as_str()));
        found.map(|(_, shape)| *shape)
    }
}

fn with_middleware(
    routes: Router<AppState>,
    shapes: ErrorShapes,
    config: MiddlewareConfig,
    state: AppState,
) -> Router {
    let shapes = Arc::new(shapes);
    let known = Arc::clone(&shapes);
    let method_not_allowed = move |path: MatchedPath, method: Method, uri: Uri| {
        let shape = known.of_routes.get(path.as_str()).copied();
        async move {
            let problem = match is_unknown_operation(path.as_str(), uri.path()) {
                true => error::route_not_found(uri).await,
                false => error::method_not_allowed(&method, &uri),
            };
            with_shape(problem, shape)
        }
    };
    let route_not_found = move |OriginalUri(uri): OriginalUri| {
        let shape = shapes.below(uri.path());
        async move { with_shape(error::route_not_found(uri).await, shape) }
    };
    let routes = routes
        .fallback(route_not_found)
        .method_not_allowed_fallback(method_not_allowed);
    middleware::surround(routes, config).with_state(state)
}

fn with_shape(problem: Problem, shape: Option<ErrorShape>) -> Response {
    let mut response = problem.into_response();
    if let Some(shape) = shape {
        response.extensions_mut().insert(shape);
    }
    response
}

/// The OpenAPI document. `prefix` is the server's path prefix; `metrics` tells whether this server has `/metrics`.
pub fn openapi_json(prefix: &str, metrics: bool, clients: Clients) -> String {
    document::document(prefix, &route_table(metrics, clients))
}

/// `GET /openapi.json`: the document is built at the first request, and again if a proxy reports another prefix.
async fn openapi_document(
    State(state): State<AppState>,
    links: LinkPrefix,
    _: NoQuery,
    if_none_match: IfNoneMatch,
    headers: HeaderMap,
) -> Response {
    let cached = state.openapi.lock().clone();
    let document = match cached.filter(|cached| cached.prefix == *links) {
        Some(document) => document,
        None => {
            let text = openapi_json(&links, state.settings.metrics, state.settings.clients);
            let gzip = match state.settings.compression {
                true => gzip::compress(text.as_bytes()).await,
                false => None,
            };
            let document = Arc::new(OpenApiDocument {
                prefix: (*links).to_owned(),
                tag: entity_tag(text.as_bytes()),
                text: text.into(),
                gzip,
            });
            *state.openapi.lock() = Some(Arc::clone(&document));
            document
        }
    };
    let gzip = document
        .gzip
        .as_ref()
        .filter(|_| gzip::is_accepted(&headers));
    let content = Bytes::clone(gzip.unwrap_or(&document.text));
    let mut response = if_none_match.tagged_response(content, &document.tag);
    if gzip.is_some() && response.status() == StatusCode::OK {
        let headers = response.headers_mut();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    }
    response
}
