//! The messages of a run as the history of a task: what users and the agent wrote, without tool calls and their results.

use crate::web::clients::a2a::types::{Message, Part, PartContent, Role};
use serde_json::json;

use crate::domain::content::{self, Content};
use crate::domain::message::Message as RunMessage;
use crate::domain::run::Run;
use crate::engine::history::RecordedConversation;
use crate::record::entry::Entry;
use crate::store::runs::PAGE_BYTES;
use crate::web::clients::a2a::context::context_id;

/// The newest messages of the run, at most `most`, oldest first. Ends before the message that exceeds the size of a page.
pub fn messages(run: &Run, mut steps: Vec<Entry>, most: Option<usize>) -> Vec<Message> {
    for step in &mut steps {
        if let Entry::Prompted { earlier, .. } = step {
            // Those are of earlier tasks of the context.
            earlier.clear();
        }
    }
    let recorded = RecordedConversation::from_steps(steps);
    let messages = recorded.messages.into_iter().enumerate();
    let shown = messages.filter_map(|(at, message)| to_message(run, at, message));
    let mut shown: Vec<Message> = shown.collect();
    let (mut bytes, mut count) = (0, 0);
    for message in shown.iter().rev().take(most.unwrap_or(usize::MAX)) {
        bytes += message.parts.iter().map(Part::text_bytes).sum::<usize>();
        if bytes > PAGE_BYTES && count > 0 {
            break;
        }
        count += 1;
    }
    shown.split_off(shown.len() - count)
}

fn to_message(run: &Run, at: usize, message: RunMessage) -> Option<Message> {
    let (role, parts) = match message {
        RunMessage::User { content } => (Role::User, content_parts(content)),
        RunMessage::Assistant(reply) if !reply.content.is_empty() => {
            (Role::Agent, vec![Part::text(reply.content)])
        }
        RunMessage::Assistant(_) | RunMessage::Tool { .. } => return None,
    };
    Some(Message {
        message_id: format!("{}-{at}", run.id),
        context_id: context_id(run),
        task_id: run.id.to_string(),
        role,
        parts,
    })
}

fn content_parts(content: Content) -> Vec<Part> {
    match content {
        Content::Text(text) => vec![Part::text(text)],
        Content::Parts(parts) => parts.into_iter().map(to_part).collect(),
    }
}

/// An attachment is shown by its digest and size: its bytes may be many.
fn to_part(part: content::Part) -> Part {
    match part {
        content::Part::Text { text } => Part::text(text),
        content::Part::Link(link) => Part {
            content: PartContent::Url(link.url),
            filename: link.name,
            media_type: link.media_type.map(|it| it.as_str().to_owned()),
        },
        content::Part::Image(attachment) | content::Part::File(attachment) => Part {
            content: PartContent::Data(json!({
                "sha256": attachment.sha256,
                "bytes": attachment.bytes,
                "mediaType": attachment.media_type,
            })),
            filename: attachment.name,
            media_type: None,
        },
    }
}
