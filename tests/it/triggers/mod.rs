//! Triggers: signed webhooks of other services that start runs.

mod agent_files;
mod senders;

use hmac::{Hmac, KeyInit, Mac};
use jiff::Timestamp;
use reqwest::Method;
use sha2::Sha256;
use standardwebhooks::Webhook;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::provider::answer::says;

pub const STANDARD_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
pub const OTHER_SECRET: &str = "another secret";

const TRIGGERS: &str = "
[[triggers]]
name = \"standard\"
kind = \"standard\"
secret_env = \"STANDARD_SECRET\"
input_template = \"{body.type}: {body.data.title} ({body.data.number})\"
labels = { source = \"standard\" }
[[triggers]]
name = \"github\"
kind = \"github\"
secret_env = \"OTHER_SECRET\"
input_template = \"{body.issue.title}\"
[[triggers]]
name = \"stripe\"
kind = \"stripe\"
secret_env = \"OTHER_SECRET\"
[[triggers]]
name = \"without-secret\"
kind = \"github\"
secret_env = \"MISSING_SECRET\"
";

pub async fn app_with_triggers() -> TestApp {
    let setup = TestApp::setup().agent("solo", TRIGGERS);
    let setup = setup.server("max_body = \"4 KiB\"");
    let setup = setup.environment("STANDARD_SECRET", STANDARD_SECRET);
    let app = setup
        .environment("OTHER_SECRET", OTHER_SECRET)
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app
}

/// Sends a body with these headers to a trigger of the agent.
pub async fn send_event(
    app: &TestApp,
    trigger: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> ApiResponse {
    let request = app.request(Method::POST, &format!("/triggers/solo/{trigger}"));
    let request = match headers.iter().any(|(name, _)| *name == "content-type") {
        true => request,
        false => request.header("content-type", "application/json"),
    };
    let request = headers.iter().fold(request, |request, (name, value)| {
        request.header(*name, *value)
    });
    send(request.body(body.to_owned())).await
}

/// Sends as a service that follows Standard Webhooks does; `age` is that of the signature in seconds.
pub async fn send_standard(app: &TestApp, id: &str, age: i64, body: &str) -> ApiResponse {
    let timestamp = Timestamp::now().as_second() - age;
    let webhook = Webhook::new(STANDARD_SECRET).expect("a secret");
    let signature = webhook.sign(id, timestamp, body.as_bytes());
    let headers = [
        ("webhook-id", id),
        ("webhook-timestamp", &timestamp.to_string()),
        ("webhook-signature", &signature.expect("a signature")),
    ];
    send_event(app, "standard", &headers, body).await
}

/// The HMAC of these texts in hexadecimal, as GitHub and Stripe write it.
pub fn hex_mac(parts: &[&str]) -> String {
    let mac = Hmac::<Sha256>::new_from_slice(OTHER_SECRET.as_bytes());
    let mut mac = mac.expect("a key");
    parts.iter().for_each(|part| mac.update(part.as_bytes()));
    let bytes = mac.finalize().into_bytes();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
