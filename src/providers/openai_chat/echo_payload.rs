//! The body of this wire's echoes: the thinking and the signatures that go back with an assistant message. Pure.

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::domain::message::Echo;

/// What the marks of this wire's echoes begin with.
const ECHO_PREFIX: &str = "openai";
/// Thinking that is not there. Empty text DeepSeek refuses.
const NO_REASONING: &str = "\" \"";

/// What an assistant message had besides text and calls, in the fields of the servers that have such a thing. They want
/// it back beside the calls that it led to.
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
    /// Gemini's signatures, one for each call.
    #[serde(borrow, default, skip_serializing_if = "Vec::is_empty")]
    pub extra_content: Vec<Option<&'a RawValue>>,
}

impl Reasoning<'_> {
    /// Fills the field of a reply that came without thinking, such as another model's.
    pub fn fill_missing(&mut self) {
        if self.reasoning_content.is_none() {
            self.reasoning_content = serde_json::from_str(NO_REASONING).ok();
        }
    }

    /// What stands for it where it may not go back: DeepSeek refuses tool calls that came with thinking and lack the field.
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

/// A reply's echo without its reasoning; `None` if nothing else is in it. Gemini refuses calls without their signatures,
/// and does not mind what stands before them.
pub fn without_reasoning(echo: Echo, has_calls: bool) -> Option<Echo> {
    if !echo.wire.starts_with(ECHO_PREFIX) {
        return None;
    }
    let mut payload = EchoPayload::parse(&echo.body);
    payload.reasoning = payload.reasoning.placeholder(has_calls);
    if payload.reasoning.reasoning_content.is_none() && payload.extra_content.is_empty() {
        return None;
    }
    let body = to_raw_value(&payload).ok()?.into();
    Some(Echo { body, ..echo })
}
