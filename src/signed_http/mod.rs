//! Signed requests to services that the operator or a client named: webhooks, and scorers of agents.

use std::sync::Arc;

use jiff::Timestamp;
use secrecy::SecretString;

use crate::config::secrets::process_secret;
use crate::signed_http::client::{Message, PostClient, PostOutcome};
use crate::signed_http::signature::SigningSecret;
use crate::ssrf::SsrfGuard;

pub mod client;
pub mod signature;

/// Sends messages that are signed as the Standard Webhooks specification says.
#[derive(Clone)]
pub struct SignedHttp {
    client: Arc<PostClient>,
    /// The environment variable with the secret of messages that name none.
    secret_env: Option<String>,
}

impl SignedHttp {
    pub fn new(guard: SsrfGuard, secret_env: Option<String>) -> Self {
        Self {
            client: Arc::new(PostClient::new(guard)),
            secret_env,
        }
    }

    pub async fn send_unsigned(&self, url: &str, message: Message) -> PostOutcome {
        self.client.send(url, message).await
    }

    /// Sends JSON with the id of the message and its time, and a signature by the secret of this variable. `place` is where the secret
    /// can be set, for an error.
    pub async fn send(
        &self,
        url: &str,
        (secret_env, place): (Option<&String>, &str),
        (id, at): (String, Timestamp),
        body: String,
    ) -> PostOutcome {
        let Some(name) = secret_env.or(self.secret_env.as_ref()) else {
            return PostOutcome::failed(format!(
                "no signing secret: set {place} secret_env in the agent's file, or [webhooks] secret_env in the \
                 server's configuration"
            ));
        };
        let secret = match read_signing_secret(name.clone()).await {
            Ok(secret) => secret,
            Err(reason) => return PostOutcome::failed(reason),
        };
        let secret = match SigningSecret::parse(&secret) {
            Ok(secret) => secret,
            Err(reason) => {
                return PostOutcome::failed(format!("the environment variable {name} {reason}"));
            }
        };
        let timestamp = at.as_second();
        let signature = secret.sign(&id, timestamp, &body);
        let message = Message {
            content_type: "application/json",
            headers: vec![
                ("webhook-id", id),
                ("webhook-timestamp", timestamp.to_string()),
                ("webhook-signature", signature),
            ],
            body,
        };
        self.client.send(url, message).await
    }
}

/// The secret is read at each attempt, so that a replaced file takes effect.
async fn read_signing_secret(name: String) -> Result<SecretString, String> {
    let variable = name.clone();
    let read = tokio::task::spawn_blocking(move || process_secret(&name)).await;
    match read.map_err(|error| error.to_string())? {
        Ok(Some(secret)) => Ok(secret),
        Ok(None) => Err(format!(
            "the environment variable {variable} with the signing secret is not set"
        )),
        Err(error) => Err(error.to_string()),
    }
}
