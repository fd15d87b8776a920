//! The turns of a run that are not recorded yet, and what the record of the next one refers to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::domain::request_head::RequestHead;
use crate::store::Step;
use crate::store::request_delta::{self, RecordedText};
use crate::store::turn_record::TurnEntry;

/// A larger body is read from the store again when the next turn is recorded, so that waiting runs do not hold it.
const MAX_KEPT_BODY: usize = 256 << 10;

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

/// The last request of the run that was recorded.
#[derive(Clone, Debug)]
pub struct PreviousRequest {
    pub turn: u32,
    pub head: Arc<RequestHead>,
    /// `None` if it is large.
    pub body: Option<Bytes>,
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

    /// The texts of these steps are likely to be in the next request.
    pub fn add_steps(&self, steps: &[Step]) {
        let mut state = self.lock();
        if state.is_on {
            state.has_new_steps |= !steps.is_empty();
            let texts = steps.iter().flat_map(request_delta::step_texts);
            state.new_texts.extend(texts);
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

    pub fn set_previous(&self, mut previous: PreviousRequest) {
        previous.body = previous.body.filter(|body| body.len() <= MAX_KEPT_BODY);
        self.lock().previous = Some(previous);
    }

    /// The next write of the run records the turn.
    pub fn add(&self, turn: TurnEntry) {
        self.lock().unrecorded.push(turn);
    }

    pub fn take_unrecorded(&self) -> Vec<TurnEntry> {
        std::mem::take(&mut self.lock().unrecorded)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
