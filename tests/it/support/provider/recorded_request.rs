//! A request as the fake provider saw it, with readers that say the same on every wire.

use axum::body::Bytes;
use axum::http::HeaderMap;
use serde_json::{Value, json};

/// The wires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// `/v1/messages`
    Anthropic,
    /// `/v1/chat/completions`
    Openai,
    /// `/v1/responses`
    Responses,
    /// `/api/chat`
    Ollama,
}

impl Wire {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Anthropic, Self::Openai, Self::Responses, Self::Ollama];

    /// The configuration of a provider with this wire.
    pub fn config_toml(self) -> &'static str {
        match self {
            Self::Responses => "kind = \"openai\"\napi = \"responses\"",
            Self::Anthropic => "kind = \"anthropic\"",
            Self::Openai => "kind = \"openai\"",
            Self::Ollama => "kind = \"ollama\"",
        }
    }

    /// The provider's name in the daemon's configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Anthropic => "anthropic",
            Self::Openai => "openai",
            Self::Responses => "responses",
            Self::Ollama => "ollama",
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// Counts from 0 over all requests.
    pub number: usize,
    /// The wire it came over.
    pub wire: Wire,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Value,
    /// The bytes of its body.
    pub bytes: Bytes,
}

impl RecordedRequest {
    /// The requested model.
    pub fn model(&self) -> &str {
        self.body["model"].as_str().unwrap_or_default()
    }

    /// Whether it requests a stream. Ollama streams by default.
    pub fn wants_stream(&self) -> bool {
        self.body["stream"]
            .as_bool()
            .unwrap_or(self.wire == Wire::Ollama)
    }

    /// The key it carries.
    pub fn api_key(&self) -> Option<&str> {
        let header = |name| self.headers.get(name).and_then(|value| value.to_str().ok());
        header("x-api-key").or_else(|| header("authorization")?.strip_prefix("Bearer "))
    }

    /// The system prompt; empty if there is none.
    pub fn system(&self) -> String {
        match self.wire {
            Wire::Anthropic => text(&self.body["system"]),
            Wire::Responses => text(&self.body["instructions"]),
            Wire::Openai | Wire::Ollama => self
                .messages()
                .iter()
                .find(|message| message["role"] == "system")
                .map(|message| text(&message["content"]))
                .unwrap_or_default(),
        }
    }

    /// The texts of the user's messages, without tool results.
    pub fn user_messages(&self) -> Vec<String> {
        self.messages()
            .iter()
            .filter(|message| message["role"] == "user" && !has_tool_results(message))
            .map(|message| text(&message["content"]))
            .collect()
    }

    /// The number of the run's turn, from 1.
    pub fn turn(&self) -> usize {
        if self.wire == Wire::Responses {
            return 1 + self.reply_count();
        }
        let replies = self.messages().iter();
        1 + replies
            .filter(|message| message["role"] == "assistant")
            .count()
    }

    /// The number of replies in the input, which has one item or more for each.
    fn reply_count(&self) -> usize {
        let is_reply_item = |item: &Value| {
            let kind = item["type"].as_str().unwrap_or_default();
            item["role"] == "assistant" || matches!(kind, "function_call" | "reasoning")
        };
        let reply_items: Vec<bool> = self.messages().iter().map(is_reply_item).collect();
        let begins = |at: usize| reply_items[at] && (at == 0 || !reply_items[at - 1]);
        (0..reply_items.len()).filter(|at| begins(*at)).count()
    }

    /// The texts of all tool results, in their order.
    pub fn tool_results(&self) -> Vec<String> {
        let blocks = self.messages().iter().flat_map(|message| {
            match (self.wire, message["content"].as_array()) {
                (Wire::Anthropic, Some(blocks)) => blocks
                    .iter()
                    .filter(|block| block["type"] == "tool_result")
                    .map(|block| text(&block["content"]))
                    .collect(),
                _ if message["role"] == "tool" => vec![text(&message["content"])],
                _ if message["type"] == "function_call_output" => vec![text(&message["output"])],
                _ => Vec::new(),
            }
        });
        blocks.collect()
    }

    /// Whether each tool result is an error, in their order. Only Anthropic's wire reports it.
    pub fn tool_result_errors(&self) -> Vec<bool> {
        assert_eq!(
            self.wire,
            Wire::Anthropic,
            "only this wire marks errors: {self:?}"
        );
        self.messages()
            .iter()
            .filter_map(|message| message["content"].as_array())
            .flatten()
            .filter(|block| block["type"] == "tool_result")
            .map(|block| {
                block["is_error"]
                    .as_bool()
                    .expect("is_error is always there")
            })
            .collect()
    }

    /// The tools on offer, each as `{name, description, parameters}`.
    pub fn tools(&self) -> Vec<Value> {
        let tools = self.body["tools"].as_array().map(Vec::as_slice);
        tools
            .unwrap_or_default()
            .iter()
            .map(|tool| match self.wire {
                Wire::Anthropic => json!({
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                }),
                Wire::Responses => json!({
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["parameters"],
                }),
                Wire::Openai | Wire::Ollama => json!({
                    "name": tool["function"]["name"],
                    "description": tool["function"]["description"],
                    "parameters": tool["function"]["parameters"],
                }),
            })
            .collect()
    }

    /// The names of the tools on offer.
    pub fn tool_names(&self) -> Vec<String> {
        self.tools()
            .iter()
            .map(|tool| text(&tool["name"]))
            .collect()
    }

    /// The conversation, in the wire's own form.
    pub fn messages(&self) -> &[Value] {
        let field = match self.wire {
            Wire::Responses => "input",
            _ => "messages",
        };
        self.body[field]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
    }
}

fn has_tool_results(message: &Value) -> bool {
    message["content"]
        .as_array()
        .is_some_and(|blocks| blocks.iter().any(|block| block["type"] == "tool_result"))
}

/// A text that is written as one string or as text blocks.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks
            .iter()
            .filter_map(|block| block["text"].as_str())
            .collect(),
        _ => String::new(),
    }
}
