//! The body of this wire's echoes: the reasoning and the signatures to send back with an assistant message. Pure.

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::Echo;

/// The prefix of `Echo::wire` on this wire.
const ECHO_PREFIX: &str = "openai";
/// A JSON string for missing reasoning. DeepSeek rejects an empty string.
const NO_REASONING: &str = "\" \"";

/// The reasoning of an assistant message, in the fields of the servers that send it. They expect it back with the tool calls
/// of the message.
#[derive(Default, Serialize, Deserialize)]
pub struct Reasoning<'a> {
    /// DeepSeek, llama.cpp, vLLM.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a RawValue>,
    /// OpenRouter, newer vLLM.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a RawValue>,
    /// OpenRouter.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub reasoning_details: Option<&'a RawValue>,
}

/// The body of an [`Echo`].
#[derive(Default, Serialize, Deserialize)]
pub struct EchoPayload<'a> {
    #[serde(borrow, default)]
    pub reasoning: Reasoning<'a>,
    /// The whole content with Mistral's thinking.
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a RawValue>,
    /// Gemini's signatures, one per tool call.
    #[serde(borrow, default, skip_serializing_if = "Vec::is_empty")]
    pub extra_content: Vec<Option<&'a RawValue>>,
}

impl Reasoning<'_> {
    /// Fills the field in a reply without reasoning, such as one of another model.
    pub fn fill_missing(&mut self) {
        if self.reasoning_content.is_none() {
            self.reasoning_content = serde_json::from_str(NO_REASONING).ok();
        }
    }

    /// Replaces reasoning that must not be sent back: DeepSeek rejects tool calls that lack the field if they had it.
    pub fn placeholder(&self, has_calls: bool) -> Self {
        Self {
            reasoning_content: self
                .reasoning_content
                .filter(|_| has_calls)
                .and_then(|_| serde_json::from_str(NO_REASONING).ok()),
            ..Self::default()
        }
    }
}

impl<'a> EchoPayload<'a> {
    pub fn parse(body: &'a RawValue) -> Self {
        serde_json::from_str(body.get()).unwrap_or_default()
    }
}

/// The echo without its reasoning; `None` if nothing else is left. Signatures stay: Gemini rejects tool calls without them,
/// and accepts them even if earlier messages have changed.
pub fn without_reasoning(echo: Echo, has_calls: bool) -> Option<Echo> {
    if !echo.wire.starts_with(ECHO_PREFIX) {
        return None;
    }
    let mut payload = EchoPayload::parse(&echo.body);
    payload.reasoning = payload.reasoning.placeholder(has_calls);
    payload.content = None;
    if payload.reasoning.reasoning_content.is_none() && payload.extra_content.is_empty() {
        return None;
    }
    let body = to_raw_value(&payload).ok()?.into();
    Some(Echo { body, ..echo })
}
