//! The ids of tool calls that clients execute. An id contains its run, so that its result finds the run without a table.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use crate::domain::run::RunId;

const PREFIX: &str = "call_";

/// A tool call of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRef {
    pub run: RunId,
    /// The turn whose reply has the call.
    pub turn: u32,
    /// The index of the call in that reply, from 0.
    pub position: u32,
}

impl CallRef {
    /// 33 characters: services refuse ids with more than 40.
    pub fn to_id(self) -> String {
        let mut bytes = self.run.0.as_bytes().to_vec();
        bytes.extend_from_slice(&self.turn.to_be_bytes()[1..]);
        bytes.extend_from_slice(&self.position.to_be_bytes()[2..]);
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// `None` if the text is no id that was given out.
    pub fn parse(id: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(id.strip_prefix(PREFIX)?).ok()?;
        let (uuid, rest) = bytes.split_first_chunk::<16>()?;
        let &[a, b, c, d, e] = rest else {
            return None;
        };
        Some(Self {
            run: RunId(Uuid::from_bytes(*uuid)),
            turn: u32::from_be_bytes([0, a, b, c]),
            position: u32::from_be_bytes([0, 0, d, e]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::CallRef;
    use crate::domain::run::RunId;

    #[test]
    fn an_id_reads_back() {
        let call = CallRef {
            run: RunId::new(),
            turn: 50,
            position: 300,
        };
        let id = call.to_id();
        assert_eq!((id.len(), CallRef::parse(&id)), (33, Some(call)));
        for other in [
            "",
            "call_",
            "call_1_0",
            "toolu_01",
            &id[..32],
            &format!("{id}AAAA"),
        ] {
            assert_eq!(CallRef::parse(other), None, "{other}");
        }
    }
}
