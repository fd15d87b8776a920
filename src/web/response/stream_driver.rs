//! Drives the stream of one client. What is sent is decided by a [`Projection`], which has no effects: the driver receives the
//! events of a tree, reads for the projection what it needs of the record, and keeps the connection alive.
//!
//! Subscribe first, then read the record: then no event is missed.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::unfold;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;
use tracing::error;

use crate::domain::event::{LiveEvent, StoredEvent};
use crate::engine::state::broadcaster::{StreamEvent, Subscription};
use crate::web::response::sse;
use crate::web::state::AppState;

/// A comment, which clients ignore.
pub const COMMENT: &str = ":\n\n";
/// The longest time without a frame, because proxies close idle connections.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// What a client is sent of a run's events.
pub trait Projection: Send + 'static {
    /// A comment, which clients ignore. It is sent after a time without frames, because proxies close idle connections.
    const COMMENT: &'static str = COMMENT;
    /// Why the stream ends, with what its end shows.
    type End: Send;
    /// What it needs of the record before its end.
    type Read: Read;

    /// The frames that are not sent yet.
    fn frames(&mut self) -> &mut String;

    /// A committed event of the run's tree.
    ///
    /// # Errors
    /// It is damaged, which ends the stream.
    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()>;

    /// An event without a number.
    fn on_live(&mut self, event: &LiveEvent);

    /// Events were lost.
    fn on_lag(&mut self, _: &mut Subscription) {}

    /// There are no more events.
    fn on_unsubscribed(&mut self) {}

    /// The comment is sent.
    fn on_silence(&mut self) {}

    /// Adds the last frames.
    fn on_end(&mut self, end: Self::End);

    /// What has to be read before anything else happens.
    fn next_read(&mut self) -> Option<Self::Read> {
        None
    }

    fn on_found(&mut self, _: <Self::Read as Read>::Found) {}

    /// Whether nothing follows the frames, although the stream has not ended.
    fn is_over(&self) -> bool {
        false
    }
}

/// Something to read from the record.
pub trait Read: Send {
    type Found: Send;

    fn perform(self, state: &AppState) -> impl Future<Output = Self::Found> + Send;
}

#[derive(Debug)]
pub enum Nothing {}

impl Read for Nothing {
    type Found = Self;

    async fn perform(self, _: &AppState) -> Self {
        self
    }
}

pub struct StreamDriver<P: Projection> {
    state: AppState,
    pub projection: P,
    subscription: Option<Subscription>,
    /// `None` once it has resolved.
    end: Option<BoxFuture<'static, P::End>>,
    silent_at: Instant,
}

impl<P: Projection> StreamDriver<P> {
    /// The stream ends when `end` resolves, or when the projection is over.
    pub fn new(
        state: &AppState,
        projection: P,
        subscription: Option<Subscription>,
        end: impl Future<Output = P::End> + Send + 'static,
    ) -> Self {
        Self {
            state: state.clone(),
            projection,
            subscription,
            end: Some(Box::pin(end)),
            silent_at: Instant::now() + HEARTBEAT_INTERVAL,
        }
    }

    /// The next frames; `None` at the end. Not cancel-safe: a cancelled call loses events.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            let frames = std::mem::take(self.projection.frames());
            if !frames.is_empty() {
                self.silent_at = Instant::now() + HEARTBEAT_INTERVAL;
                return Some(frames);
            }
            if self.projection.is_over() {
                return None;
            }
            if let Some(read) = self.projection.next_read() {
                let found = read.perform(&self.state).await;
                self.projection.on_found(found);
                continue;
            }
            let end = self.end.as_mut()?;
            let received = async {
                match &mut self.subscription {
                    Some(subscription) => subscription.recv().await,
                    None => std::future::pending().await,
                }
            };
            let is_readable = tokio::select! {
                biased;
                end = end => {
                    self.end = None;
                    let is_readable = self.drain();
                    self.projection.on_end(end);
                    is_readable
                }
                received = received => self.on_received(received),
                () = tokio::time::sleep_until(self.silent_at) => {
                    self.projection.frames().push_str(P::COMMENT);
                    self.projection.on_silence();
                    Ok(())
                }
            };
            is_readable.ok()?;
        }
    }

    pub fn into_response(self) -> Response {
        sse::response(unfold(Box::new(self), |mut driver| async move {
            let frames = driver.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(frames)), driver))
        }))
    }

    /// Takes the events that were published before the end.
    fn drain(&mut self) -> Result<(), DamagedEvent> {
        while let Some(subscription) = &mut self.subscription {
            let received = match subscription.try_recv() {
                Ok(event) => Ok(event),
                Err(TryRecvError::Lagged(count)) => Err(RecvError::Lagged(count)),
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            };
            self.on_received(received)?;
        }
        Ok(())
    }

    fn on_received(
        &mut self,
        received: Result<StreamEvent, RecvError>,
    ) -> Result<(), DamagedEvent> {
        match received {
            Ok(StreamEvent::Stored(event)) => {
                let StoredEvent { seq, run_id, .. } = &*event;
                self.projection.on_event(&event).map_err(|why| {
                    error!(run.id = %run_id, "A stream ends: event {seq} of {run_id} could not be read: {why}");
                    DamagedEvent
                })?;
            }
            Ok(StreamEvent::Live(event)) => self.projection.on_live(&event),
            Err(RecvError::Lagged(_)) => {
                if let Some(subscription) = &mut self.subscription {
                    self.projection.on_lag(subscription);
                }
            }
            Err(RecvError::Closed) => {
                self.subscription = None;
                self.projection.on_unsubscribed();
            }
        }
        Ok(())
    }
}

/// An event is not what was written.
struct DamagedEvent;
