//! The event log of a tree as Server-Sent Events (HTML standard), for one client.
//!
//! The stream subscribes first, then reads the store, then follows its subscription. The store is authoritative: if
//! published events may have been lost, the stream reads the store again.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::domain::event::{StoredEvent, is_terminal};
use crate::domain::run::{Run, RunId};
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::store::StoreError;
use crate::store::events::EventQuery;
use crate::store::run_store::RunStore;
use crate::telemetry::metrics::SseClientGuard;
use crate::web::response::event_scope::EventScope;
use crate::web::state::AppState;

/// The reconnection time in milliseconds. It is sent within the first event's block, because some clients take every block
/// for an event; and as the last bytes of a stream that the daemon closes.
const RETRY_LINE: &str = "retry: 2000\n";
/// A comment, which clients ignore.
const COMMENT: &str = ":\n\n";
/// A comment is sent after this time without an event, because proxies close idle connections.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// The time between two attempts to read a store that fails.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Events that are read from the store at once.
pub const PAGE_SIZE: usize = 200;

#[derive(Clone, Copy, PartialEq, Eq)]
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
    store: Arc<dyn RunStore>,
    subscriber: Option<Subscription>,
    closing: CancellationToken,
    root: RunId,
    run_id: RunId,
    scope: EventScope,
    /// The number of the last event that the client has.
    cursor: u64,
    /// Whether the run has ended, so that the store has all its events.
    has_ended: bool,
    phase: Phase,
    /// Whether a comment has to be sent because no event is sure to be sent at once.
    needs_first_byte: bool,
    /// Whether [`RETRY_LINE`] has not been sent yet.
    needs_retry_line: bool,
    /// Whether the last read of the store failed.
    is_store_failing: bool,
    heartbeat_at: Instant,
    page_size: usize,
    /// For log lines, as `depth`.
    agent: String,
    depth: u8,
    _client_gauge: SseClientGuard,
}

impl EventStream {
    /// A stream of the stored events after number `after`, without a subscription; `run_only` excludes the descendants.
    pub fn new(state: &AppState, run: &Run, run_only: bool, after: u64) -> Self {
        Self {
            store: Arc::clone(state.runner.store()),
            subscriber: None,
            closing: state.closing.clone(),
            root: run.root_id,
            run_id: run.id,
            scope: EventScope::new(run, run_only),
            cursor: after,
            has_ended: false,
            phase: Phase::Replaying,
            needs_first_byte: true,
            needs_retry_line: true,
            is_store_failing: false,
            heartbeat_at: Instant::now() + HEARTBEAT_INTERVAL,
            page_size: PAGE_SIZE,
            agent: run.agent.clone(),
            depth: run.depth.0,
            _client_gauge: state.runner.metrics().track_sse_client(),
        }
    }

    /// Follows a subscription that began before the store is read; `None` if the run has ended.
    pub fn with_subscriber(self, subscriber: Option<Subscription>) -> Self {
        Self { subscriber, ..self }
    }

    /// Follows a subscription that began before the log's first event. The store is read only if the subscription lags.
    pub fn with_live_subscriber(self, subscriber: Subscription) -> Self {
        Self {
            subscriber: Some(subscriber),
            phase: Phase::Live,
            needs_first_byte: false,
            ..self
        }
    }

    /// The next bytes; `None` at the end. Not cancel-safe: a cancelled call loses events.
    pub async fn next(&mut self) -> Option<String> {
        let chunk = loop {
            match self.phase {
                Phase::Live | Phase::Done if self.needs_first_byte => break COMMENT.to_owned(),
                Phase::Done => return None,
                _ if self.closing.is_cancelled() => {
                    self.phase = Phase::Done;
                    break format!("{RETRY_LINE}\n");
                }
                Phase::Replaying => match self.read_page().await {
                    Ok(chunk) if chunk.is_empty() => {}
                    Ok(chunk) => break chunk,
                    Err(error) => break self.pause_after_failure(&error).await?,
                },
                Phase::Live => match self.next_live().await {
                    Ok(chunk) if chunk.is_empty() => {}
                    Ok(chunk) => break chunk,
                    Err(error) => break self.pause_after_failure(&error).await?,
                },
            }
        };
        self.needs_first_byte = false;
        self.heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
        Some(chunk)
    }

    /// Waits until the store may be read again, and returns a comment for the client; `None` if the store is closed.
    async fn pause_after_failure(&mut self, error: &StoreError) -> Option<String> {
        if !std::mem::replace(&mut self.is_store_failing, true) {
            warn!(
                run.id = %self.run_id, run.root = %self.root, agent = self.agent, depth = self.depth,
                "An event stream of {} pauses: {error}", self.run_id
            );
        }
        if let StoreError::Closed = error {
            // The client reconnects with the number of its last event, so that nothing is lost.
            return None;
        }
        tokio::select! {
            () = self.closing.cancelled() => {}
            () = tokio::time::sleep(STORE_RETRY_INTERVAL) => {}
        }
        self.phase = Phase::Replaying;
        Some(COMMENT.to_owned())
    }

