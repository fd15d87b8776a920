//! Describes `/triggers` in the OpenAPI document.

use serde_json::json;

use crate::web::openapi::examples;
use crate::web::openapi::operation::Operation;
use crate::web::routes::triggers::TriggeredRun;

pub fn receive(operation: Operation<'_>) -> Operation<'_> {
    let text = || json!({"type": "string"});
    operation
        .describe("receive_trigger", "Starts a run for an event of another service")
        .details(
            "The receiver of a webhook whose signature takes the place of a key: Standard Webhooks, GitHub or Stripe, as the \
             trigger's `kind` says. The body is the sender's JSON, at most `server.max_body`. An event starts one run, however \
             often it is sent.",
        )
        .header("webhook-id", text(), "Standard Webhooks: the event's id.")
        .header(
            "webhook-timestamp",
            text(),
            "Standard Webhooks: when it was signed, in seconds since 1970.",
        )
        .header(
            "webhook-signature",
            text(),
            "Standard Webhooks: the signatures.",
        )
        .header("X-GitHub-Delivery", text(), "GitHub: the event's id.")
        .header("X-Hub-Signature-256", text(), "GitHub: the signature.")
        .header(
            "Stripe-Signature",
            text(),
            "Stripe: the time and the signatures. The event's id is `id` of the body.",
        )
        .response::<TriggeredRun>(
            200,
            "The event was received before, or is a `ping` of GitHub.",
        )
        .example(200, json!({"run": examples::ROOT}))
        .response::<TriggeredRun>(202, "A run has started.")
        .example(202, json!({"run": examples::ROOT}))
        .response_header(202, "x-run-id", "The id of the run.")
        .problem(
            400,
            "`invalid_json`, `invalid_body`: the body is no JSON, or the event has no id. `malformed_body`: the body cannot be \
             read.",
        )
        .problem(
            401,
            "`invalid_signature`: the signature is missing or wrong, or its time is more than 5 minutes away.",
        )
        .problem(408, "`request_timeout`: the body did not arrive in time.")
        .problem(
            413,
            "`body_too_large`: the body, or the input of the run, is above `server.max_body`.",
        )
        .problem(
            415,
            "`unsupported_media_type`, `unsupported_charset`, `unsupported_encoding`: the body is no JSON.",
        )
        .problem(
            429,
            "`queue_full`, `budget_exhausted`: `Retry-After` tells when to retry.",
        )
        .problem(
            503,
            "`draining`, `store_unavailable`, `store_full`: `Retry-After` tells when to retry.",
        )
}
