//! Drops the thinking of earlier replies where it may not go back. Pure.

use crate::domain::message::Message;
use crate::providers::openai_chat::echo_payload;

/// Drops the thinking of these messages, because what stands before it is not what the model saw: providers check that.
/// What a service refuses a tool call without stays.
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
