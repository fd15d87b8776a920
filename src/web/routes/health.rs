//! `/livez`, `/readyz` and `/version`, which need no key and reveal nothing secret.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;
use tracing::warn;

use crate::store::StoreError;
use crate::web::extract::query::NoQuery;
use crate::web::openapi::examples;
use crate::web::response::json::json_response;
use crate::web::route::{Route, get};
use crate::web::state::AppState;

/// Timeout of the store's check.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

pub fn routes() -> Vec<Route> {
    vec![
        get("/livez", [], livez)
            .describe("get_liveness", "Whether the process responds")
            .response::<Alive>(200, "The process responds.")
            .example(json!({"status": "ok"})),
        get("/readyz", [], readyz)
            .describe("get_readiness", "Whether the daemon accepts new runs")
            .response::<Ready>(200, "The daemon accepts runs.")
            .example(examples::ready())
            .response::<Ready>(
                503,
                "The daemon does not accept runs; a failed check has a `detail`.",
            )
            .example(examples::not_ready()),
        get("/version", [], version)
            .describe(
                "get_version",
                "Returns the name and the version of the daemon",
            )
            .response::<Version>(200, "Name and version.")
            .example(json!({"name": "axed", "version": env!("CARGO_PKG_VERSION")})),
    ]
}

/// The process responds.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Liveness")]
pub struct Alive {
    /// Always `ok`.
    #[schemars(extend("enum" = ["ok"]))]
    status: &'static str,
}

/// Whether the daemon accepts new runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Readiness")]
pub struct Ready {
    /// Whether all checks have passed.
    #[schemars(extend("enum" = ["ready", "not ready"]))]
    status: &'static str,
    /// The checks.
    checks: Checks,
}

/// What the daemon needs to accept runs.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ReadinessChecks")]
struct Checks {
    /// Whether the store can be read and written.
    store: Check,
    /// The agents that are loaded. This check always passes.
    catalog: CatalogCheck,
    /// Whether the daemon is not shutting down.
    accepting: Check,
}

/// The result of a check.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ReadinessCheck")]
struct Check {
    /// Whether the check has passed.
    ok: bool,
    /// Why the check has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'static str>,
}

/// The agents that are loaded.
#[derive(Serialize, JsonSchema)]
struct CatalogCheck {
    /// Always true: neither an invalid file nor other agents at other nodes make the daemon unready.
    ok: bool,
    /// The number of agents.
    agents: usize,
    /// The number of agents whose file is invalid.
    invalid: usize,
    /// The number of other nodes whose agents, usable providers or roots differ from those of this one; only if nodes share the store. It is more than 0 for a
    /// while if nodes restart one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    differing_nodes: Option<usize>,
}

/// Name and version of the daemon.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "VersionInfo")]
pub struct Version {
    /// The name of the program.
    name: &'static str,
    /// The version of the program.
    version: &'static str,
}

/// `GET /livez`
pub async fn livez() -> Response {
    json_response(StatusCode::OK, &Alive { status: "ok" })
}

/// `GET /readyz`: the catalog's check never fails, because the daemon listens only after the catalog is loaded; an invalid
/// agent file does not make the daemon unready, nor do agents of other nodes that differ.
pub async fn readyz(State(state): State<AppState>) -> Response {
    let store = state.runner.store().check();
    let store = match tokio::time::timeout(STORE_TIMEOUT, store).await {
        Ok(Ok(())) if state.runner.store_error().is_some() => {
            Check::failed("a write failed, and the runs that it stopped have not gone on yet")
        }
        Ok(Ok(())) => {
            state.store_failed.store(false, Ordering::Relaxed);
            Check::passed()
        }
        Ok(Err(StoreError::DiskFull)) => {
            Check::failed("the disk is full: runs can be read and deleted, and nothing else")
        }
        Ok(Err(error)) => {
            if !state.store_failed.swap(true, Ordering::Relaxed) {
                warn!("The store is not ready: {error}");
            }
            Check::failed("the store cannot be read or written; the log has the cause")
        }
        Err(_) => Check::failed("the store did not answer in time"),
    };
    let agents = state.runner.catalog().current();
    let catalog = CatalogCheck {
        ok: true,
        agents: agents.entries.len(),
        invalid: agents
            .entries
            .values()
            .filter(|entry| entry.error.is_some())
            .count(),
        differing_nodes: state.runner.differing_nodes().map(|nodes| nodes.len()),
    };
    let accepting = match state.is_accepting() {
        true => Check::passed(),
        false => Check::failed("the daemon is stopping"),
    };
    let (code, status) = if store.ok && accepting.ok {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready")
    };
    let checks = Checks {
        store,
        catalog,
        accepting,
    };
    json_response(code, &Ready { status, checks })
}

/// `GET /version`
async fn version(_: NoQuery) -> Response {
    let version = Version {
        name: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
    };
    json_response(StatusCode::OK, &version)
}

impl Check {
    fn passed() -> Self {
        Self {
            ok: true,
            detail: None,
        }
    }

    fn failed(detail: &'static str) -> Self {
        Self {
            ok: false,
            detail: Some(detail),
        }
    }
}
