//! Requests of turns: decodes those of a run, one after the other, and encodes them for another run. Texts that the requests
//! share with other runs are read by the caller.

use std::collections::HashMap;
use std::sync::Arc;

use crate::domain::attachment::{Blobs, Digest};
use crate::domain::message::AssistantMessage;
use crate::domain::request_head::RequestHead;
use crate::domain::run::RunId;
use crate::record::entry::{Entry, RecordedEntry};
use crate::store::StoreError;
use crate::store::body_pieces::TextKey;
use crate::store::request_delta::{self, RecordedText};
use crate::store::turn_record::{SharedText, StoredRequest, TurnEntry};
use crate::store::turns::MAX_DIFFERENCES;

type StoreResult<T> = Result<T, StoreError>;

pub fn damaged(run: RunId) -> StoreError {
    StoreError::Corrupt(format!("a turn of {run} cannot be read"))
}

/// The reply of a turn.
pub fn reply(entries: Vec<RecordedEntry>, of: u32) -> Option<AssistantMessage> {
    entries.into_iter().find_map(|it| match it.entry {
        Entry::Replied { turn, message, .. } if turn == of => Some(message),
        _ => None,
    })
}

/// Decodes the requests of a run, one after the other.
pub struct RequestDecoder {
    run: RunId,
    texts: HashMap<TextKey, String>,
    head: Option<Arc<RequestHead>>,
    /// The body of the last request.
    pub body: Vec<u8>,
    /// The last shared text that a body referred to.
    pub shared_text: Option<Arc<SharedText>>,
}

impl RequestDecoder {
    /// `blobs` are the pictures and files of the entries.
    pub fn new(run: RunId, entries: &[RecordedEntry], blobs: &Blobs) -> Self {
        let mut texts = request_delta::texts_by_key(entries);
        let attachments = request_delta::attachment_texts(blobs);
        texts.extend(attachments.map(|it| (it.key, it.text)));
        Self {
            run,
            texts,
            head: None,
            body: Vec::new(),
            shared_text: None,
        }
    }

    /// The shared texts that the turn's request refers to, and that no earlier one did. They are to be added before
    /// [`RequestDecoder::next`].
    pub fn missing_texts(&self, entry: &TurnEntry) -> StoreResult<Vec<Digest>> {
        let Some(request) = &entry.request else {
            return Ok(Vec::new());
        };
        let mut digests =
            request_delta::shared_digests(&request.body).ok_or_else(|| damaged(self.run))?;
        digests.retain(|digest| !self.texts.contains_key(&TextKey::Shared(*digest)));
        Ok(digests)
    }

    /// Adds a shared text; `None` if it is not stored.
    pub fn add_shared(&mut self, digest: Digest, text: Option<Arc<str>>) -> StoreResult<()> {
        let text = text.ok_or_else(|| damaged(self.run))?;
        let key = TextKey::Shared(digest);
        self.texts.insert(key, text.to_string());
        self.shared_text = Some(Arc::new(SharedText { digest, text }));
        Ok(())
    }

    /// Decodes the turn's request, if it has one, and returns its head.
    pub fn next(&mut self, entry: &TurnEntry) -> StoreResult<Option<Arc<RequestHead>>> {
        let Some(request) = &entry.request else {
            return Ok(None);
        };
        let body = request_delta::decode(&request.body, Some(&self.body), &self.texts)
            .filter(|body| {
                entry.record.is_redacted || entry.record.request_bytes == Some(body.len() as u64)
            })
            .ok_or_else(|| damaged(self.run))?;
        self.body = body;
        self.head = request.head.clone().or_else(|| self.head.take());
        let head = self.head.clone().ok_or_else(|| damaged(self.run))?;
        Ok(Some(head))
    }
}

/// Encodes requests for another run.
pub struct CopyEncoder {
    texts: Vec<RecordedText>,
    previous: Option<(Arc<RequestHead>, Vec<u8>)>,
    differences: u32,
}

impl CopyEncoder {
    /// For a run whose record begins with these entries; `blobs` are their pictures and files.
    pub fn new(entries: &[RecordedEntry], blobs: &Blobs) -> Self {
        let mut texts: Vec<_> = entries
            .iter()
            .flat_map(|it| request_delta::entry_texts(&it.entry))
            .collect();
        texts.extend(request_delta::attachment_texts(blobs));
        Self {
            texts,
            previous: None,
            differences: 0,
        }
    }

    /// The entry with the request that the decoder has just decoded, marked as copied.
    pub fn copy(
        &mut self,
        mut entry: TurnEntry,
        head: Option<Arc<RequestHead>>,
        decoder: &RequestDecoder,
    ) -> TurnEntry {
        if let Some(head) = head {
            let shared = decoder.shared_text.as_ref();
            let turn = entry.record.turn;
            entry.request = Some(self.encode(turn, &head, &decoder.body, shared));
        }
        entry.record.is_copied = true;
        entry
    }

    fn encode(
        &mut self,
        turn: u32,
        head: &Arc<RequestHead>,
        body: &[u8],
        shared_text: Option<&Arc<SharedText>>,
    ) -> StoredRequest {
        let is_whole = self.differences >= MAX_DIFFERENCES;
        let previous = self.previous.take();
        let is_same_head = previous
            .as_ref()
            .is_some_and(|(previous, _)| previous == head);
        let previous = previous.filter(|_| !is_whole).map(|(_, body)| body);
        self.differences = previous.as_ref().map_or(0, |_| self.differences + 1);
        // The others are in the previous request already.
        let texts = self.texts.iter().filter(|text| match text.key.turn() {
            Some(of) => previous.is_none() || of + 2 >= turn,
            None => true,
        });
        let shared_text = shared_text.filter(|_| previous.is_none());
        let shared: Option<RecordedText> = shared_text.map(|it| (&**it).into());
        let texts = shared.iter().chain(texts);
        let delta = request_delta::encode(previous.as_deref(), body, texts);
        self.previous = Some((Arc::clone(head), body.to_vec()));
        StoredRequest {
            head: (!is_same_head).then(|| Arc::clone(head)),
            body: delta,
            shared_text: shared_text.cloned(),
        }
    }
}
