//! The turns of a run that are not recorded yet, and what the record of the next one refers to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::domain::request_head::RequestHead;
use crate::record::entry::Entry;
use crate::store::request_delta::{self, RecordedText};
use crate::store::turn_record::TurnEntry;

/// Smaller bodies are always kept for the next turn.
const MAX_SMALL_BODY: usize = 256 << 10;
const MAX_LARGE_BODIES_KIB: usize = 32 << 10;

#[derive(Debug, Default)]
pub struct TurnLog(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_on: bool,
    has_new_steps: bool,
    new_texts: Vec<RecordedText>,
    /// Those that the previous request may have been the first to contain.
    last_texts: Vec<RecordedText>,
    previous: Option<PreviousRequest>,
    unrecorded: Vec<TurnEntry>,
}

/// How much memory all runs together have for large bodies of requests: 32 MiB.
#[derive(Debug)]
pub struct LargeBodies(Arc<Semaphore>);

impl Default for LargeBodies {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LARGE_BODIES_KIB)))
    }
}

/// The body of a request that is kept until the next one is recorded.
#[derive(Debug)]
pub struct KeptBody {
    pub body: Bytes,
    /// Its share of the memory for large bodies.
    _permit: Option<OwnedSemaphorePermit>,
}

impl LargeBodies {
    /// `None` if the body is large and there is no space for it: it is read from the store again.
    pub fn keep(&self, body: Bytes) -> Option<KeptBody> {
        let permit = match body.len() <= MAX_SMALL_BODY {
            true => None,
            false => {
                let kib = u32::try_from(body.len() / 1024).ok()?;
                Some(Arc::clone(&self.0).try_acquire_many_owned(kib).ok()?)
            }
        };
        Some(KeptBody {
            body,
            _permit: permit,
        })
    }
}

/// The last request of the run that was recorded.
#[derive(Debug)]
pub struct PreviousRequest {
    pub turn: u32,
    pub head: Arc<RequestHead>,
    /// `None` if it has to be read from the store.
    pub body: Option<KeptBody>,
    /// How many requests were recorded as differences since the last one that was recorded whole.
    pub differences: u32,
}

/// What a run recorded since its previous request.
#[derive(Debug)]
pub struct News {
    pub previous: Option<PreviousRequest>,
    /// Whether there were steps, even if none has a text that is long enough for a reference.
    pub has_steps: bool,
    /// The texts since the request before the previous one: the marks of a provider's cache move from message to message, so
    /// that the new request may differ from the previous one before the newest texts.
    pub texts: Vec<RecordedText>,
}

impl TurnLog {
    /// Called before the first step, if requests are to be recorded.
    pub fn turn_on(&self) {
        self.lock().is_on = true;
    }

    /// The texts of these entries are likely to be in the next request.
    pub fn add_entries<'a>(&self, entries: impl IntoIterator<Item = &'a Entry>) {
        let mut state = self.lock();
        if state.is_on {
            for entry in entries.into_iter().filter(|it| it.is_step()) {
                state.has_new_steps = true;
                state.new_texts.extend(request_delta::entry_texts(entry));
            }
        }
    }

    pub fn take_news(&self) -> News {
        let mut state = self.lock();
        let new_texts = std::mem::take(&mut state.new_texts);
        let mut texts = std::mem::replace(&mut state.last_texts, new_texts.clone());
        texts.extend(new_texts);
        News {
            previous: state.previous.take(),
            has_steps: std::mem::take(&mut state.has_new_steps),
            texts,
        }
    }

    pub fn set_previous(&self, previous: PreviousRequest) {
        self.lock().previous = Some(previous);
    }

    /// The next write of the run records the turn.
    pub fn add(&self, turn: TurnEntry) {
        self.lock().unrecorded.push(turn);
    }

    /// The last turn that is not recorded, unless it is large.
    pub fn last_unrecorded(&self) -> Option<TurnEntry> {
        let is_small = |entry: &&TurnEntry| {
            let request = entry.request.as_ref();
            request.is_none_or(|it| it.body.pieces.len() <= MAX_SMALL_BODY)
        };
        self.lock().unrecorded.last().filter(is_small).cloned()
    }

    pub fn take_unrecorded(&self) -> Vec<TurnEntry> {
        std::mem::take(&mut self.lock().unrecorded)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_bodies_are_kept_while_there_is_space() {
        let bodies = LargeBodies::default();
        let body = |mib: usize| Bytes::from(vec![b'x'; mib << 20]);
        let first = bodies.keep(body(20)).expect("space");
        assert!(bodies.keep(body(20)).is_none(), "40 MiB are too much");
        assert!(bodies.keep(Bytes::from_static(b"{}")).is_some());
        drop(first);
        assert_eq!(bodies.keep(body(20)).expect("space").body.len(), 20 << 20);
    }
}
