//! Which requests a process still has to answer: an answer that belongs to none of them ends the connection at once,
//! because the request that it was meant for would wait on. Pure.

use std::collections::BTreeSet;

use rmcp::RoleClient;
use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};

use crate::domain::message::shorten;

/// Cancelled requests whose late answers are still known as such.
const MAX_CANCELLED: usize = 1024;

/// The ids of requests that were sent.
#[derive(Default)]
pub struct Requests {
    waiting: BTreeSet<i64>,
    cancelled: BTreeSet<i64>,
}

impl Requests {
    /// Keeps the id of a request, or that it was cancelled.
    pub fn sent(&mut self, message: &TxJsonRpcMessage<RoleClient>) {
        match message {
            JsonRpcMessage::Request(request) => {
                self.waiting.extend(number(&request.id));
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
                if self.waiting.remove(&id) {
                    self.cancelled.insert(id);
                }
                if self.cancelled.len() > MAX_CANCELLED {
                    self.cancelled.pop_first();
                }
            }
            _ => {}
        }
    }

    /// Checks whose answer a message is.
    ///
    /// # Errors
    /// It belongs to no request although there are some that wait for an answer.
    pub fn received(&mut self, message: &RxJsonRpcMessage<RoleClient>) -> Result<(), String> {
        let (id, error) = match message {
            JsonRpcMessage::Response(response) => (Some(&response.id), None),
            JsonRpcMessage::Error(error) => (error.id.as_ref(), Some(&error.error.message)),
            _ => return Ok(()),
        };
        let known = id
            .and_then(number)
            .is_some_and(|id| self.waiting.remove(&id) || self.cancelled.remove(&id));
        if known || self.waiting.is_empty() {
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

/// Our ids are numbers; some servers send them back as texts.
fn number(id: &RequestId) -> Option<i64> {
    match id {
        RequestId::Number(number) => Some(*number),
        RequestId::String(text) => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Requests;

    fn sent(requests: &mut Requests, message: Value) {
        requests.sent(&serde_json::from_value(message).expect("a message"));
    }

    fn received(requests: &mut Requests, id: Value) -> Result<(), String> {
        let message = json!({"jsonrpc": "2.0", "id": id, "result": {}});
        requests.received(&serde_json::from_value(message).expect("a message"))
    }

    #[test]
    fn an_answer_belongs_to_a_request_that_waits_or_was_cancelled() {
        let mut requests = Requests::default();
        assert_eq!(received(&mut requests, json!(9)), Ok(()), "nobody waits");
        for id in 1..=3 {
            sent(
                &mut requests,
                json!({"jsonrpc": "2.0", "id": id, "method": "ping"}),
            );
        }
        sent(
            &mut requests,
            json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}),
        );
        assert_eq!(received(&mut requests, json!("1")), Ok(()));
        assert_eq!(received(&mut requests, json!(2)), Ok(()));
        let wrong = received(&mut requests, json!(1)).expect_err("answered already");
        assert_eq!(wrong, "it answered with the id 1, which no request has");
        let error = json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "Parse error"}});
        let error = serde_json::from_value(error).expect("a message");
        assert_eq!(
            requests.received(&error).expect_err("whose?"),
            "it answered with the id null, which no request has: Parse error"
        );
        assert_eq!(received(&mut requests, json!(3)), Ok(()));
    }
}
