//! Removes the reasoning of earlier replies if it must not be sent back. Pure.

use crate::domain::message::Message;
use crate::providers::openai_chat::echo_payload;

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