    /// Reads one page from the store, and changes the phase after the last one.
    async fn read_page(&mut self) -> Result<String, StoreError> {
        if let EventScope::Subtree(run_ids @ None) = &mut self.scope {
            let runs = self.store.tree(self.run_id).await?;
            *run_ids = Some(runs.into_iter().map(|run| run.id).collect());
        }
        let events = self
            .store
            .events(EventQuery {
                root: self.root,
                run: self.run_id,
                exclude_descendants: matches!(self.scope, EventScope::SingleRun(_)),
                after: self.cursor,
                limit: self.page_size,
            })
            .await?;
        self.is_store_failing = false;
        let mut chunk = String::new();
        for event in &events {
            self.write_event(event, &mut chunk);
        }
        // Events that are committed after a page that is not full are published; reading again would overtake live deltas.
        if events.len() < self.page_size && self.phase == Phase::Replaying {
            self.phase = if self.has_ended || self.subscriber.is_none() {
                Phase::Done
            } else {
                Phase::Live
            };
        }
        Ok(chunk)
    }

    /// The next published event, or a heartbeat.
    async fn next_live(&mut self) -> Result<String, StoreError> {
        let Some(subscriber) = &mut self.subscriber else {
            self.phase = Phase::Done;
            return Ok(String::new());
        };
        let received = tokio::select! {
            biased;
            () = self.closing.cancelled() => return Ok(String::new()),
            received = subscriber.recv() => received,
            () = tokio::time::sleep_until(self.heartbeat_at) => {
                self.poll_run_status().await?;
                return Ok(COMMENT.to_owned());
            }
        };
        let mut chunk = String::new();
        match received {
            Ok(StreamEvent::Stored(event)) => self.on_stored_event(&event, &mut chunk),
            Ok(StreamEvent::Ephemeral { run_id, name, data }) => {
                if self.scope.includes(run_id) {
                    self.write_retry_once(&mut chunk);
                    let _ = write!(chunk, "event: {name}\ndata: {data}\n\n");
                }
            }
            Err(RecvError::Lagged(_)) => {
                // Deltas that are still in the channel are older than events that the store has by now.
                *subscriber = subscriber.resubscribe();
                self.phase = Phase::Replaying;
            }
            Err(RecvError::Closed) => {
                self.subscriber = None;
                self.phase = Phase::Replaying;
            }
        }
        Ok(chunk)
    }

    /// Handles a committed event that was published.
    fn on_stored_event(&mut self, event: &StoredEvent, chunk: &mut String) {
        self.has_ended |= is_final_event(event, self.run_id);
        match self.scope {
            EventScope::WholeTree if event.seq == self.cursor + 1 => self.write_event(event, chunk),
            EventScope::WholeTree if event.seq <= self.cursor && !self.has_ended => {}
            // A gap: the missing events are in the store.
            EventScope::WholeTree => self.phase = Phase::Replaying,
            // The numbers of a part of the tree have gaps, so the events are read from the store.
            EventScope::Subtree(_) | EventScope::SingleRun(_) => {
                let may_be_new =
                    matches!(self.scope, EventScope::Subtree(_)) && event.name == "run.queued";
                if self.has_ended || may_be_new || self.scope.includes(event.run_id) {
                    self.phase = Phase::Replaying;
                }
            }
        }
    }

    /// Appends one event to the chunk and advances the cursor.
    fn write_event(&mut self, event: &StoredEvent, chunk: &mut String) {
        if self.phase == Phase::Done {
            return;
        }
        self.write_retry_once(chunk);
        let StoredEvent {
            seq,
            run_id,
            name,
            data,
        } = event;
        let _ = write!(chunk, "id: {seq}\nevent: {name}\ndata: {data}\n\n");
        self.cursor = *seq;
        if let EventScope::Subtree(Some(run_ids)) = &mut self.scope {
            run_ids.insert(*run_id);
        }
        if is_final_event(event, self.run_id) {
            self.phase = Phase::Done;
        }
    }

    fn write_retry_once(&mut self, chunk: &mut String) {
        if std::mem::take(&mut self.needs_retry_line) {
            chunk.push_str(RETRY_LINE);
        }
    }

    /// Reads the run and then the store again, in case a publication was lost.
    async fn poll_run_status(&mut self) -> Result<(), StoreError> {
        self.has_ended |= match self.store.run(self.run_id).await? {
            Some(run) => run.status.is_terminal(),
            None => true,
        };
        self.phase = Phase::Replaying;
        Ok(())
    }
}

