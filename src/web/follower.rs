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
use crate::engine::journal::{Listener, Notice};
use crate::store::{EventQuery, RunStore, StoreError};
use crate::telemetry::metrics::SseClient;
use crate::web::state::AppState;

/// When to come back, in milliseconds: within the first event's block, because some clients take a block for an event
/// whatever it holds; and the last bytes of a stream that the daemon closes.
const RETRY: &str = "retry: 2000\n";
/// Says nothing, and reaches the client at once.
const COMMENT: &str = ":\n\n";
/// A comment after so much silence, for proxies that drop quiet connections.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// From one try to read a store that fails to the next.
const STORE_PAUSE: Duration = Duration::from_secs(1);
/// How many events a stream reads from the store at once.
pub const PAGE: usize = 200;

/// Which runs of the tree a stream shows.
enum Scope {
    /// All: the root was asked for.
    Whole,
    /// One run and its descendants, as far as they are known; none before they are looked up.
    Below(Option<HashSet<RunId>>),
    /// One run alone.
    Only,
}

impl Scope {
    fn of(run: &Run, only: bool) -> Self {
        match (only, run.id == run.root_id) {
            (true, _) => Self::Only,
            (false, true) => Self::Whole,
            (false, false) => Self::Below(None),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The store has more, or may have.
    Reading,
    /// All that was committed is sent; now the listener is heard.
    Following,
    /// Nothing more will be sent.
    Over,
}

/// One client's way through a tree's log.
pub struct Follower {
    store: Arc<dyn RunStore>,
    listener: Option<Listener>,
    closing: CancellationToken,
    root: RunId,
    of: RunId,
    scope: Scope,
    /// The last number that was sent, or that the client has.
    cursor: u64,
    /// Whether the run has ended, so that nothing comes after what the store has now.
    ended: bool,
    phase: Phase,
    /// Whether the client has no byte yet, and none is sure to come at once.
    is_silent: bool,
    /// Whether the client still has to be told when to come back.
    retry_due: bool,
    /// Whether the store could not be read the last time.
    is_failing: bool,
    quiet_until: Instant,
    /// Events that are read at once.
    page: usize,
    /// For the log.
    agent: String,
    depth: u8,
    _counted: SseClient,
}

impl Follower {
    /// One that reads the store from behind `after` on and hears nobody; `only` leaves the run's descendants out.
    pub fn new(state: &AppState, run: &Run, only: bool, after: u64) -> Self {
        Self {
            store: Arc::clone(state.runner.store()),
            listener: None,
            closing: state.closing.clone(),
            root: run.root_id,
            of: run.id,
            scope: Scope::of(run, only),
            cursor: after,
            ended: false,
            phase: Phase::Reading,
            is_silent: true,
            retry_due: true,
            is_failing: false,
            quiet_until: Instant::now() + HEARTBEAT,
            page: PAGE,
            agent: run.agent.clone(),
            depth: run.depth.0,
            _counted: state.runner.metrics().sse_client(),
        }
    }

    /// With a listener that stands since before the store is read; none where nothing more will come.
    pub fn hearing(self, listener: Option<Listener>) -> Self {
        Self { listener, ..self }
    }

    /// With a listener that stands since before the log's first event, which has been committed: the store is read only
    /// where the listener falls behind.
    pub fn hearing_all(self, listener: Listener) -> Self {
        Self {
            listener: Some(listener),
            phase: Phase::Following,
            is_silent: false,
            ..self
        }
    }

    /// The next bytes; none at the end. Never cancelled halfway by anything but the client's leaving.
    pub async fn next(&mut self) -> Option<String> {
        let chunk = loop {
            match self.phase {
                Phase::Following | Phase::Over if self.is_silent => break COMMENT.to_owned(),
                Phase::Over => return None,
                _ if self.closing.is_cancelled() => {
                    self.phase = Phase::Over;
                    break format!("{RETRY}\n");
                }
                Phase::Reading => match self.read().await {
                    Ok(chunk) if chunk.is_empty() => {}
                    Ok(chunk) => break chunk,
                    Err(error) => break self.after_failure(&error).await?,
                },
                Phase::Following => match self.follow().await {
                    Ok(chunk) if chunk.is_empty() => {}
                    Ok(chunk) => break chunk,
                    Err(error) => break self.after_failure(&error).await?,
                },
            }
        };
        self.is_silent = false;
        self.quiet_until = Instant::now() + HEARTBEAT;
        Some(chunk)
    }

    /// Waits until the store may be read again, and returns a comment for the client meanwhile; none where it never will
    /// be.
    async fn after_failure(&mut self, error: &StoreError) -> Option<String> {
        if !std::mem::replace(&mut self.is_failing, true) {
            warn!(
                run.id = %self.of, run.root = %self.root, agent = self.agent, depth = self.depth,
                "A stream of {} pauses: {error}", self.of
            );
        }
        if let StoreError::Closed = error {
            // The client comes back with the last number that it saw, and nothing is lost.
            return None;
        }
        tokio::select! {
            () = self.closing.cancelled() => {}
            () = tokio::time::sleep(STORE_PAUSE) => {}
        }
        self.phase = Phase::Reading;
        Some(COMMENT.to_owned())
    }

    /// One page from the store. When there is no more, decides what comes next.
    async fn read(&mut self) -> Result<String, StoreError> {
        if let Scope::Below(known @ None) = &mut self.scope {
            let runs = self.store.tree(self.of).await?;
            *known = Some(runs.into_iter().map(|run| run.id).collect());
        }
        let events = self
            .store
            .events(EventQuery {
                root: self.root,
                of: self.of,
                only: matches!(self.scope, Scope::Only),
                after: self.cursor,
                limit: self.page,
            })
            .await?;
        self.is_failing = false;
        let mut chunk = String::new();
        for event in &events {
            self.send(event, &mut chunk);
        }
        // What was committed after a page that is not full is announced: reading again would overtake live deltas.
        if events.len() < self.page && self.phase == Phase::Reading {
            self.phase = if self.ended || self.listener.is_none() {
                Phase::Over
            } else {
                Phase::Following
            };
        }
        Ok(chunk)
    }

    /// What the listener says, or a heartbeat after a silence.
    async fn follow(&mut self) -> Result<String, StoreError> {
        let Some(listener) = &mut self.listener else {
            self.phase = Phase::Over;
            return Ok(String::new());
        };
        let heard = tokio::select! {
            biased;
            () = self.closing.cancelled() => return Ok(String::new()),
            heard = listener.recv() => heard,
            () = tokio::time::sleep_until(self.quiet_until) => {
                self.look_again().await?;
                return Ok(COMMENT.to_owned());
            }
        };
        let mut chunk = String::new();
        match heard {
            Ok(Notice::Stored(event)) => self.hear(&event, &mut chunk),
            Ok(Notice::Whisper { run_id, name, data }) => {
                if self.covers(run_id) {
                    self.begin_block(&mut chunk);
                    let _ = write!(chunk, "event: {name}\ndata: {data}\n\n");
                }
            }
            Err(RecvError::Lagged(_)) => {
                // Deltas that still wait there would come after events that the store has by now.
                *listener = listener.resubscribe();
                self.phase = Phase::Reading;
            }
            Err(RecvError::Closed) => {
                self.listener = None;
                self.phase = Phase::Reading;
            }
        }
        Ok(chunk)
    }

    /// A committed event was announced.
    fn hear(&mut self, event: &StoredEvent, chunk: &mut String) {
        self.ended |= ends(event, self.of);
        match self.scope {
            Scope::Whole if event.seq == self.cursor + 1 => self.send(event, chunk),
            Scope::Whole if event.seq <= self.cursor && !self.ended => {}
            // A gap in what we hear: whatever is missing is in the store.
            Scope::Whole => self.phase = Phase::Reading,
            // Numbers of a part of the tree have gaps, so the store is asked; what is of no concern is passed over.
            Scope::Below(_) | Scope::Only => {
                let may_be_new =
                    matches!(self.scope, Scope::Below(_)) && event.name == "run.queued";
                if self.ended || may_be_new || self.covers(event.run_id) {
                    self.phase = Phase::Reading;
                }
            }
        }
    }

    /// Puts one event into the chunk and moves on past it.
    fn send(&mut self, event: &StoredEvent, chunk: &mut String) {
        if self.phase == Phase::Over {
            return;
        }
        self.begin_block(chunk);
        let StoredEvent {
            seq,
            run_id,
            name,
            data,
        } = event;
        let _ = write!(chunk, "id: {seq}\nevent: {name}\ndata: {data}\n\n");
        self.cursor = *seq;
        if let Scope::Below(Some(known)) = &mut self.scope {
            known.insert(*run_id);
        }
        if ends(event, self.of) {
            self.phase = Phase::Over;
        }
    }

    /// The first event's block tells when to come back.
    fn begin_block(&mut self, chunk: &mut String) {
        if std::mem::take(&mut self.retry_due) {
            chunk.push_str(RETRY);
        }
    }

    /// After a silence: notify and poll. An announcement that got lost is made good here.
    async fn look_again(&mut self) -> Result<(), StoreError> {
        self.ended |= match self.store.run(self.of).await? {
            Some(run) => run.status.is_terminal(),
            None => true,
        };
        self.phase = Phase::Reading;
        Ok(())
    }

    fn covers(&self, run: RunId) -> bool {
        match &self.scope {
            Scope::Whole => true,
            Scope::Below(known) => known.as_ref().is_some_and(|known| known.contains(&run)),
            Scope::Only => run == self.of,
        }
    }
}

/// Whether it is that run's terminal event.
pub fn ends(event: &StoredEvent, run: RunId) -> bool {
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

    use super::{COMMENT, Follower, HEARTBEAT, Phase, RETRY, Scope};
    use crate::domain::attachment::{Blobs, Digest};
    use crate::domain::event::StoredEvent;
    use crate::domain::run::{self, Run, RunId, Status};
    use crate::domain::webhook::DeliveryId;
    use crate::engine::journal::Notice;
    use crate::store::outbox::{Delivery, Due, DueQuery, Tried};
    use crate::store::{
        ChildCall, ClaimKey, Claimed, EventQuery, Gap, NewestEnded, Outlived, OutlivedPage,
        RunFilter, RunPage, RunStore, SessionQuery, Step, StoreError, Unfinished, Write,
    };
    use crate::telemetry::metrics::Metrics;

    /// A log in memory: enough of a store to be read while it grows.
    #[derive(Default)]
    struct Log {
        events: Mutex<Vec<Arc<StoredEvent>>>,
        /// The runs at and below the one that is followed.
        below: Vec<RunId>,
    }

    impl RunStore for Log {
        fn events(&self, query: EventQuery) -> BoxFuture<'_, Result<Vec<StoredEvent>, StoreError>> {
            Box::pin(async move {
                tokio::task::yield_now().await;
                let events = self.events.lock().expect("a log");
                let shown = |event: &&Arc<StoredEvent>| {
                    event.seq > query.after
                        && if query.only {
                            event.run_id == query.of
                        } else {
                            query.of == query.root || self.below.contains(&event.run_id)
                        }
                };
                let page = events.iter().filter(shown).take(query.limit);
                Ok(page.map(|event| StoredEvent::clone(event)).collect())
            })
        }

        fn tree(&self, id: RunId) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
            Box::pin(async move { Ok(vec![run(id)]) })
        }

        fn blobs(&self, _: Vec<Digest>) -> BoxFuture<'_, Result<Blobs, StoreError>> {
            unreachable!("events hold no bytes")
        }

