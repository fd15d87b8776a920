//! The `reasoning_details` of OpenRouter. A stream sends a block in pieces with one index, the signature apart from the text, and
//! the next request has to bring the block back as one. Pure.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// The texts of a block, which come in pieces.
const TEXTS: [&str; 3] = ["text", "summary", "data"];

/// The blocks so far, in their order.
#[derive(Debug, Default)]
pub struct ReasoningDetails(Vec<Value>);

impl ReasoningDetails {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn blocks(&self) -> &[Value] {
        &self.0
    }

    /// Adds a block of a whole reply.
    pub fn push_block(&mut self, block: &RawValue) {
        self.0.extend(serde_json::from_str::<Value>(block.get()));
    }

    /// Adds a block of a stream, or a piece of one.
    pub fn push_piece(&mut self, piece: &RawValue) {
        let Ok(piece) = serde_json::from_str::<Value>(piece.get()) else {
            return;
        };
        let Value::Object(fields) = &piece else {
            self.0.push(piece);
            return;
        };
        let last = self.0.len().saturating_sub(1);
        let has_index = field(fields, "index").is_some();
        let blocks = self.0.iter_mut().enumerate().rev();
        // Without an index, a piece continues the block before it.
        let mut candidates = blocks.filter(|(at, _)| has_index || *at == last);
        let found = candidates.find_map(|(_, block)| {
            let block = block.as_object_mut()?;
            is_continued(block, fields).then_some(block)
        });
        match found {
            Some(block) => merge(block, fields),
            None => self.0.push(piece),
        }
    }
}

/// A field that is not null.
fn field<'a>(fields: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    fields.get(key).filter(|value| !value.is_null())
}

fn is_continued(block: &Map<String, Value>, piece: &Map<String, Value>) -> bool {
    let is_same = |key| field(block, key) == field(piece, key);
    let (id, piece_id) = (field(block, "id"), field(piece, "id"));
    let has_text = TEXTS.iter().any(|key| {
        let text = field(piece, key).and_then(Value::as_str);
        text.is_some_and(|text| !text.is_empty())
    });
    // A signature ends its block.
    let is_ended = has_text && field(block, "signature").is_some();
    is_same("type")
        && is_same("index")
        && (piece_id.is_none() || id.is_none() || id == piece_id)
        && !is_ended
}

fn merge(block: &mut Map<String, Value>, piece: &Map<String, Value>) {
    for (key, value) in piece {
        match (block.get_mut(key), value) {
            (Some(_), Value::Null) => {}
            (Some(Value::String(text)), Value::String(more)) if TEXTS.contains(&key.as_str()) => {
                text.push_str(more);
            }
            (Some(known), value) => value.clone_into(known),
            (None, value) => drop(block.insert(key.clone(), value.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::to_raw_value;
    use serde_json::{Value, json};

    use super::ReasoningDetails;

    #[test]
    fn pieces_of_a_block_become_one() {
        let text =
            |text: &str, index| json!({"type": "reasoning.text", "text": text, "index": index});
        let signature =
            |of: &str, index| json!({"type": "reasoning.text", "signature": of, "index": index});
        let encrypted = |data: &str, id: Value| json!({"type": "reasoning.encrypted", "data": data, "id": id, "index": 0});
        let cases = [
            (
                vec![
                    json!({"type": "reasoning.text", "text": "I ", "signature": null, "index": 0, "format": "f"}),
                    text("look.", json!(0)),
                    signature("s", json!(0)),
                ],
                json!([{"type": "reasoning.text", "text": "I look.", "signature": "s", "index": 0, "format": "f"}]),
            ),
            (
                vec![
                    text("a", json!(0)),
                    text("b", json!(1)),
                    text("c", json!(0)),
                    signature("s", json!(1)),
                ],
                json!([
                    {"type": "reasoning.text", "text": "ac", "index": 0},
                    {"type": "reasoning.text", "text": "b", "index": 1, "signature": "s"},
                ]),
            ),
            (
                vec![text("a", Value::Null), text("b", Value::Null)],
                json!([{"type": "reasoning.text", "text": "ab", "index": null}]),
            ),
            (
                vec![
                    text("a", json!(0)),
                    signature("s", json!(0)),
                    text("b", json!(0)),
                ],
                json!([
                    {"type": "reasoning.text", "text": "a", "index": 0, "signature": "s"},
                    {"type": "reasoning.text", "text": "b", "index": 0},
                ]),
            ),
            (
                vec![
                    encrypted("x", json!("call_1")),
                    encrypted("y", json!("call_2")),
                ],
                json!([
                    {"type": "reasoning.encrypted", "data": "x", "id": "call_1", "index": 0},
                    {"type": "reasoning.encrypted", "data": "y", "id": "call_2", "index": 0},
                ]),
            ),
        ];
        for (pieces, blocks) in cases {
            let mut details = ReasoningDetails::default();
            for piece in pieces {
                details.push_piece(&to_raw_value(&piece).expect("JSON"));
            }
            assert_eq!(json!(details.blocks()), blocks);
        }
    }
}
