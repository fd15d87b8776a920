//! Access tokens, and the texts that must not appear anywhere.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::tools::mcp::oauth::endpoint::basic_credentials;
use crate::tools::mcp::secrets::redact_value;

/// A token is renewed this long before it expires, or earlier in a short life.
const MAX_MARGIN: Duration = Duration::from_secs(30);
/// The longest life of a token that is believed.
const MAX_LIFETIME: Duration = Duration::from_secs(365 * 86_400);
/// Secrets of one server that are redacted: the last tokens, and those that were exchanged for them.
const MAX_REDACTED: usize = 24;
/// A shorter value is not secret, and would match in any text.
const MIN_SECRET_BYTES: usize = 8;

/// An access token for one server.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessToken {
    pub secret: String,
    /// When it expires; `None` if the authorization server does not say.
    pub expires_at: Option<Timestamp>,
    /// When it is to be renewed.
    pub renew_at: Option<Timestamp>,
    /// The scopes that were granted.
    pub scopes: Vec<String>,
}

impl AccessToken {
    /// A token that was issued at `now`.
    pub fn new(
        secret: String,
        lifetime: Option<Duration>,
        scopes: Vec<String>,
        now: Timestamp,
    ) -> Self {
        let after = |time: Duration| {
            let time = SignedDuration::try_from(time).ok()?;
            now.checked_add(time).ok()
        };
        let lifetime = lifetime.map(|it| it.min(MAX_LIFETIME));
        let margin = lifetime.map(|it| MAX_MARGIN.min(it / 10));
        Self {
            secret,
            expires_at: lifetime.and_then(after),
            renew_at: lifetime
                .zip(margin)
                .and_then(|(lifetime, margin)| after(lifetime - margin)),
            scopes,
        }
    }

    /// Whether it may be used at this time.
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        self.renew_at.is_none_or(|renew_at| now < renew_at)
    }
}

/// The secrets that were used for one server lately.
#[derive(Default)]
pub struct IssuedSecrets {
    values: Mutex<VecDeque<String>>,
}

impl IssuedSecrets {
    pub fn add(&self, value: &str) {
        let mut values = self.values.lock();
        if value.len() < MIN_SECRET_BYTES || values.iter().any(|it| it == value) {
            return;
        }
        if values.len() == MAX_REDACTED {
            values.pop_front();
        }
        values.push_back(value.to_owned());
    }

    /// Adds the secret of a client, and the credentials that contain it.
    pub fn add_client(&self, client_id: &str, secret: &str) {
        self.add(secret);
        self.add(&basic_credentials(client_id, secret));
    }

    /// The text with every secret replaced by `***`.
    pub fn redact(&self, text: String) -> String {
        let values = self.values.lock();
        values
            .iter()
            .fold(text, |text, value| redact_value(text, value))
    }
}
