//! The event log of a tree as Server-Sent Events (HTML standard), for one client.
//!
//! The store is authoritative: if published events may have been lost, the stream reads the store again.

use std::collections::HashSet;
use std::fmt::Write;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::domain::event::{EventName, LiveEvent, StoredEvent};
use crate::domain::run::{Run, RunId};
use crate::engine::state::broadcaster::Subscription;
use crate::store::StoreError;
use crate::store::events::EventQuery;
use crate::telemetry::metrics::SseClientGuard;
use crate::web::response::event_scope::EventScope;
use crate::web::response::stream_driver::{COMMENT, Projection, Read, StreamDriver};
use crate::web::state::AppState;

/// The reconnection time in milliseconds. It is sent within the first event's block, because some clients take every block
/// for an event; and as the last bytes of a stream that the daemon closes.
const RETRY_LINE: &str = "retry: 2000\n";
/// The time between two attempts to read a store that fails.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Events that are read from the store at once.
pub const PAGE_SIZE: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The store may have more events.
    Replaying,
    /// All committed events are sent; the next ones come from the subscription.
    Live,
    /// The stream ends.
    Done,
}

/// A client's event stream.
pub struct EventStream {
    closing: CancellationToken,
    is_subscribed: bool,
    root: RunId,
    run_id: RunId,
    scope: EventScope,
    /// The number of the last event that the client has.
    cursor: u64,
    /// Whether the run has ended, so that the store has all its events.
    has_ended: bool,
    phase: Phase,
    frames: String,
    /// Whether a comment has to be sent because no event is sure to be sent at once.
    needs_first_byte: bool,
    /// Whether [`RETRY_LINE`] has not been sent yet.
    needs_retry_line: bool,
    /// Whether the run is read before the next page, in case the publication of its end was lost.
    needs_status: bool,
    /// Whether the last read of the store failed.
    is_store_failing: bool,
    page_size: usize,
    /// For log lines, as `depth`.
    agent: String,
    depth: u8,
    /// Counts the stream while it lasts.
    client: Option<SseClientGuard>,
}

/// The next page of the log.
pub struct PageQuery {
    query: EventQuery,
    needs_status: bool,
    needs_subtree: bool,
    /// `None` if the store works.
    pause_unless: Option<CancellationToken>,
}

pub struct Page {
    events: Vec<StoredEvent>,
    has_ended: bool,
    /// `None` if they are known.
    subtree: Option<HashSet<RunId>>,
}

impl EventStream {
    /// The stored events after number `after`; `run_only` excludes the descendants.
    pub fn new(run: &Run, run_only: bool, after: u64, closing: CancellationToken) -> Self {
        Self {
            closing,
            is_subscribed: false,
            root: run.root_id,
            run_id: run.id,
            scope: EventScope::new(run, run_only),
            cursor: after,
            has_ended: false,
            phase: Phase::Replaying,
            frames: String::new(),
            needs_first_byte: true,
            needs_retry_line: true,
            needs_status: false,
            is_store_failing: false,
            page_size: PAGE_SIZE,
            agent: run.agent.clone(),
            depth: run.depth.0,
            client: None,
        }
    }

    /// For a subscription that began before the log's first event: the store is read only if it lags.
    pub fn from_start(mut self) -> Self {
        self.phase = Phase::Live;
        self.needs_first_byte = false;
        self
    }

    /// Without a subscription, the stream ends with the last stored event.
    pub fn drive(
        mut self,
        state: &AppState,
        subscription: Option<Subscription>,
    ) -> StreamDriver<Self> {
        self.is_subscribed = subscription.is_some();
        self.client = Some(state.runner.metrics().track_sse_client());
        let closing = self.closing.clone().cancelled_owned();
        StreamDriver::new(state, self, subscription, closing)
    }

