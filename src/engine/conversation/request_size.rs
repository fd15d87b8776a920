//! Estimates how large a request is, at four bytes a token. Pure.

use crate::config::models::ModelFacts;
use crate::config::models::lookup::Models;
use crate::domain::agent::Agent;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::attachment::Attachment;
use crate::domain::content::estimate_tokens;
use crate::domain::message::{Message, ToolResult, ToolSpec};

const BYTES_PER_TOKEN: usize = 4;
/// What surrounds a message, a call or a result on every wire: a role, an id, a type.
const FRAME_BYTES: usize = 16;
/// The text that replaces an image or a file, without its name.
const PLACEHOLDER_BYTES: usize = 96;

/// The attachments that requests contain. A short text replaces the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentAttachments {
    pub images: bool,
    pub pdf: bool,
}

impl SentAttachments {
    pub const ALL: Self = Self {
        images: true,
        pdf: true,
    };

    /// Those that the model may accept.
    pub fn for_model(facts: Option<&ModelFacts>) -> Self {
        let may_accept = |flag: Option<bool>| flag != Some(false);
        Self {
            images: may_accept(facts.and_then(|it| it.images)),
            pdf: may_accept(facts.and_then(|it| it.pdf)),
        }
    }

    /// Those that the agent's model or one of its fallbacks may accept.
    pub fn for_agent(models: &Models, agent: &Agent) -> Self {
        let all = std::iter::once(&agent.model).chain(&agent.fallback_models);
        let sent =
            all.map(|model| Self::for_model(models.get(&model.provider, &model.model).as_deref()));
        let none = Self {
            images: false,
            pdf: false,
        };
        sent.fold(none, |one, other| Self {
            images: one.images || other.images,
            pdf: one.pdf || other.pdf,
        })
    }

    fn contain(self, attachment: &Attachment) -> bool {
        match attachment.media_type.is_image() {
            true => self.images,
            false => self.pdf,
        }
    }
}

pub fn tokens_from_bytes(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN) as u64
}

pub fn bytes_from_tokens(tokens: u64) -> usize {
    usize::try_from(tokens)
        .unwrap_or(usize::MAX)
        .saturating_mul(BYTES_PER_TOKEN)
}

/// The bytes of the system prompt, the tool definitions and the schema of the reply, which every request of a run has.
pub fn preamble_bytes(system: &str, tools: &[ToolSpec], format: &ResponseFormat) -> usize {
    let schema_bytes = match format {
        ResponseFormat::JsonSchema(schema) => schema.get().len(),
        ResponseFormat::JsonObject | ResponseFormat::Text => 0,
    };
    let tool_bytes = |tool: &ToolSpec| {
        FRAME_BYTES + tool.name.len() + tool.description.len() + tool.parameters.get().len()
    };
    system.len() + schema_bytes + tools.iter().map(tool_bytes).sum::<usize>()
}

pub fn messages_bytes(messages: &[Message], sent: SentAttachments) -> usize {
    let bytes = messages.iter().map(|message| message_bytes(message, sent));
    bytes.sum()
}

pub fn message_bytes(message: &Message, sent: SentAttachments) -> usize {
    let content = match message {
        Message::User { content } => {
            content.text_bytes() + attachment_bytes(content.attachments(), sent)
        }
        Message::Assistant(reply) => {
            let calls = reply.tool_calls.iter();
            let calls = calls.map(|call| {
                FRAME_BYTES + call.id.len() + call.name.len() + call.sent_arguments().len()
            });
            let own_bytes = reply.content.len() + calls.sum::<usize>();
            // On its own wire, the echo is sent in place of the text and the calls.
            let echo_bytes = reply.echo.as_ref().map_or(0, |echo| echo.body.get().len());
            own_bytes.max(echo_bytes)
        }
        Message::Tool { tool_results } => {
            let results = tool_results.iter();
            let results = results.map(|it| FRAME_BYTES + it.call_id.len() + result_bytes(it, sent));
            results.sum()
        }
    };
    FRAME_BYTES + content
}