        fn on_gap(&self, _: Gap) {
            unreachable!("a reader does not write")
        }

        fn mend(&self, _: Vec<RunId>) -> BoxFuture<'_, Result<(), StoreError>> {
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

        fn post(&self, _: Write) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a reader does not write")
        }

        fn session(&self, _: SessionQuery) -> BoxFuture<'_, Result<Vec<Run>, StoreError>> {
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

        fn unfinished(&self) -> BoxFuture<'_, Result<Vec<Unfinished>, StoreError>> {
            unreachable!("a stream does not list")
        }

        fn claimed(&self, _: ClaimKey) -> BoxFuture<'_, Result<Option<Claimed>, StoreError>> {
            unreachable!("a stream accepts nothing")
        }

        fn due(&self, _: DueQuery) -> BoxFuture<'_, Result<Due, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn tried(&self, _: Tried) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn deliveries(&self, _: RunId) -> BoxFuture<'_, Result<Vec<Delivery>, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn resend(&self, _: RunId, _: DeliveryId) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a stream delivers nothing")
        }

        fn outbox(&self) -> Arc<Notify> {
            unreachable!("a stream delivers nothing")
        }

        fn outlived(&self, _: Outlived) -> BoxFuture<'_, Result<OutlivedPage, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn newest_ended(&self, _: NewestEnded) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn tidy(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a stream removes nothing")
        }

        fn delete(&self, _: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
            unreachable!("a reader does not write")
        }

        fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
            unreachable!("a stream does not check")
        }

        fn commits(&self) -> u64 {
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
            let of = [root, child, grandchild][seq as usize % 3];
            story.push(event(seq, of, "turn.started"));
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
    async fn follow(of: usize, only: bool, after: u64, told_before: usize) -> Vec<u64> {
        let ids = [RunId::new(), RunId::new(), RunId::new()];
        let story = story(ids[0], ids[1], ids[2]);
        let log = Arc::new(Log {
            events: Mutex::new(story[..told_before].to_vec()),
            below: ids[of..].to_vec(),
        });
        let (bell, listener) = broadcast::channel(2);
        let mut asked = run(ids[of]);
        asked.root_id = ids[0];
        let mut follower = Follower {
            store: Arc::clone(&log) as Arc<dyn RunStore>,
            listener: Some(listener),
            closing: CancellationToken::new(),
            root: ids[0],
            of: ids[of],
            scope: Scope::of(&asked, only),
            cursor: after,
            ended: false,
            phase: match after == 0 && told_before == 0 {
                true => Phase::Following,
                false => Phase::Reading,
            },
            is_silent: after > 0 || told_before > 0,
            retry_due: true,
            is_failing: false,
            quiet_until: Instant::now() + HEARTBEAT,
            page: 3,
            agent: asked.agent,
            depth: 0,
            _counted: Arc::<Metrics>::default().sse_client(),
        };
        let mut telling = JoinSet::new();
        let rest = story[told_before..].to_vec();
        telling.spawn(async move {
            for event in rest {
                log.events.lock().expect("a log").push(Arc::clone(&event));
                let ends = event.name.starts_with("run.");
                if ends || event.seq % 5 != 0 {
                    let _ = bell.send(Notice::Stored(Arc::clone(&event)));
                }
                if event.seq % 2 == 0 {
                    tokio::task::yield_now().await;
                }
            }
        });
        let mut text = String::new();
        while let Some(chunk) = follower.next().await {
            text.push_str(&chunk);
        }
        let numbers = numbers(&text);
        let first = format!("{RETRY}id: ");
        match text.strip_prefix(COMMENT).unwrap_or(&text) {
            "" => assert!(numbers.is_empty()),
            events => assert!(events.starts_with(&first), "{text}"),
        }
        assert!(text.matches(RETRY).count() <= 1, "{text}");
        numbers
    }

    #[tokio::test]
    async fn nothing_is_lost_and_nothing_comes_twice() {
        for told_before in 0..44 {
            for after in [0, 1, 20, 43] {
                let whole: Vec<u64> = (after + 1..=44).collect();
                assert_eq!(follow(0, false, after, told_before).await, whole);
            }
            let below: Vec<u64> = (2..=42)
                .filter(|seq| *seq < 4 || *seq > 40 || seq % 3 != 0)
                .collect();
            assert_eq!(follow(1, false, 0, told_before.min(41)).await, below);
            let child: Vec<u64> = (4..=40).filter(|seq| seq % 3 == 1).collect();
            let child: Vec<u64> = [2].into_iter().chain(child).chain([42]).collect();
            assert_eq!(follow(1, true, 0, told_before.min(41)).await, child);
        }
    }

    #[tokio::test]
    async fn a_cursor_beyond_the_end_still_ends() {
        assert_eq!(follow(0, false, 1000, 0).await, Vec::<u64>::new());
        assert_eq!(follow(1, true, 1000, 0).await, Vec::<u64>::new());
    }
}
