//! Pictures and files that a request names by URL: fetched once, before the first turn, and recorded in their place.

use std::sync::Arc;

use crate::domain::attachment::Attachment;
use crate::domain::content::{Content, Link, Part};
use crate::domain::message::Message;
use crate::engine::parts::Engine;
use crate::engine::resolve::Input;
use crate::net;

/// Whether something is still to be fetched.
pub fn has_links(input: &Input) -> bool {
    let earlier = input.earlier.iter().any(|message| match message {
        Message::User { content } => content.links().next().is_some(),
        Message::Assistant(_) | Message::Tool { .. } => false,
    });
    earlier || input.message.links().next().is_some()
}

/// Puts the bytes in the places of the URLs, in their order.
///
/// # Errors
/// Which URL could not be had and why, without its query, which may hold a secret.
pub async fn fetch(
    engine: &Arc<Engine>,
    key: Option<&str>,
    input: &mut Input,
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
                let fetched = fetch_one(engine, key, link).await;
                let shown = net::shown(&link.url);
                *part = fetched.map_err(|why| format!("could not fetch {shown}: {why}"))?;
            }
        }
    }
    Ok(())
}

async fn fetch_one(engine: &Engine, key: Option<&str>, link: &Link) -> Result<Part, String> {
    let data = engine.shelf.downloads()?.get(&link.url, key).await?;
    let Some(attachment) = Attachment::of(data, link.name.clone()) else {
        return Err("it is of no kind that is taken".to_owned());
    };
    let is = attachment.media_type;
    if link.media_type.is_some_and(|stated| stated != is) || link.is_image != is.is_image() {
        return Err(format!("it is {is}, and the request says otherwise"));
    }
    Ok(Part::from(attachment))
}