/// Whether it is the terminal event of `run`.
pub fn is_final_event(event: &StoredEvent, run: RunId) -> bool {
    event.run_id == run && is_terminal(&event.name)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::sync::broadcast;
    use tokio::task::JoinSet;
    use tokio::time::Instant;
    use tokio_util::sync::CancellationToken;

    use super::{COMMENT, EventStream, HEARTBEAT_INTERVAL, Phase, RETRY_LINE};
    use crate::domain::event::StoredEvent;
    use crate::domain::run::RunId;
    use crate::engine::record::journal::StreamEvent;
    use crate::store::run_store::RunStore;
    use crate::telemetry::metrics::Metrics;
    use crate::web::response::event_scope::EventScope;
    use crate::web::response::test_log::{Log, run};

    fn event(seq: u64, run_id: RunId, name: &str) -> Arc<StoredEvent> {
        Arc::new(StoredEvent {
            seq,
            run_id,
            name: name.to_owned(),
            data: format!("{{\"seq\":{seq}}}"),
        })
    }

    /// The events of a root, a child and a grandchild, interleaved.
    fn story(root: RunId, child: RunId, grandchild: RunId) -> Vec<Arc<StoredEvent>> {
        let mut story = vec![
            event(1, root, "run.queued"),
            event(2, child, "run.queued"),
            event(3, grandchild, "run.queued"),
        ];
        for seq in 4..=40 {
            let run_id = [root, child, grandchild][seq as usize % 3];
            story.push(event(seq, run_id, "turn.started"));
        }
        story.push(event(41, grandchild, "run.completed"));
        story.push(event(42, child, "run.failed"));
        story.push(event(43, root, "turn.started"));
        story.push(event(44, root, "run.completed"));
        story
    }

    fn numbers(text: &str) -> Vec<u64> {
        text.lines()
            .filter_map(|line| line.strip_prefix("id: ")?.parse().ok())
            .collect()
    }

    /// Follows the run `index` while events are committed. The channel holds two events, and some are not published.
    async fn follow(index: usize, run_only: bool, after: u64, stored_before: usize) -> Vec<u64> {
        let ids = [RunId::new(), RunId::new(), RunId::new()];
        let story = story(ids[0], ids[1], ids[2]);
        let log = Arc::new(Log {
            events: Mutex::new(story[..stored_before].to_vec()),
            subtree: ids[index..].to_vec(),
        });
        let (sender, subscriber) = broadcast::channel(2);
        let mut requested_run = run(ids[index]);
        requested_run.root_id = ids[0];
        let mut stream = EventStream {
            store: Arc::clone(&log) as Arc<dyn RunStore>,
            subscriber: Some(subscriber.into()),
            closing: CancellationToken::new(),
            root: ids[0],
            run_id: ids[index],
            scope: EventScope::new(&requested_run, run_only),
            cursor: after,
            has_ended: false,
            phase: match after == 0 && stored_before == 0 {
                true => Phase::Live,
                false => Phase::Replaying,
            },
            needs_first_byte: after > 0 || stored_before > 0,
            needs_retry_line: true,
            is_store_failing: false,
            heartbeat_at: Instant::now() + HEARTBEAT_INTERVAL,
            page_size: 3,
            agent: requested_run.agent,
            depth: 0,
            _client_gauge: Arc::<Metrics>::default().track_sse_client(),
        };
        let mut writers = JoinSet::new();
        let unsent = story[stored_before..].to_vec();
        writers.spawn(async move {
            for event in unsent {
                log.events.lock().expect("a log").push(Arc::clone(&event));
                let is_run_event = event.name.starts_with("run.");
                if is_run_event || event.seq % 5 != 0 {
                    let _ = sender.send(StreamEvent::Stored(Arc::clone(&event)));
                }
                if event.seq % 2 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        });
        let mut text = String::new();
        while let Some(chunk) = stream.next().await {
            text.push_str(&chunk);
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

    #[tokio::test]
    async fn every_event_is_sent_once() {
        for stored_before in 0..44 {
            for after in [0, 1, 20, 43] {
                let whole: Vec<u64> = (after + 1..=44).collect();
                assert_eq!(follow(0, false, after, stored_before).await, whole);
            }
            let below: Vec<u64> = (2..=42)
                .filter(|seq| *seq < 4 || *seq > 40 || seq % 3 != 0)
                .collect();
            assert_eq!(follow(1, false, 0, stored_before.min(41)).await, below);
            let child: Vec<u64> = (4..=40).filter(|seq| seq % 3 == 1).collect();
            let child: Vec<u64> = [2].into_iter().chain(child).chain([42]).collect();
            assert_eq!(follow(1, true, 0, stored_before.min(41)).await, child);
        }
    }

    #[tokio::test]
    async fn a_cursor_beyond_the_end_still_ends() {
        assert_eq!(follow(0, false, 1000, 0).await, Vec::<u64>::new());
        assert_eq!(follow(1, true, 1000, 0).await, Vec::<u64>::new());
    }
}
