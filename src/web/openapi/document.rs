//! Builds the OpenAPI 3.1 document from the route table, from the description of each route, and from the types of request
//! and response bodies.

use serde_json::{Map, json};

use crate::web::error::ProblemBody;
use crate::web::openapi::operation::{Operation, Schemas};
use crate::web::route::Route;

const PROBLEM_JSON: &str = "application/problem+json";
const DESCRIPTION: &str = "\
    Serves LLM agents. An agent is a TOML file; a POST starts a run of it; agents can call other agents.\n\n\
    Every `GET` route supports `HEAD`. Every response has the header `x-request-id`. Unknown or repeated query \
    parameters and unknown body fields are refused. Later versions may add fields to responses, and types of events.";
const BEARER_DESCRIPTION: &str = "\
    A key of the daemon's configuration. Each operation names the scope that the key needs; the scope `admin` \
    includes all others. If no keys are configured, no request needs one.";

/// The document, indented. `prefix` is the server's path prefix.
pub fn document(prefix: &str, routes: &[Route]) -> String {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    for route in routes {
        let operation = Operation::new(route.path, route.scope, &mut schemas);
        let operation_json = (route.describe)(operation).into_json();
        let operations = paths.entry(route.path).or_insert_with(|| json!({}));
        operations[route.method] = operation_json;
    }
    let problem = json!({
        "description": "Problem details (RFC 9457). `code` is stable; `detail` is for people.",
        "content": {PROBLEM_JSON: {"schema": schemas.response_schema::<ProblemBody<'static>>()}},
    });
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "axed",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": if prefix.is_empty() { "/" } else { prefix }}],
        "paths": paths,
        "components": {
            "schemas": schemas.into_components(),
            "responses": {"Problem": problem},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": BEARER_DESCRIPTION},
            },
        },
    });
    format!("{document:#}\n")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::document;
    use crate::web::router::route_table;

    /// A line for each operation and for each component.
    #[test]
    fn the_document_is_pinned() {
        let document: Value =
            serde_json::from_str(&document("", &route_table(true))).expect("JSON");
        let mut lines = Vec::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for (method, operation) in operations.as_object().expect("operations") {
                lines.push(format!("{method} {path} {operation}"));
            }
        }
        for (kind, components) in document["components"].as_object().expect("components") {
            for (name, component) in components.as_object().expect("components") {
                lines.push(format!("{kind} {name} {component}"));
            }
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_document_has_the_servers_prefix_and_metrics() {
        let below: Value =
            serde_json::from_str(&document("/axed", &route_table(false))).expect("JSON");
        assert_eq!(below["servers"][0]["url"], "/axed");
        assert!(below["paths"]["/runs"].is_object() && below["paths"]["/metrics"].is_null());
    }
}