    fn on_page(&mut self, page: Page) {
        self.is_store_failing = false;
        self.has_ended |= page.has_ended;
        if page.subtree.is_some() {
            self.scope = EventScope::Subtree(page.subtree);
        }
        for event in &page.events {
            self.write_event(event);
        }
        if std::mem::take(&mut self.needs_first_byte) && self.frames.is_empty() {
            self.frames.push_str(COMMENT);
        }
        // Events that are committed after a page that is not full are published; reading again would overtake live deltas.
        if page.events.len() < self.page_size && self.phase == Phase::Replaying {
            self.phase = if self.has_ended || !self.is_subscribed {
                Phase::Done
            } else {
                Phase::Live
            };
        }
    }

    fn on_failure(&mut self, error: &StoreError) {
        if !std::mem::replace(&mut self.is_store_failing, true) {
            warn!(
                run.id = %self.run_id, run.root = %self.root, agent = self.agent, depth = self.depth,
                "An event stream of {} pauses: {error}", self.run_id
            );
        }
        if let StoreError::Closed = error {
            // The client reconnects with the number of its last event, so that nothing is lost.
            self.phase = Phase::Done;
        } else {
            self.needs_first_byte = false;
            self.frames.push_str(COMMENT);
        }
    }

    /// Appends one event to the chunk and advances the cursor.
    fn write_event(&mut self, event: &StoredEvent) {
        if self.phase == Phase::Done {
            return;
        }
        self.write_retry_once();
        let StoredEvent {
            seq,
            run_id,
            name,
            data,
        } = event;
        let _ = write!(self.frames, "id: {seq}\nevent: {name}\ndata: {data}\n\n");
        self.cursor = *seq;
        if let EventScope::Subtree(Some(run_ids)) = &mut self.scope {
            run_ids.insert(*run_id);
        }
        if event.ends(self.run_id) {
            self.phase = Phase::Done;
        }
    }

    fn write_retry_once(&mut self) {
        if std::mem::take(&mut self.needs_retry_line) {
            self.frames.push_str(RETRY_LINE);
        }
    }
}

impl Projection for EventStream {
    type End = ();
    type Read = PageQuery;

    fn frames(&mut self) -> &mut String {
        &mut self.frames
    }

    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()> {
        self.has_ended |= event.ends(self.run_id);
        match self.scope {
            EventScope::WholeTree if event.seq == self.cursor + 1 => self.write_event(event),
            EventScope::WholeTree if event.seq <= self.cursor && !self.has_ended => {}
            // A gap: the missing events are in the store.
            EventScope::WholeTree => self.phase = Phase::Replaying,
            // The numbers of a part of the tree have gaps, so the events are read from the store.
            EventScope::Subtree(_) | EventScope::SingleRun(_) => {
                let may_be_new = matches!(self.scope, EventScope::Subtree(_))
                    && event.name == EventName::RunQueued;
                if self.has_ended || may_be_new || self.scope.includes(event.run_id) {
                    self.phase = Phase::Replaying;
                }
            }
        }
        Ok(())
    }

    fn on_live(&mut self, LiveEvent { event, data }: &LiveEvent) {
        if self.scope.includes(event.run_id) {
            self.write_retry_once();
            let name = event.kind.name();
            let _ = write!(self.frames, "event: {name}\ndata: {data}\n\n");
        }
    }

    fn on_lag(&mut self, subscription: &mut Subscription) {
        // Deltas that are still in the channel are older than events that the store has by now.
        *subscription = subscription.resubscribe();
        self.phase = Phase::Replaying;
    }

    fn on_unsubscribed(&mut self) {
        self.is_subscribed = false;
        self.phase = Phase::Replaying;
    }

    /// Reads the run and then the store again, in case a publication was lost.
    fn on_silence(&mut self) {
        self.needs_status = true;
        self.phase = Phase::Replaying;
    }

    fn on_end(&mut self, (): ()) {
        self.frames.push_str(RETRY_LINE);
        self.frames.push('\n');
        self.phase = Phase::Done;
    }

