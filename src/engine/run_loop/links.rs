//! Images and files that a request names by URL. They are fetched once, before the first turn, and recorded.

use std::sync::Arc;

use crate::domain::attachment::Attachment;
use crate::domain::content::{AttachmentLink, Content, Part};
use crate::domain::message::Message;
use crate::engine::context::Engine;
use crate::engine::state::prompt::RunInput;
use crate::ssrf;

pub fn has_links(input: &RunInput) -> bool {
    let earlier = input.earlier.iter().any(|message| match message {
        Message::User { content } => content.links().next().is_some(),
        Message::Assistant(_) | Message::Tool { .. } => false,
    });
    earlier || input.message.links().next().is_some()
}

/// Replaces the URLs by the bytes, in their order.
///
/// # Errors
///
/// Names the URL that failed and why, without its query, which may contain a secret.
pub async fn fetch(
    engine: &Arc<Engine>,
    key: Option<&str>,
    input: &mut RunInput,
) -> Result<(), String> {
    let earlier = input
        .earlier
        .iter_mut()
        .filter_map(|message| match message {
            Message::User { content } => Some(content),
            Message::Assistant(_) | Message::Tool { .. } => None,
        });
    for content in earlier.chain([&mut input.message]) {
        let Content::Parts(parts) = content else {
            continue;
        };
        for part in parts {
            if let Part::Link(link) = part {
                let fetched = fetch_link(engine, key, link).await;
                let redacted_url = ssrf::redact_query(&link.url);
                *part = fetched.map_err(|why| format!("could not fetch {redacted_url}: {why}"))?;
            }
        }
    }
    Ok(())
}

async fn fetch_link(
    engine: &Engine,
    key: Option<&str>,
    link: &AttachmentLink,
) -> Result<Part, String> {
    let data = engine
        .tool_registry
        .downloader()?
        .download(&link.url, key)
        .await?;
    // Its type is that of its bytes, whatever the request declares.
    let attachment = Attachment::from_bytes(data, link.name.clone());
    let attachment = attachment.ok_or_else(|| "it is of no kind that is taken".to_owned())?;
    Ok(Part::from(attachment))
}
