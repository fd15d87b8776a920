//! The bytes of a conversation's images and files.

use std::collections::BTreeSet;

use crate::domain::attachment::Blobs;
use crate::domain::message::Message;
use crate::engine::context::Engine;
use crate::store::StoreError;

/// The bytes of these messages' images and files, which are in memory only during a request; `None` if there are none.
pub async fn load(engine: &Engine, messages: &[Message]) -> Result<Option<Blobs>, StoreError> {
    let digests = messages.iter().flat_map(Message::attachments);
    let digests: BTreeSet<_> = digests.map(|attachment| attachment.sha256).collect();
    if digests.is_empty() {
        return Ok(None);
    }
    let digests = digests.into_iter().collect();
    let blobs = engine.journal.store().blobs(digests).await?;
    Ok(Some(blobs))
}
