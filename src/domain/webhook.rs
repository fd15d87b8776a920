//! Webhooks, which receive the events of root runs. Delivery is elsewhere.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::domain::agent::settings::{ListRule, Section, Setting, Visitor};
use crate::domain::event::EventName;
use crate::domain::run::RunId;

/// A receiver of events.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// An `http` or `https` URL; only its syntax is validated.
    pub url: String,
    /// The environment variable with the signing secret; unset means the server's secret.
    #[serde(default)]
    pub secret_env: Option<String>,
    /// Event names, see [`crate::domain::event::EventKind::name`]; empty means the terminal events.
    #[serde(default)]
    pub events: Vec<String>,
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

impl Section for Webhook {
    const SCHEMA: &'static str = "AgentWebhook";

    fn visit<V: Visitor>(&mut self, v: &mut V) {
        let Self {
            url,
            secret_env,
            events,
        } = self;
        v.setting("url", Setting::Url(url));
        v.setting("secret_env", Setting::VariableName(secret_env));
        v.setting("events", Setting::Texts(ListRule::Events, events));
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
