//! `[[triggers]]` of an agent's file: runs that signed requests of other services start.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::text_template::TextTemplate;

/// Most triggers of one agent.
pub const MAX_TRIGGERS: usize = 32;

/// A webhook that starts runs of an agent.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "AgentTrigger")]
pub struct Trigger {
    /// The name of the trigger, unique within the agent.
    pub name: String,
    /// Whose signatures it accepts.
    pub kind: TriggerKind,
    /// The environment variable with the secret that the sender signs with.
    pub secret_env: String,
    /// The input of the runs, with `{body.path}` for values of the request's body; null means the whole body.
    #[schemars(with = "Option<String>")]
    pub input_template: Option<TextTemplate>,
    /// The event that wakes waiting runs, instead of starting one; null if it starts one.
    pub wake: Option<WakeTemplate>,
    /// The labels of the runs.
    pub labels: BTreeMap<String, String>,
    /// The name of the key that owns the runs; null means that only admins see them.
    pub key: Option<String>,
}

/// The event of a trigger, with `{body.path}` for values of the request's body.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct WakeTemplate {
    /// The name of the event.
    #[schemars(with = "String")]
    pub event: TextTemplate,
    /// Its key.
    #[schemars(with = "String")]
    pub key: TextTemplate,
}

/// How a sender signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "TriggerKind")]
#[serde(rename_all = "lowercase")]
pub enum TriggerKind {
    /// Standard Webhooks, such as those of axed itself.
    Standard,
    /// GitHub's `X-Hub-Signature-256`.
    Github,
    /// Stripe's `Stripe-Signature`.
    Stripe,
}
