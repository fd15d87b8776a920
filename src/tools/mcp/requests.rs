//! The requests that a server process still has to answer. An answer to none of them ends the connection at once,
//! because the request that it was meant for would wait on.

use std::collections::BTreeSet;

use rmcp::RoleClient;
use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};

use crate::domain::message::shorten;

/// Cancelled requests whose late answers are still recognized.
const MAX_CANCELLED: usize = 1024;

/// The ids of requests that were sent.
#[derive(Default)]
pub struct PendingRequests {
    pending: BTreeSet<i64>,
    cancelled: BTreeSet<i64>,
}

impl PendingRequests {
    /// Records the id of a request, or that a request was cancelled.
    pub fn track_sent(&mut self, message: &TxJsonRpcMessage<RoleClient>) {
        match message {
            JsonRpcMessage::Request(request) => {
                self.pending.extend(numeric_id(&request.id));
            }
            JsonRpcMessage::Notification(notification) => {
                let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                else {
                    return;
                };
                let Some(id) = cancelled.params.request_id.as_ref().and_then(numeric_id) else {
                    return;
                };
                if self.pending.remove(&id) {
                    self.cancelled.insert(id);
                }
                if self.cancelled.len() > MAX_CANCELLED {
                    self.cancelled.pop_first();
                }
            }
            _ => {}
        }
    }

    /// Whether requests wait for an answer.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Matches an answer to its request.
    ///
    /// # Errors
    /// The answer belongs to no request although requests are pending.
    pub fn match_response(&mut self, message: &RxJsonRpcMessage<RoleClient>) -> Result<(), String> {
        let (id, error) = match message {
            JsonRpcMessage::Response(response) => (Some(&response.id), None),
            JsonRpcMessage::Error(error) => (error.id.as_ref(), Some(&error.error.message)),
            _ => return Ok(()),
        };
        let is_known = id
            .and_then(numeric_id)
            .is_some_and(|id| self.pending.remove(&id) || self.cancelled.remove(&id));
        if is_known || self.pending.is_empty() {
            return Ok(());
        }
        let id = match id {
            Some(id) => shorten(&id.to_string(), 50),
            None => "null".to_owned(),
        };
        Err(match error {
            Some(error) => {
                format!("it answered with the id {id}, which no request has: {error}")
            }
            None => format!("it answered with the id {id}, which no request has"),
        })
    }
}

/// Our ids are numbers. Some servers return them as strings.
fn numeric_id(id: &RequestId) -> Option<i64> {
    match id {
        RequestId::Number(number) => Some(*number),
        RequestId::String(text) => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::PendingRequests;

    fn track_sent(requests: &mut PendingRequests, message: Value) {
        requests.track_sent(&serde_json::from_value(message).expect("a message"));
    }

    fn match_response(requests: &mut PendingRequests, id: Value) -> Result<(), String> {
        let message = json!({"jsonrpc": "2.0", "id": id, "result": {}});
        requests.match_response(&serde_json::from_value(message).expect("a message"))
    }

    #[test]
    fn an_answer_must_match_a_pending_or_cancelled_request() {
        let mut requests = PendingRequests::default();
        assert_eq!(
            match_response(&mut requests, json!(9)),
            Ok(()),
            "no request is pending"
        );
        for id in 1..=3 {
            track_sent(
                &mut requests,
                json!({"jsonrpc": "2.0", "id": id, "method": "ping"}),
            );
        }
        track_sent(
            &mut requests,
            json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}),
        );
        assert_eq!(match_response(&mut requests, json!("1")), Ok(()));
        assert_eq!(match_response(&mut requests, json!(2)), Ok(()));
        let wrong = match_response(&mut requests, json!(1)).expect_err("answered already");
        assert_eq!(wrong, "it answered with the id 1, which no request has");
        let error = json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "Parse error"}});
        let error = serde_json::from_value(error).expect("a message");
        assert_eq!(
            requests.match_response(&error).expect_err("an unknown id"),
            "it answered with the id null, which no request has: Parse error"
        );
        assert_eq!(match_response(&mut requests, json!(3)), Ok(()));
    }
}