    fn next_read(&mut self) -> Option<PageQuery> {
        if self.phase != Phase::Replaying || self.closing.is_cancelled() {
            return None;
        }
        Some(PageQuery {
            query: EventQuery {
                root: self.root,
                run: self.run_id,
                exclude_descendants: matches!(self.scope, EventScope::SingleRun(_)),
                after: self.cursor,
                limit: self.page_size,
            },
            needs_status: std::mem::take(&mut self.needs_status),
            needs_subtree: matches!(self.scope, EventScope::Subtree(None)),
            pause_unless: self.is_store_failing.then(|| self.closing.clone()),
        })
    }

    fn on_found(&mut self, found: Result<Page, StoreError>) {
        match found {
            Ok(page) => self.on_page(page),
            Err(error) => self.on_failure(&error),
        }
    }

    fn is_over(&self) -> bool {
        self.phase == Phase::Done
    }
}

impl Read for PageQuery {
    type Found = Result<Page, StoreError>;

    async fn perform(self, state: &AppState) -> Self::Found {
        let store = state.runner.store();
        if let Some(closing) = self.pause_unless {
            let pause = tokio::time::sleep(STORE_RETRY_INTERVAL);
            closing.run_until_cancelled(pause).await;
        }
        let run_id = self.query.run;
        let has_ended = self.needs_status
            && (store.run(run_id).await?).is_none_or(|run| run.status.is_terminal());
        let subtree = match self.needs_subtree {
            true => Some(store.tree(run_id).await?.into_iter().map(|run| run.id)),
            false => None,
        };
        Ok(Page {
            events: store.events(self.query).await?,
            has_ended,
            subtree: subtree.map(Iterator::collect),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use tokio::sync::broadcast;
    use tokio::sync::broadcast::error::TryRecvError;
    use tokio_util::sync::CancellationToken;

    use super::{COMMENT, EventStream, Page, PageQuery, RETRY_LINE};
    use crate::domain::event::{EventName, StoredEvent};
    use crate::domain::run::{Run, RunId, Scope};
    use crate::engine::state::broadcaster::{StreamEvent, Subscription};
    use crate::web::response::stream_driver::Projection;

    fn event(seq: u64, run_id: RunId, name: EventName) -> Arc<StoredEvent> {
        Arc::new(StoredEvent {
            seq,
            run_id,
            name,
            data: json!({ "seq": seq }).to_string(),
        })
    }

    /// The events of a root, a child and a grandchild, interleaved.
    fn story(root: RunId, child: RunId, grandchild: RunId) -> Vec<Arc<StoredEvent>> {
        let mut story = vec![
            event(1, root, EventName::RunQueued),
            event(2, child, EventName::RunQueued),
            event(3, grandchild, EventName::RunQueued),
        ];
        for seq in 4..=40 {
            let run_id = [root, child, grandchild][seq as usize % 3];
            story.push(event(seq, run_id, EventName::TurnStarted));
        }
        story.push(event(41, grandchild, EventName::RunCompleted));
        story.push(event(42, child, EventName::RunFailed));
        story.push(event(43, root, EventName::TurnStarted));
        story.push(event(44, root, EventName::RunCompleted));
        story
    }

    fn numbers(text: &str) -> Vec<u64> {
        text.lines()
            .filter_map(|line| line.strip_prefix("id: ")?.parse().ok())
            .collect()
    }

    /// A log that grows while it is followed. The channel holds two events, and some are not published.
    struct Log {
        committed: Vec<Arc<StoredEvent>>,
        rest: std::vec::IntoIter<Arc<StoredEvent>>,
        /// The followed run and its descendants.
        subtree: Vec<RunId>,
        sender: Option<broadcast::Sender<StreamEvent>>,
    }

    impl Log {
        fn commit(&mut self) {
            let Some(event) = self.rest.next() else {
                self.sender = None;
                return;
            };
            self.committed.push(Arc::clone(&event));
            if let Some(sender) = &self.sender
                && (event.name.is_about_run() || event.seq % 5 != 0)
            {
                let _ = sender.send(StreamEvent::Stored(event));
            }
        }

        fn page(&self, PageQuery { query, .. }: &PageQuery) -> Page {
            let is_shown = |event: &&Arc<StoredEvent>| {
                event.seq > query.after
                    && match query.exclude_descendants {
                        true => event.run_id == query.run,
                        false => query.run == query.root || self.subtree.contains(&event.run_id),
                    }
            };
            let events = self.committed.iter().filter(is_shown).take(query.limit);
            Page {
                events: events.map(|event| StoredEvent::clone(event)).collect(),
                has_ended: false,
                subtree: Some([query.run].into()),
            }
        }
    }

    /// Follows the run `index` while events are committed.
    fn follow(index: usize, run_only: bool, after: u64, stored_before: usize) -> Vec<u64> {
        let ids = [RunId::new(), RunId::new(), RunId::new()];
        let mut committed = story(ids[0], ids[1], ids[2]);
        let rest = committed.split_off(stored_before).into_iter();
        let (sender, receiver) = broadcast::channel(2);
        let mut subscription = Subscription::from(receiver);
        let mut log = Log {
            committed,
            rest,
            subtree: ids[index..].to_vec(),
            sender: Some(sender),
        };
        let run = Run {
            root_id: ids[0],
            ..Run::queued(&Scope::root(ids[index], None), "a".to_owned())
        };
        let mut stream = EventStream::new(&run, run_only, after, CancellationToken::new());
        if after == 0 && stored_before == 0 {
            stream = stream.from_start();
        }
        stream.page_size = 3;
        stream.is_subscribed = true;
        let mut text = String::new();
        loop {
            text.push_str(&std::mem::take(stream.frames()));
            if stream.is_over() {
                break;
            }
            if let Some(read) = stream.next_read() {
                if log.committed.len().is_multiple_of(2) {
                    log.commit();
                }
                let mut page = log.page(&read);
                page.subtree = page.subtree.filter(|_| read.needs_subtree);
                stream.on_found(Ok(page));
                continue;
            }
            match subscription.try_recv() {
                Ok(StreamEvent::Stored(event)) => stream.on_event(&event).expect("an event"),
                Ok(StreamEvent::Live(event)) => stream.on_live(&event),
                Err(TryRecvError::Lagged(_)) => stream.on_lag(&mut subscription),
                Err(TryRecvError::Closed) => stream.on_unsubscribed(),
                Err(TryRecvError::Empty) => {
                    (0..=log.committed.len() % 4).for_each(|_| log.commit())
                }
            }
        }
        let numbers = numbers(&text);
        let first = format!("{RETRY_LINE}id: ");
        match text.strip_prefix(COMMENT).unwrap_or(&text) {
            "" => assert!(numbers.is_empty()),
            events => assert!(events.starts_with(&first), "{text}"),
        }
        assert!(text.matches(RETRY_LINE).count() <= 1, "{text}");
        numbers
    }

    #[test]
    fn every_event_is_sent_once() {
        for stored_before in 0..44 {
            for after in [0, 1, 20, 43] {
                let whole: Vec<u64> = (after + 1..=44).collect();
                assert_eq!(follow(0, false, after, stored_before), whole);
            }
            let below: Vec<u64> = (2..=42)
                .filter(|seq| *seq < 4 || *seq > 40 || seq % 3 != 0)
                .collect();
            assert_eq!(follow(1, false, 0, stored_before.min(41)), below);
            let child: Vec<u64> = (4..=40).filter(|seq| seq % 3 == 1).collect();
            let child: Vec<u64> = [2].into_iter().chain(child).chain([42]).collect();
            assert_eq!(follow(1, true, 0, stored_before.min(41)), child);
        }
    }

    #[test]
    fn a_cursor_beyond_the_end_still_ends() {
        assert_eq!(follow(0, false, 1000, 0), Vec::<u64>::new());
        assert_eq!(follow(1, true, 1000, 0), Vec::<u64>::new());
    }
}
