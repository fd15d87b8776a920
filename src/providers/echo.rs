//! Keeps what a model sent besides text and tool calls, such as its reasoning, to send it back to the same provider and
//! model as long as the messages before it are unchanged. Pure.

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};

use crate::domain::message::{AssistantMessage, Echo, ToolSpec};

/// The service and model that wrote a reply. Only they accept its signatures and encrypted reasoning.
#[derive(Clone, Copy, Debug)]
pub struct ReplyOrigin<'a> {
    /// The wire, and the provider's name if it differs.
    pub service: &'a str,
    /// The model that the request named, which may be an alias.
    pub model: &'a str,
}

impl ReplyOrigin<'_> {
    pub fn echo(self, body: &impl Serialize) -> Option<Echo> {
        Some(Echo {
            wire: format!("{}:{}", self.service, self.model),
            body: to_raw_value(body).ok()?.into(),
            prefix: 0,
        })
    }

    /// The body of the message's echo if this model wrote it.
    pub fn echo_body(self, message: &AssistantMessage) -> Option<&RawValue> {
        let echo = message.echo.as_ref()?;
        (self.echo_model(echo)? == self.model).then_some(&*echo.body)
    }

    /// The body of the message's echo if another model of this service wrote it.
    pub fn foreign_echo_body(self, message: &AssistantMessage) -> Option<&RawValue> {
        let echo = message.echo.as_ref()?;
        (self.echo_model(echo)? != self.model).then_some(&*echo.body)
    }

    fn echo_model(self, echo: &Echo) -> Option<&str> {
        echo.wire.strip_prefix(self.service)?.strip_prefix(':')
    }
}

/// Hashes what every request of a run begins with: the system prompt and the tools.
pub fn prefix_hash(system: &str, tools: &[ToolSpec]) -> u64 {
    let mut hasher = Sha256::new();
    let mut add = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    add(system);
    for tool in tools {
        add(&tool.name);
        add(&tool.description);
        add(tool.parameters.get());
    }
    let digest = hasher.finalize();
    digest
        .iter()
        .take(8)
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}
