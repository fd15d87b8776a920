//! The OpenAPI 3.1 document around the operations of the routes.

use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::web::error::ProblemBody;
use crate::web::openapi::examples;
use crate::web::openapi::schemas::Schemas;

const PROBLEM_JSON: &str = "application/problem+json";
const DESCRIPTION: &str = "\
    Serves LLM agents. An agent is a TOML file; a POST starts a run of it; agents can call other agents.\n\n\
    Every `GET` route supports `HEAD`. Unknown or repeated query parameters are refused, except by `/livez`, `/readyz`, \
    `/metrics` and `/triggers`, whose callers add their own; so are unknown fields of a body that an operation describes. \
    Later versions may add fields to responses, types of events, and codes of problems: clients should ignore what they do not \
    know.";
const BEARER_DESCRIPTION: &str = "\
    A key of the daemon's configuration, sent as `Authorization: Bearer <key>`. Each operation names the scope that the \
    key needs. If no keys are configured, no request needs one.";
const TAGS: &[(&str, &str)] = &[
    ("runs", "Start, read, follow, cancel and delete runs."),
    (
        "agents",
        "The agents that the daemon serves, and their memory.",
    ),
    ("batches", "Many runs of one request."),
    ("evals", "Versions of agents, compared over cases."),
    ("schedules", "Runs that the daemon starts at times."),
    ("triggers", "Webhooks of other services that start runs."),
    ("sessions", "Conversations that several runs continue."),
    ("approvals", "Tool calls that wait for a person's decision."),
    ("inputs", "Questions that wait for a person's answer."),
    (
        "scores",
        "How good people, programs and scorers say that runs are.",
    ),
    ("usage", "What runs have used, summed over time."),
    ("webhooks", "Deliveries of events to other servers."),
    ("daemon", "The state of the daemon, and this document."),
];
const SCOPES: &[(KeyScope, &str)] = &[
    (
        KeyScope::Run,
        "start, dry-run, fork, steer, pause and resume runs, and approve or deny tool calls as they are",
    ),
    (
        KeyScope::Read,
        "read agents, runs, events, sessions and usage",
    ),
    (KeyScope::Cancel, "cancel runs"),
    (
        KeyScope::Approve,
        "approve or deny tool calls, also with other arguments",
    ),
    (
        KeyScope::Admin,
        "delete runs, collect memory, read and resend webhook deliveries, see the runs of all keys, and everything above",
    ),
    (KeyScope::Metrics, "read the metrics"),
];

/// The document, indented. `prefix` is the server's path prefix; `schemas` are those that the operations of `paths` refer to.
pub fn document(prefix: &str, paths: Map<String, Value>, mut schemas: Schemas) -> String {
    let problem = schemas.response_schema::<ProblemBody<'static>>();
    let tags = TAGS
        .iter()
        .map(|(name, description)| json!({"name": name, "description": description}));
    let scopes = SCOPES
        .iter()
        .map(|(scope, allows)| format!("- `{}`: {allows}", scope.as_str()));
    let scopes = scopes.collect::<Vec<_>>().join("\n");
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "axed",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{
            "url": if prefix.is_empty() { "/" } else { prefix },
            "description": "The daemon that served this document.",
        }],
        "tags": tags.collect::<Vec<_>>(),
        "paths": paths,
        "components": {
            "schemas": schemas.into_components(),
            "responses": problem_responses(&problem),
            "headers": headers(),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": format!("{BEARER_DESCRIPTION}\n\n{scopes}"),
                },
            },
        },
    });
    format!("{document:#}\n")
}

/// The responses to failed requests. They differ in their headers.
fn problem_responses(schema: &Value) -> Value {
    let response = |description: &str, example: Value, header: Option<(&str, &str)>| {
        let mut headers = json!({"x-request-id": {"$ref": "#/components/headers/RequestId"}});
        if let Some((name, component)) = header {
            headers[name] = json!({"$ref": format!("#/components/headers/{component}")});
        }
        json!({
            "description": description,
            "headers": headers,
            "content": {PROBLEM_JSON: {"schema": schema, "example": example}},
        })
    };
    json!({
        "Problem": response(
            "The request failed. `code` is stable; `detail` is for people.",
            examples::invalid_field(),
            None,
        ),
        "Unauthorized": response(
            "The key is missing or unknown.",
            examples::unauthorized(),
            Some(("WWW-Authenticate", "WWWAuthenticate")),
        ),
        "RetryLater": response(
            "The daemon cannot do this now. `Retry-After` tells when to retry.",
            examples::queue_full(),
            Some(("Retry-After", "RetryAfter")),
        ),
    })
}

fn headers() -> Value {
    json!({
        "RequestId": {
            "description": "The id of the request, which the daemon's log has too. A request may bring its own: 1 to 128 visible characters.",
            "required": true,
            "schema": {"type": "string"},
        },
        "RetryAfter": {
            "description": "Seconds after which a retry may succeed.",
            "schema": {"type": "integer", "minimum": 1},
        },
        "WWWAuthenticate": {
            "description": "The scheme of keys.",
            "schema": {"type": "string", "const": "Bearer"},
        },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::config::clients::Clients;
    use crate::web::router::openapi_json;

    /// A line for each operation and for each component.
    #[test]
    fn the_document_is_pinned() {
        let document: Value =
            serde_json::from_str(&openapi_json("", true, Clients::default())).expect("JSON");
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
            serde_json::from_str(&openapi_json("/axed", false, Clients::default())).expect("JSON");
        assert_eq!(below["servers"][0]["url"], "/axed");
        assert!(below["paths"]["/runs"].is_object() && below["paths"]["/metrics"].is_null());
    }
}
