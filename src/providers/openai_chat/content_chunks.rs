//! The content of Mistral's replies that think: a list of chunks, which has to go back as it came, signatures included. Pure.

use serde_json::{Map, Value, json};

/// The chunks of a reply with thinking, in their order; empty if it has none.
#[derive(Debug, Default)]
pub struct ContentChunks(Vec<Value>);

impl ContentChunks {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn chunks(&self) -> &[Value] {
        &self.0
    }

    /// Adds the pieces of a message. `text_before` is the text of the reply before them.
    pub fn push(&mut self, pieces: Vec<Value>, text_before: &str) {
        let has_thinking = pieces.iter().any(is_thinking);
        if self.is_empty() && !has_thinking {
            return;
        }
        if self.is_empty() && !text_before.is_empty() {
            self.0.push(text_chunk(text_before));
        }
        for piece in pieces {
            match (self.0.last_mut(), piece) {
                (Some(Value::Object(chunk)), Value::Object(piece)) if continues(chunk, &piece) => {
                    merge(chunk, piece);
                }
                (_, piece) => self.0.push(piece),
            }
        }
    }

    /// Adds a text that is no chunk itself.
    pub fn push_text(&mut self, text: &str) {
        self.push(vec![text_chunk(text)], "");
    }
}

fn text_chunk(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

pub fn is_thinking(chunk: &Value) -> bool {
    chunk["type"] == "thinking"
}

/// The thinking in a chunk.
pub fn thinking_text(chunk: &Value) -> String {
    let parts = chunk["thinking"].as_array().into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect()
}

/// Whether a piece belongs to the chunk before it. A signature ends a chunk.
fn continues(chunk: &Map<String, Value>, piece: &Map<String, Value>) -> bool {
    let is_signed = chunk.get("signature").is_some_and(|it| !it.is_null());
    let has_content = piece.get("thinking").and_then(Value::as_array);
    let is_ended = is_signed && has_content.is_some_and(|parts| !parts.is_empty());
    let kind = chunk.get("type").and_then(Value::as_str);
    let is_kind = matches!(kind, Some("thinking" | "text"));
    is_kind && piece.get("type") == chunk.get("type") && !is_ended
}

fn merge(chunk: &mut Map<String, Value>, piece: Map<String, Value>) {
    for (key, value) in piece {
        match (chunk.get_mut(&key), value) {
            (Some(_), Value::Null) => {}
            (Some(Value::String(text)), Value::String(more)) if key == "text" => {
                text.push_str(&more);
            }
            (Some(Value::Array(parts)), Value::Array(more)) if key == "thinking" => {
                more.into_iter().for_each(|part| push_part(parts, part));
            }
            (_, value) => drop(chunk.insert(key, value)),
        }
    }
}

/// Adds a part of the thinking; a text continues the text before it.
fn push_part(parts: &mut Vec<Value>, part: Value) {
    match (parts.last_mut(), part) {
        (Some(Value::Object(last)), Value::Object(part))
            if last.get("type") == part.get("type") && part.contains_key("text") =>
        {
            merge(last, part);
        }
        (_, part) => parts.push(part),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::ContentChunks;

    fn thinking(text: &str) -> Value {
        json!({"type": "thinking", "thinking": [{"type": "text", "text": text}]})
    }

    #[test]
    fn pieces_of_a_stream_become_the_chunks_of_a_whole_reply() {
        let mut content = ContentChunks::default();
        content.push(vec![thinking("I ")], "");
        content.push(vec![thinking("look.")], "");
        content.push(
            vec![json!({"type": "thinking", "thinking": [], "signature": "s", "closed": true})],
            "",
        );
        content.push_text("do");
        content.push(vec![json!({"type": "text", "text": "ne"})], "do");
        content.push(vec![thinking("again")], "done");
        let signed = json!({
            "type": "thinking", "thinking": [{"type": "text", "text": "I look."}], "signature": "s", "closed": true,
        });
        let done = json!({"type": "text", "text": "done"});
        assert_eq!(
            json!(content.chunks()),
            json!([signed, done, thinking("again")])
        );
    }

    #[test]
    fn a_reply_without_thinking_has_no_chunks() {
        let mut content = ContentChunks::default();
        content.push(vec![json!({"type": "text", "text": "done"})], "");
        assert!(content.is_empty());
        content.push(vec![thinking("late")], "done");
        let done = json!({"type": "text", "text": "done"});
        assert_eq!(json!(content.chunks()), json!([done, thinking("late")]));
    }
}
