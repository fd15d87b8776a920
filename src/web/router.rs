//! The route table: the router and the OpenAPI document are built from it.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, OriginalUri, State};
use axum::http::header::{CONTENT_ENCODING, VARY};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::{self, MethodRouter};
use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::config::clients::Clients;
use crate::web::auth;
use crate::web::body::gzip;
use crate::web::clients;
use crate::web::clients::openai::is_unknown_operation;
use crate::web::console;
use crate::web::error::{self, ErrorShape, Problem};
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::extract::query::NoQuery;
use crate::web::openapi::document;
use crate::web::openapi::schemas::Schemas;
use crate::web::response::revalidation::{IfNoneMatch, entity_tag};
use crate::web::route::{Route, get};
use crate::web::routes::{
    agents, approvals, batches, create_run, deliveries, diffs, evals, events, feedback, forks,
    health, inputs, messages, metrics, pause, recordings, rollouts, runs, schedules, scores,
    sessions, tickets, triggers, turns, usage, world_events,
};
use crate::web::server::middleware::{self, MiddlewareConfig};
use crate::web::server::origin_guard::OriginGuard;
use crate::web::state::{AppState, OpenApiDocument};

/// All routes; `metrics` tells whether `/metrics` is one of them, `clients` which other protocols have routes.
fn route_table(metrics: bool, clients: Clients) -> Vec<Route> {
    let mut table = [
        agents::routes(),
        rollouts::routes(),
        create_run::routes(),
        runs::routes(),
        events::routes(),
        tickets::routes(),
        messages::routes(),
        recordings::routes(),
        pause::routes(),
        diffs::routes(),
        forks::routes(),
        approvals::routes(),
        inputs::routes(),
        deliveries::routes(),
        scores::routes(),
        feedback::routes(),
        usage::routes(),
        world_events::routes(),
        health::routes(),
        vec![openapi_route()],
        turns::routes(),
        sessions::routes(),
        schedules::routes(),
        triggers::routes(),
        batches::routes(),
        evals::routes(),
        clients::routes(clients),
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>();
    if clients.console {
        table.extend(console::routes());
    }
    if metrics {
        table.push(metrics::route());
    }
    table
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
        if let Some(shape) = route.error_shape {
            shapes
                .of_routes
                .insert(format!("{prefix}{}", route.path), shape);
        }
        routes = routes.route(route.path, handler(route, &state));
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
    let route = metrics::route();
    let routes = Router::new().route(route.path, handler(route, &state));
    let config = MiddlewareConfig {
        guard: OriginGuard {
            loopback_port,
            ..OriginGuard::default()
        },
        ..MiddlewareConfig::default()
    };
    with_middleware(routes, ErrorShapes::default(), config, state)
}

/// The handler of a route, behind the check of the key.
fn handler(route: Route, state: &AppState) -> MethodRouter<AppState> {
    let handler = match route.scopes.first() {
        Some(scope) if route.accepts_ticket => {
            auth::require_scope_or_ticket(state, *scope, route.handler)
        }
        None if !route.accepts_any_key => route.handler,
        _ => auth::require_key(&state.settings, route.scopes, route.handler),
    };
    match route.error_shape {
        None => handler,
        Some(shape) => handler.layer(map_response(move |mut response: Response| {
            response.extensions_mut().insert(shape);
            std::future::ready(response)
        })),
    }
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
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for route in route_table(metrics, clients) {
        if let Some(operation) = route.operation(&mut schemas) {
            let operations = paths.entry(route.path).or_insert_with(|| json!({}));
            operations[route.method] = operation;
        }
    }
    document::document(prefix, paths, schemas)
}

fn openapi_route() -> Route {
    get("/openapi.json", [], openapi_document)
        .describe("get_openapi_document", "Returns this document")
        .response::<Map<String, Value>>(200, "An OpenAPI 3.1 document.")
        .example(json!({"openapi": "3.1.0"}))
}

/// The document is built at the first request, and again if a proxy reports another prefix.
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
