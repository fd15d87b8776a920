//! The names of the channels, and messages as the text that they carry.

use crate::domain::node::NodeId;
use crate::store::node_messages::NodeMessage;

/// PostgreSQL takes fewer than 8,000 bytes.
const MAX_PAYLOAD_BYTES: usize = 7_999;

/// The channel of one node, or of all. It needs no quotes in SQL.
pub fn name(node: Option<NodeId>) -> String {
    match node {
        Some(NodeId(id)) => format!("axed_{}", id.simple()),
        None => "axed".to_owned(),
    }
}

/// `None` if the message is too long to be sent.
pub fn encode(message: &NodeMessage) -> Option<String> {
    let text = serde_json::to_string(message).ok()?;
    (text.len() <= MAX_PAYLOAD_BYTES).then_some(text)
}

/// `None` for messages that only other versions know.
pub fn decode(text: &str) -> Option<NodeMessage> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::{decode, encode, name};
    use crate::domain::node::NodeId;
    use crate::domain::run::RunId;
    use crate::store::node_messages::{Follow, FollowedText, NodeMessage, TextPiece};

    fn text(piece: TextPiece) -> NodeMessage {
        NodeMessage::Text(FollowedText {
            root: RunId::new(),
            follow: 1,
            number: 2,
            piece,
        })
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let (root, node) = (RunId::new(), NodeId(RunId::new().0));
        let data = r#"{"turn":1,"text":"ä\u0000\n"}"#.to_owned();
        let data = RawValue::from_string(data).expect("JSON");
        let name = "text.delta".to_owned();
        for message in [
            NodeMessage::Requests,
            NodeMessage::Answered(root.0),
            NodeMessage::Follow(Follow {
                root,
                node,
                number: 7,
                text: true,
            }),
            NodeMessage::Events(vec![(root, u64::MAX)]),
            text(TextPiece::Begin),
            text(TextPiece::Event { name, data }),
            NodeMessage::Permits,
            NodeMessage::Taken(node, vec![root]),
        ] {
            let encoded = encode(&message).expect("a text");
            let decoded = decode(&encoded).expect("a message");
            assert_eq!(format!("{message:?}"), format!("{decoded:?}"));
        }
    }

    #[test]
    fn what_is_unknown_or_too_long_is_passed_over() {
        for unknown in ["", "\"newer\"", "{\"events\":[\"x\"]}", "{", "[[[["] {
            assert!(decode(unknown).is_none(), "{unknown}");
        }
        let long = text(TextPiece::Before {
            agent: "a".repeat(64),
            turn: 1,
            text: "\u{1}".repeat(2000),
            is_replacement: false,
        });
        assert_eq!(encode(&long), None);
    }

    #[test]
    fn a_node_has_a_channel_of_its_own() {
        let node = NodeId(RunId::new().0);
        assert_eq!(name(None), "axed");
        assert!(name(Some(node)).len() < 63);
    }
}
