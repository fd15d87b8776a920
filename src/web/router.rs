//! The route table, on one page.

use axum::Router;
use axum::middleware::from_fn;
use axum::routing::{delete, get, post};

use crate::config::KeyScope::{Admin, Cancel, Metrics, Read, Run};
use crate::web::frame::frame;
use crate::web::state::AppState;
use crate::web::{
    agents, approvals, auth, create, deliveries, error, health, metrics, runs, sessions, sse,
};

/// All routes with what surrounds them. Each carries the path prefix; only the probes answer without it too. Where keys
/// are configured each names the scope that a key needs for it, but for the probes and the version, which are open.
pub fn router(state: AppState) -> Router {
    let prefix = state.settings.path_prefix.clone();
    let loopback_port = state.settings.loopback_port;
    let at = |path: &str| format!("{prefix}{path}");
    let by = |scope, routes| auth::scoped(&state.settings, scope, routes);
    let mut routes = Router::new()
        .route(&at("/agents"), by(Read, get(agents::list)))
        .route(&at("/agents/{name}"), by(Read, get(agents::get)))
        .route(&at("/agents/{name}/runs"), by(Run, post(create::create)))
        .route(
            &at("/agents/{name}/dry-run"),
            by(Run, post(create::dry_run)),
        )
        .route(&at("/agents/{name}/memory"), by(Read, get(agents::memory)))
        .route(&at("/agents/{name}/gc"), by(Admin, post(agents::gc)))
        .route(&at("/runs"), by(Read, get(runs::list)))
        .route(&at("/runs/{id}"), by(Read, get(runs::get)))
        .route(&at("/runs/{id}"), by(Admin, delete(runs::delete)))
        .route(&at("/runs/{id}/events"), by(Read, get(sse::events)))
        .route(&at("/runs/{id}/tree"), by(Read, get(runs::tree)))
        .route(&at("/runs/{id}/children"), by(Read, get(runs::children)))
        .route(&at("/runs/{id}/messages"), by(Read, get(runs::messages)))
        .route(&at("/runs/{id}/cancel"), by(Cancel, post(runs::cancel)))
        .route(&at("/sessions/{name}"), by(Read, get(sessions::get)))
        .route(
            &at("/runs/{id}/approvals/{call}"),
            by(Run, post(approvals::decide)),
        )
        .route(
            &at("/runs/{id}/deliveries"),
            by(Admin, get(deliveries::list)),
        )
        .route(
            &at("/runs/{id}/deliveries/{delivery}/resend"),
            by(Admin, post(deliveries::resend)),
        )
        .route(&at("/livez"), get(health::livez))
        .route(&at("/readyz"), get(health::readyz))
        .route(&at("/version"), get(health::version));
    if state.settings.metrics {
        routes = routes.route(&at("/metrics"), by(Metrics, get(metrics::metrics)));
    }
    if !prefix.is_empty() {
        routes = routes
            .route("/livez", get(health::livez))
            .route("/readyz", get(health::readyz));
    }
    surrounded(routes, loopback_port, state)
}

/// What the metrics' own listener answers, whatever the path prefix: it is not meant to be reached through a proxy.
/// `loopback_port` is its port where it listens on loopback.
pub fn metrics_router(state: AppState, loopback_port: Option<u16>) -> Router {
    let by = |scope, routes| auth::scoped(&state.settings, scope, routes);
    let routes = Router::new().route("/metrics", by(Metrics, get(metrics::metrics)));
    surrounded(routes, loopback_port, state)
}

fn surrounded(routes: Router<AppState>, loopback_port: Option<u16>, state: AppState) -> Router {
    routes
        .fallback(error::no_route)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(from_fn(move |request, next| {
            frame(loopback_port, request, next)
        }))
        .with_state(state)
}