pub fn result_bytes(result: &ToolResult, sent: SentAttachments) -> usize {
    result.content.len() + attachment_bytes(result.attachments.iter(), sent)
}

/// The bytes that correspond to the estimated tokens of images and files, or of the texts that replace them.
fn attachment_bytes<'a>(
    attachments: impl Iterator<Item = &'a Attachment>,
    sent: SentAttachments,
) -> usize {
    let bytes = attachments.map(|attachment| match sent.contain(attachment) {
        true => estimate_tokens(attachment) * BYTES_PER_TOKEN,
        false => PLACEHOLDER_BYTES + attachment.name.as_ref().map_or(0, String::len),
    });
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{
        SentAttachments, bytes_from_tokens, message_bytes, messages_bytes, preamble_bytes,
        tokens_from_bytes,
    };
    use crate::config::models::ModelFacts;
    use crate::domain::agent::response_format::ResponseFormat;
    use crate::domain::attachment::Attachment;
    use crate::domain::content::Content;
    use crate::domain::message::{
        AssistantMessage, Echo, Message, ToolCall, ToolResult, ToolSpec, empty_arguments,
    };

    #[test]
    fn tokens_are_rounded_up() {
        assert_eq!([0, 1, 4, 5].map(tokens_from_bytes), [0, 1, 1, 2]);
        assert_eq!(bytes_from_tokens(2), 8);
        assert_eq!(bytes_from_tokens(u64::MAX), usize::MAX);
    }

    #[test]
    fn all_sent_parts_count() {
        let user = Message::user("12345");
        assert_eq!(message_bytes(&user, SentAttachments::ALL), 21);
        let call = ToolCall {
            id: "id".to_owned(),
            provider_id: String::new(),
            name: "read".to_owned(),
            arguments: empty_arguments(),
            invalid_arguments: None,
        };
        let mut reply = AssistantMessage {
            content: "text".to_owned(),
            tool_calls: vec![call],
            echo: None,
        };
        assert_eq!(
            message_bytes(&Message::Assistant(reply.clone()), SentAttachments::ALL),
            44
        );
        let body = serde_json::value::to_raw_value(&"x".repeat(98)).expect("JSON");
        reply.echo = Some(Echo {
            wire: "anthropic".to_owned(),
            body: body.into(),
            prefix: 0,
        });
        let reply = Message::Assistant(reply);
        assert_eq!(message_bytes(&reply, SentAttachments::ALL), 116);
        let result = Message::Tool {
            tool_results: vec![ToolResult::text("id", "found", false)],
        };
        assert_eq!(message_bytes(&result, SentAttachments::ALL), 39);
        assert_eq!(
            messages_bytes(&[user, reply, result], SentAttachments::ALL),
            176
        );
        let tool = ToolSpec::new("read", "Reads", &empty_arguments());
        let bytes = |format| preamble_bytes("Be brief", std::slice::from_ref(&tool), &format);
        assert_eq!(bytes(ResponseFormat::Text), 35);
        let schema = serde_json::value::to_raw_value(&true).expect("JSON");
        assert_eq!(bytes(ResponseFormat::JsonSchema(schema.into())), 39);
    }

    #[test]
    fn attachments_that_are_left_out_count_as_their_placeholders() {
        let sent = |images, pdf| {
            let facts = ModelFacts {
                images,
                pdf,
                ..ModelFacts::default()
            };
            SentAttachments::for_model(Some(&facts))
        };
        for (data, without) in [
            (&b"\xff\xd8\xff!"[..], sent(Some(false), Some(true))),
            (&b"%PDF-1.7"[..], sent(None, Some(false))),
        ] {
            let attachment = Attachment::from_bytes(Bytes::from_static(data), None);
            let attachment = attachment.expect("an image or a file");
            let message = Message::user(Content::Parts(vec![attachment.into()]));
            assert!(message_bytes(&message, SentAttachments::for_model(None)) > 6000);
            assert!(message_bytes(&message, without) < 200);
        }
    }
}
