//! One client's way through a tree's log, as the bytes of an event stream (Server-Sent Events of the HTML standard).
//!
//! It subscribes first, then reads the store, then follows what it hears. The store is the truth: a notice only says that
//! there is something to read, and where notices may have been lost the store is read again.

use std::collections::HashSet;
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
use crate::web::state::AppState;

/// When to come back, in milliseconds: within the first event's block, because some clients take a block for an event
/// whatever it holds; and the last bytes of a stream that the daemon closes.
const RETRY_LINE: &str = "retry: 2000\n";
/// Says nothing, and reaches the client at once.
const COMMENT: &str = ":\n\n";
/// A comment after so much silence, for proxies that drop quiet connections.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// From one try to read a store that fails to the next.
const STORE_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How many events a stream reads from the store at once.
pub const PAGE_SIZE: usize = 200;

/// Which runs of the tree a stream shows.
enum EventScope {
    /// All: the root was asked for.
    WholeTree,
    /// One run and its descendants, as far as they are known; none before they are looked up.
    Subtree(Option<HashSet<RunId>>),
    /// One run alone.
    SingleRun,
}

impl EventScope {
    fn new(run: &Run, run_only: bool) -> Self {
        match (run_only, run.id == run.root_id) {
            (true, _) => Self::SingleRun,
            (false, true) => Self::WholeTree,
            (false, false) => Self::Subtree(None),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The store has more, or may have.
    Replaying,
    /// All that was committed is sent; now the listener is heard.
    Live,
    /// Nothing more will be sent.
    Done,
}

/// One client's way through a tree's log.
pub struct EventStream {
    store: Arc<dyn RunStore>,
    subscriber: Option<Subscription>,
    closing: CancellationToken,
    root: RunId,
    run_id: RunId,
    scope: EventScope,
    /// The last number that was sent, or that the client has.
    cursor: u64,
    /// Whether the run has ended, so that nothing comes after what the store has now.
    has_ended: bool,
    phase: Phase,
    /// Whether the client has no byte yet, and none is sure to come at once.
    needs_first_byte: bool,
    /// Whether the client still has to be told when to come back.
    needs_retry_line: bool,
    /// Whether the store could not be read the last time.
    is_store_failing: bool,
    heartbeat_at: Instant,
    /// Events that are read at once.
    page_size: usize,
    /// For the log.
    agent: String,
    depth: u8,
    _client_gauge: SseClientGuard,
}

impl EventStream {
    /// One that reads the store from behind `after` on and hears nobody; `only` leaves the run's descendants out.
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

    /// With a listener that stands since before the store is read; none where nothing more will come.
    pub fn with_subscriber(self, subscriber: Option<Subscription>) -> Self {
        Self { subscriber, ..self }
    }

    /// With a listener that stands since before the log's first event, which has been committed: the store is read only
    /// where the listener falls behind.
    pub fn with_live_subscriber(self, subscriber: Subscription) -> Self {
        Self {
            subscriber: Some(subscriber),
            phase: Phase::Live,
            needs_first_byte: false,
            ..self
        }
    }

    /// The next bytes; none at the end. Never cancelled halfway by anything but the client's leaving.
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

    /// Waits until the store may be read again, and returns a comment for the client meanwhile; none where it never will
    /// be.
    async fn pause_after_failure(&mut self, error: &StoreError) -> Option<String> {
        if !std::mem::replace(&mut self.is_store_failing, true) {
            warn!(
                run.id = %self.run_id, run.root = %self.root, agent = self.agent, depth = self.depth,
                "A stream of {} pauses: {error}", self.run_id
            );
        }
        if let StoreError::Closed = error {
            // The client comes back with the last number that it saw, and nothing is lost.
            return None;
        }
        tokio::select! {
            () = self.closing.cancelled() => {}
            () = tokio::time::sleep(STORE_RETRY_INTERVAL) => {}
        }
        self.phase = Phase::Replaying;
        Some(COMMENT.to_owned())
    }

    /// One page from the store. When there is no more, decides what comes next.
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
                exclude_descendants: matches!(self.scope, EventScope::SingleRun),
                after: self.cursor,
                limit: self.page_size,
            })
            .await?;
        self.is_store_failing = false;
        let mut chunk = String::new();
        for event in &events {
            self.write_event(event, &mut chunk);
        }
        // What was committed after a page that is not full is announced: reading again would overtake live deltas.
        if events.len() < self.page_size && self.phase == Phase::Replaying {
            self.phase = if self.has_ended || self.subscriber.is_none() {
                Phase::Done
            } else {
                Phase::Live
            };
        }
        Ok(chunk)
    }

    /// What the listener says, or a heartbeat after a silence.
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
                if self.includes(run_id) {
                    self.write_retry_once(&mut chunk);
                    let _ = write!(chunk, "event: {name}\ndata: {data}\n\n");
                }
            }
            Err(RecvError::Lagged(_)) => {
                // Deltas that still wait there would come after events that the store has by now.
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

    /// A committed event was announced.
    fn on_stored_event(&mut self, event: &StoredEvent, chunk: &mut String) {
        self.has_ended |= is_final_event(event, self.run_id);
        match self.scope {
            EventScope::WholeTree if event.seq == self.cursor + 1 => self.write_event(event, chunk),
            EventScope::WholeTree if event.seq <= self.cursor && !self.has_ended => {}
            // A gap in what we hear: whatever is missing is in the store.
            EventScope::WholeTree => self.phase = Phase::Replaying,
            // Numbers of a part of the tree have gaps, so the store is asked; what is of no concern is passed over.
            EventScope::Subtree(_) | EventScope::SingleRun => {
                let may_be_new =
                    matches!(self.scope, EventScope::Subtree(_)) && event.name == "run.queued";
                if self.has_ended || may_be_new || self.includes(event.run_id) {
                    self.phase = Phase::Replaying;
                }
            }
        }
    }

    /// Puts one event into the chunk and moves on past it.
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

    /// The first event's block tells when to come back.
    fn write_retry_once(&mut self, chunk: &mut String) {
        if std::mem::take(&mut self.needs_retry_line) {
            chunk.push_str(RETRY_LINE);
        }
    }

    /// After a silence: notify and poll. An announcement that got lost is made good here.
    async fn poll_run_status(&mut self) -> Result<(), StoreError> {
        self.has_ended |= match self.store.run(self.run_id).await? {
            Some(run) => run.status.is_terminal(),
            None => true,
        };
        self.phase = Phase::Replaying;
        Ok(())
    }

    fn includes(&self, run: RunId) -> bool {
        match &self.scope {
            EventScope::WholeTree => true,
            EventScope::Subtree(run_ids) => {
                run_ids.as_ref().is_some_and(|known| known.contains(&run))
            }
            EventScope::SingleRun => run == self.run_id,
        }
    }
}

