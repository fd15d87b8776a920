//! The requests that a server process still has to answer. An answer to none of them ends the connection at once,
//! because the request that it was meant for would wait on.

use std::collections::{BTreeMap, VecDeque};

use rmcp::RoleClient;
use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId, ServerJsonRpcMessage};
use rmcp::service::TxJsonRpcMessage;

use crate::tools::mcp::message::{Answer, RequestKind};

/// Cancelled requests whose late answers are still recognized.
const MAX_CANCELLED: usize = 1024;
/// Answers whose repetitions are still recognized.
const MAX_ANSWERED: usize = 16;

/// The ids of requests that were sent.
#[derive(Default)]
pub struct PendingRequests {
    pending: BTreeMap<i64, RequestKind>,
    cancelled: BTreeMap<i64, RequestKind>,
    /// The last answers, by their digests.
    answered: VecDeque<u64>,
}

impl PendingRequests {
    /// Records the id of a request, or that a request was cancelled.
    pub fn track_sent(&mut self, message: &TxJsonRpcMessage<RoleClient>) {
        match message {
            JsonRpcMessage::Request(request) => {
                if let Some(id) = number(&request.id) {
                    self.pending.insert(id, RequestKind::of(&request.request));
                }
            }
            JsonRpcMessage::Notification(notification) => {
                let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                else {
                    return;
                };
                let Some(id) = cancelled.params.request_id.as_ref().and_then(number) else {
                    return;
                };
                if let Some(kind) = self.pending.remove(&id) {
                    self.cancelled.insert(id, kind);
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

    /// The answer as the SDK reads it; `None` if nothing waits for it. One that may be part of a log counts only if it has the
    /// id of a request.
    ///
    /// # Errors
    /// The answer belongs to no request although requests are pending.
    pub fn match_answer(
        &mut self,
        answer: Answer,
        may_be_log: bool,
    ) -> Result<Option<ServerJsonRpcMessage>, String> {
        let digest = answer.digest();
        let id = answer.request_number();
        if let Some((id, kind)) = id.and_then(|id| Some((id, self.pending.remove(&id)?))) {
            self.answered.push_back(digest);
            if self.answered.len() > MAX_ANSWERED {
                self.answered.pop_front();
            }
            return Ok(Some(answer.into_message(RequestId::Number(id), kind)));
        }
        let is_late = id.is_some_and(|id| self.cancelled.remove(&id).is_some());
        let is_repeated = self.answered.contains(&digest);
        match is_late || is_repeated || may_be_log || self.pending.is_empty() {
            true => Ok(None),
            false => Err(answer.describe_mismatch(None)),
        }
    }
}

fn number(id: &RequestId) -> Option<i64> {
    match id {
        RequestId::Number(number) => Some(*number),
        RequestId::String(text) => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::PendingRequests;
    use crate::tools::mcp::message::{Message, read};

    fn track_sent(requests: &mut PendingRequests, message: Value) {
        requests.track_sent(&serde_json::from_value(message).expect("a message"));
    }

    /// Whether the message is an answer that a request waits for.
    fn matches(requests: &mut PendingRequests, message: Value) -> Result<bool, String> {
        match read(message).pop() {
            Some(Message::Answer(answer)) => {
                let may_be_log = !answer.is_marked;
                Ok(requests.match_answer(answer, may_be_log)?.is_some())
            }
            _ => panic!("no answer"),
        }
    }

    fn result(id: Value) -> Value {
        json!({"jsonrpc": "2.0", "id": id, "result": {}})
    }

    #[test]
    fn an_answer_must_match_a_pending_or_cancelled_request() {
        let mut requests = PendingRequests::default();
        assert_eq!(
            matches(&mut requests, result(json!(9))),
            Ok(false),
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
        assert_eq!(matches(&mut requests, result(json!("1"))), Ok(true));
        assert_eq!(matches(&mut requests, result(json!(2))), Ok(false));
        assert_eq!(
            matches(&mut requests, result(json!("1"))),
            Ok(false),
            "the same answer again"
        );
        for (id, shown) in [
            (json!(1), "1"),
            (json!(99), "99"),
            (json!("x"), "x"),
            (json!(true), "true"),
            (json!([3]), "[3]"),
            (json!(3.5), "3.5"),
            (json!(null), "null"),
        ] {
            let wrong = matches(&mut requests, result(id)).expect_err("for no request");
            let expected = format!("it answered with the id {shown}, which no request has");
            assert_eq!(wrong, expected);
        }
        let error = json!({"jsonrpc": "2.0", "error": {"code": -32700, "message": "Parse error"}});
        assert_eq!(
            matches(&mut requests, error).expect_err("no id"),
            "it answered with the id null, which no request has: Parse error"
        );
        let log = json!({"level": "error", "error": "not found"});
        assert_eq!(matches(&mut requests, log), Ok(false), "a line of a log");
        let unmarked = json!({"id": 3.0, "result": {}, "error": null});
        assert_eq!(matches(&mut requests, unmarked), Ok(true));
    }
}
