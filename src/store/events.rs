//! The contract for event logs: each tree of runs has one, with numbered events.

use futures_util::future::BoxFuture;

use crate::domain::event::StoredEvent;
use crate::domain::run::RunId;
use crate::store::StoreError;

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
