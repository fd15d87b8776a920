//! The contract for event logs: each tree of runs has one, with numbered events.

use futures_util::future::BoxFuture;

use crate::domain::event::{Event, StoredEvent};
use crate::domain::run::RunId;
use crate::store::StoreError;

/// The events of a page of [`EventPages`].
const PAGE_SIZE: usize = 1000;

/// Called with the root and the events of every committed write, in the order of the commits, on the store's own thread. It
/// must not block.
pub type PublishFn = Box<dyn Fn(RunId, Vec<StoredEvent>) + Send + Sync>;

/// Whether the events of this root have a subscriber. If not, they are not rendered for [`PublishFn`].
pub type HasSubscribersFn = Box<dyn Fn(RunId) -> bool + Send + Sync>;

pub trait EventLog: Send + Sync + 'static {
    /// Events after a number, in order.
    fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>>;
}

/// Selects the events of a page.
#[derive(Clone, Copy, Debug)]
pub struct EventQuery {
    /// The root whose log is read.
    pub root: RunId,
    /// Only events of this run and its descendants; the root for the whole log.
    pub run: RunId,
    pub exclude_descendants: bool,
    /// Only events with a greater number.
    pub after: u64,
    /// The page ends with the write that reaches this number of events.
    pub limit: usize,
}

/// Reads an event as it was written.
///
/// # Errors
/// [`StoreError::Corrupt`] if it is not what was written.
pub fn recorded(event: &StoredEvent) -> Result<Event, StoreError> {
    event.read().map_err(|error| {
        let StoredEvent {
            seq, run_id, name, ..
        } = event;
        StoreError::Corrupt(format!(
            "event {seq} of {run_id}, {name}, could not be read: {error}"
        ))
    })
}

/// Reads a log page by page.
pub struct EventPages<'a> {
    log: &'a dyn EventLog,
    query: EventQuery,
    is_at_end: bool,
}

impl<'a> EventPages<'a> {
    /// The log of a whole tree, from its beginning.
    pub fn of_tree(log: &'a dyn EventLog, root: RunId) -> Self {
        Self::new(log, root, root, false)
    }

    /// The events of one run, without those of its descendants, from its beginning.
    pub fn of_run(log: &'a dyn EventLog, root: RunId, run: RunId) -> Self {
        Self::new(log, root, run, true)
    }

    fn new(log: &'a dyn EventLog, root: RunId, run: RunId, exclude_descendants: bool) -> Self {
        let query = EventQuery {
            root,
            run,
            exclude_descendants,
            after: 0,
            limit: PAGE_SIZE,
        };
        Self {
            log,
            query,
            is_at_end: false,
        }
    }

    /// Only events with a greater number.
    pub fn after(mut self, event: u64) -> Self {
        self.query.after = event;
        self
    }

    /// Whether the last page was read.
    pub fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// The next page; `None` after the last one. A page is never empty.
    pub async fn next(&mut self) -> Result<Option<Vec<StoredEvent>>, StoreError> {
        if self.is_at_end {
            return Ok(None);
        }
        let page = self.log.events(self.query).await?;
        self.is_at_end = page.len() < self.query.limit;
        let Some(last) = page.last() else {
            return Ok(None);
        };
        self.query.after = last.seq;
        Ok(Some(page))
    }
}
