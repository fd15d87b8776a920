//! A change of a run that a client requests, as one node sends it to another one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::domain::attachment::{Attachment, Blobs, Digest};
use crate::engine::control::add_message::MessageRequest;
use crate::engine::state::client_calls::ClientResults;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::StoreError;
use crate::store::new_request::RequestContent;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunChange {
    Cancel {
        reason: String,
    },
    Decide {
        call: String,
        decision: InputAnswer,
        /// [`InputAnswer::arguments`], which its JSON does not have.
        arguments: Option<Arc<RawValue>>,
    },
    AddMessage(MessageRequest),
    SetHeld {
        is_held: bool,
        by: Option<String>,
    },
    AddClientResults(ClientResults),
}

impl RunChange {
    /// Requests of one kind to runs of one tree are performed in their order.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Cancel { .. } => "cancel",
            Self::Decide { .. } => "decide",
            Self::AddMessage(_) => "add_message",
            Self::SetHeld { .. } => "set_held",
            Self::AddClientResults(_) => "add_client_results",
        }
    }

    pub fn encode(&self) -> Result<RequestContent, StoreError> {
        let blobs = self.attachments().into_iter();
        Ok(RequestContent {
            body: serde_json::to_vec(self)
                .map_err(|error| StoreError::Backend(error.to_string()))?,
            blobs: blobs.filter_map(|it| it.data.clone()).collect(),
        })
    }

    pub fn decode(content: RequestContent) -> Result<Self, serde_json::Error> {
        let mut change: Self = serde_json::from_slice(&content.body)?;
        let blobs = content.blobs.into_iter();
        let blobs: Blobs = blobs.map(|it| (Digest::compute(&it), it)).collect();
        for attachment in change.attachments_mut() {
            attachment.data = blobs.get(&attachment.sha256).cloned();
        }
        Ok(change)
    }

    fn attachments(&self) -> Vec<&Attachment> {
        match self {
            Self::AddMessage(message) => message.content.attachments().collect(),
            Self::AddClientResults(given) => {
                let results = given.results.iter();
                results.flat_map(|it| &it.attachments).collect()
            }
            Self::Cancel { .. } | Self::Decide { .. } | Self::SetHeld { .. } => Vec::new(),
        }
    }

    fn attachments_mut(&mut self) -> Vec<&mut Attachment> {
        match self {
            Self::AddMessage(message) => message.content.attachments_mut().collect(),
            Self::AddClientResults(given) => {
                let results = given.results.iter_mut();
                results.flat_map(|it| &mut it.attachments).collect()
            }
            Self::Cancel { .. } | Self::Decide { .. } | Self::SetHeld { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use serde_json::value::RawValue;

    use crate::domain::attachment::Attachment;
    use crate::domain::content::{Content, Part};
    use crate::domain::event::Decision;
    use crate::domain::input::InputKind;
    use crate::engine::control::add_message::MessageRequest;
    use crate::engine::control::run_change::RunChange;
    use crate::engine::state::input_answer::InputAnswer;

    fn sent(change: &RunChange) -> RunChange {
        RunChange::decode(change.encode().expect("JSON")).expect("a change")
    }

    #[test]
    fn a_message_arrives_with_its_pictures() {
        let data = Bytes::from_static(b"\xff\xd8\xff!");
        let picture = Attachment::from_bytes(data, None).expect("a picture");
        let content = Content::Parts(vec![Part::from(picture)]);
        let message = MessageRequest {
            content: content.clone(),
            by: Some("key".to_owned()),
            claim: None,
        };
        let RunChange::AddMessage(received) = sent(&RunChange::AddMessage(message)) else {
            panic!("no message");
        };
        assert_eq!(received.content, content);
    }

    #[test]
    fn a_decision_arrives_with_its_arguments() {
        let json = RawValue::from_string(r#"{"path": 1.0}"#.to_owned()).expect("JSON");
        let arguments: Option<Arc<RawValue>> = Some(json.into());
        let change = RunChange::Decide {
            call: "call".to_owned(),
            decision: InputAnswer {
                decision: Decision::Approved,
                reason: None,
                arguments: arguments.clone(),
                arguments_hash: None,
                by: None,
                claim: None,
                kind: InputKind::Approval,
            },
            arguments,
        };
        let RunChange::Decide { arguments, .. } = sent(&change) else {
            panic!("no decision");
        };
        assert_eq!(
            arguments.as_deref().map(RawValue::get),
            Some(r#"{"path": 1.0}"#)
        );
    }
}
