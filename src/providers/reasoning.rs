//! Reads the reasoning of replies, and removes it from earlier ones if it must not be sent back. Pure.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::message::Message;
use crate::providers::openai_chat::echo_payload;

/// The text of the reasoning in an echo, of any wire; `None` if it has none.
pub fn reasoning_text(echo: &RawValue) -> Option<String> {
    let echo: Value = serde_json::from_str(echo.get()).ok()?;
    let mut texts = Vec::new();
    push_reasoning(&echo, &mut texts);
    let texts: Vec<_> = texts.into_iter().map(str::trim).collect();
    let text = texts.join("\n\n");
    (!text.trim().is_empty()).then_some(text)
}

fn push_reasoning<'a>(echo: &'a Value, texts: &mut Vec<&'a str>) {
    match echo {
        Value::Array(items) => items.iter().for_each(|item| push_reasoning(item, texts)),
        Value::Object(fields) => {
            // Anthropic and Ollama; OpenAI's chat API has one of two fields, within `reasoning`.
            let plain = ["thinking", "reasoning_content", "reasoning"];
            let plain = plain.iter().filter_map(|name| fields.get(*name));
            texts.extend(plain.clone().filter_map(Value::as_str).next());
            plain
                .filter(|field| field.is_object())
                .for_each(|field| push_reasoning(field, texts));
            let list = |name: &&str| fields.get(*name).and_then(Value::as_array);
            let is = |name, value| fields.get(name).and_then(Value::as_str) == Some(value);
            // Of OpenAI's Responses API and of Mistral.
            let lists = match () {
                () if is("type", "reasoning") => &["summary", "content"][..],
                () if is("phase", "commentary") => &["content"],
                () if is("type", "thinking") => &["thinking"],
                () => &[],
            };
            let parts = lists.iter().filter_map(list).flatten();
            texts.extend(parts.filter_map(|part| part.get("text")?.as_str()));
            if lists.is_empty() {
                let chunks = list(&"content").into_iter().flatten();
                chunks.for_each(|chunk| push_reasoning(chunk, texts));
            }
        }
        _ => {}
    }
}

/// Removes the reasoning from these messages. Providers reject reasoning if the messages before it have changed. Keeps the
/// parts of an echo without which a service rejects tool calls.
pub fn strip_reasoning(messages: &mut [Message]) {
    for message in messages {
        if let Message::Assistant(reply) = message {
            let has_calls = !reply.tool_calls.is_empty();
            reply.echo = reply
                .echo
                .take()
                .and_then(|echo| echo_payload::without_reasoning(echo, has_calls));
        }
    }
}