/// Whether it is that run's terminal event.
pub fn is_final_event(event: &StoredEvent, run: RunId) -> bool {
    event.run_id == run && is_terminal(&event.name)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use futures_util::future::BoxFuture;
    use tokio::sync::{Notify, broadcast};
    use tokio::task::JoinSet;
    use tokio::time::Instant;
    use tokio_util::sync::CancellationToken;

    use super::{COMMENT, EventScope, EventStream, HEARTBEAT_INTERVAL, Phase, RETRY_LINE};
    use crate::domain::attachment::{Blobs, Digest};
    use crate::domain::event::StoredEvent;
    use crate::domain::run::{self, Run, RunId, Status};
    use crate::domain::webhook::DeliveryId;
    use crate::engine::record::journal::StreamEvent;
    use crate::store::events::{EventLog, EventQuery};
    use crate::store::outbox::{AttemptRecord, Delivery, DueDeliveries, DueQuery, Outbox};
    use crate::store::retention::{ExpiredPage, ExpiredQuery, NthNewestQuery, RunRetention};
    use crate::store::run_store::RunStore;
    use crate::store::runs::{
        ChildCall, RunFilter, RunPage, RunRecords, SessionQuery, UnfinishedRun, WriteFailedFn,
    };
    use crate::store::{ClaimedRun, IdempotencyKey, Step, StoreError, Write};
    use crate::telemetry::metrics::Metrics;

    /// A log in memory: enough of a store to be read while it grows.
    #[derive(Default)]
    struct Log {
        events: Mutex<Vec<Arc<StoredEvent>>>,
        /// The runs at and below the one that is followed.
        subtree: Vec<RunId>,
    }

    impl RunRecords for Log {
        fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
            Box::pin(async move { Ok(vec![run(id)]) })
        }

        fn blobs(&self, _: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
            unreachable!("events hold no bytes")
        }

        fn on_write_failed(&self, _: WriteFailedFn) {
            unreachable!("a reader does not write")
        }

        fn clear_failed(&self, _: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a reader does not write")
        }

        fn run(&self, id: RunId) -> BoxFuture<'_, Result<Option<Run>, StoreError>> {
            Box::pin(async move { Ok(Some(run(id))) })
        }

        fn write(&self, _: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
            unreachable!("a reader does not write")
        }

        fn write_with(&self, _: Write, _: Vec<Write>) -> BoxFuture<'_, Result<u64, StoreError>> {
            unreachable!("a reader does not write")
        }

        fn enqueue(&self, _: Write) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a reader does not write")
        }

        fn session_runs(&self, _: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
            unreachable!("a stream knows no sessions")
        }

        fn list(&self, _: RunFilter) -> BoxFuture<'_, Result<RunPage, StoreError>> {
            unreachable!("a stream does not list")
        }

        fn children(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
            unreachable!("a stream does not list")
        }

        fn child_calls(&self, _: RunId) -> BoxFuture<'_, Result<Vec<ChildCall>, StoreError>> {
            unreachable!("a stream does not list")
        }

        fn steps(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Step>, StoreError>> {
            unreachable!("a stream reads no steps")
        }

        fn unfinished_runs(&self) -> BoxFuture<'_, Result<Vec<UnfinishedRun>, StoreError>> {
            unreachable!("a stream does not list")
        }

        fn claimed_run(
            &self,
            _: IdempotencyKey,
        ) -> BoxFuture<'_, Result<Option<ClaimedRun>, StoreError>> {
            unreachable!("a stream accepts nothing")
        }
    }

    impl EventLog for Log {
        fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
            Box::pin(async move {
                tokio::task::yield_now().await;
                let events = self.events.lock().expect("a log");
                let shown = |event: &&Arc<StoredEvent>| {
                    event.seq > query.after
                        && if query.exclude_descendants {
                            event.run_id == query.run
                        } else {
                            query.run == query.root || self.subtree.contains(&event.run_id)
                        }
                };
                let page = events.iter().filter(shown).take(query.limit);
                Ok(page.map(|event| StoredEvent::clone(event)).collect())
            })
        }
    }

    impl Outbox for Log {
        fn due_deliveries(&self, _: DueQuery) -> BoxFuture<'_, Result<DueDeliveries, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn record_attempt(&self, _: AttemptRecord) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn deliveries(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn resend(&self, _: RunId, _: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn delivery_notify(&self) -> Arc<Notify> {
            unreachable!("a stream delivers nothing")
        }
    }

    impl RunRetention for Log {
        fn expired_roots(&self, _: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn nth_newest_ended(
            &self,
            _: NthNewestQuery,
        ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn delete(&self, _: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a reader does not write")
        }
    }

    impl RunStore for Log {
        fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a stream does not check")
        }

        fn commit_count(&self) -> u64 {
            unreachable!("a stream does not count")
        }

        fn close(&self) -> BoxFuture<'_, ()> {
            unreachable!("a reader does not close")
        }
    }

    fn run(id: RunId) -> Run {
        Run {
            status: Status::Running,
            ..Run::queued(&run::Scope::root(id, None), "a".to_owned())
        }
    }

    fn event(seq: u64, run_id: RunId, name: &str) -> Arc<StoredEvent> {
        Arc::new(StoredEvent {
            seq,
            run_id,
            name: name.to_owned(),
            data: format!("{{\"seq\":{seq}}}"),
        })
    }

    /// A tree of a root, a child and a grandchild whose events come in turns.
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

    /// Follows `of` while the story is told, with a listener that holds two notices and a bell that stays silent now and
    /// then.
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
            subscriber: Some(subscriber),
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
    async fn nothing_is_lost_and_nothing_comes_twice() {
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
