//! Webhooks, which receive the events of root runs. Delivery is elsewhere.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::domain::event::{EventName, STORED_EVENT_NAMES};
use crate::domain::run::RunId;
use crate::settings::kinds::{Parsed, Unique, check_variable_name};
use crate::settings::section::{Audience, Kind, section};
use crate::settings::table_reader::TableReader;
use crate::ssrf;

section! {
    /// `[webhook]`: a receiver of signed events of the agent's root runs.
    #[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Webhook in "AgentWebhook" {
        /// The receiver's URL; clients see it without its query, which may hold a secret.
        pub url: String, RequiredUrl, example = "\"https://hooks.example.com/axed\"";
        /// The environment variable with the signing secret; null means the server's secret.
        pub secret_env: Option<String>, Parsed(check_variable_name), example = "\"HOOK_SECRET\"";
        /// The types of events to send; empty means those that end a run: run.completed, run.failed, run.cancelled.
        pub events: Vec<String>, Unique(check_events);
    }
}

/// An `http` or `https` URL, without which the table may have no other key. Only its syntax is checked.
struct RequiredUrl;

impl Kind<String> for RequiredUrl {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut String) {
        if table.peek(key).is_none() && !table.is_empty() {
            table.push_missing(key, "is required");
        }
        let parse = |text: &str| match ssrf::parse_url(text) {
            Ok(url) => Ok(String::from(url)),
            Err(error) => Err(error.to_string()),
        };
        if let Some(url) = table.parsed_text(key, parse) {
            *value = url;
        }
    }

    fn show(&self, value: &String, audience: Audience) -> Value {
        match audience {
            Audience::Client => json!(ssrf::redact_query(value)),
            Audience::Operator => json!(value),
        }
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Value {
        json!({"type": "string"})
    }
}

fn check_events(names: Vec<String>) -> Result<Vec<String>, String> {
    let is_unknown = |name: &&String| !STORED_EVENT_NAMES.contains(&name.as_str());
    match names.iter().find(is_unknown) {
        Some(unknown) => {
            let known = STORED_EVENT_NAMES.join(", ");
            Err(format!("has {unknown:?}, which is none of: {known}"))
        }
        None => Ok(names),
    }
}

impl Webhook {
    /// Whether it receives events with this name.
    pub fn is_subscribed_to(&self, event: EventName) -> bool {
        match self.events.is_empty() {
            true => event.is_terminal(),
            false => self.events.iter().any(|wanted| wanted == event.as_str()),
        }
    }
}

impl fmt::Debug for Webhook {
    /// Omits the URL, whose path and query may contain a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Webhook")
            .field("secret_env", &self.secret_env)
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}

/// The id of a delivery, the same for all its attempts: `whd_` and a UUIDv7.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(transparent)]
pub struct DeliveryId(
    #[schemars(with = "String", regex(pattern = "^whd_[0-9a-f-]{36}$"))] pub Uuid,
);

impl DeliveryId {
    pub fn new() -> Self {
        Self(RunId::new().0)
    }
}

impl Default for DeliveryId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "whd_{}", self.0.as_hyphenated())
    }
}

impl fmt::Debug for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is not a delivery id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a delivery's id is whd_ and a UUID")]
pub struct InvalidDeliveryId;

impl FromStr for DeliveryId {
    type Err = InvalidDeliveryId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uuid = text
            .strip_prefix("whd_")
            .filter(|rest| rest.len() == 36)
            .ok_or(InvalidDeliveryId)?;
        Uuid::try_parse(uuid)
            .map(Self)
            .map_err(|_| InvalidDeliveryId)
    }
}

impl Serialize for DeliveryId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::{DeliveryId, Webhook};
    use crate::domain::event::EventName;

    #[test]
    fn terminal_events_are_sent_by_default() {
        let mut webhook = Webhook {
            url: "https://a/?token=hush".to_owned(),
            secret_env: None,
            events: Vec::new(),
        };
        assert!(
            webhook.is_subscribed_to(EventName::RunCancelled)
                && !webhook.is_subscribed_to(EventName::RunStarted)
        );
        webhook.events = vec!["run.started".to_owned()];
        assert!(
            !webhook.is_subscribed_to(EventName::RunCancelled)
                && webhook.is_subscribed_to(EventName::RunStarted)
        );
        assert!(!format!("{webhook:?}").contains("hush"));
    }

    #[test]
    fn an_id_reads_back() {
        let id = DeliveryId::new();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("run_x".parse::<DeliveryId>().is_err());
    }
}
