//! The connection to one server. It is opened on first use, reopened after it broke, and closed when idle. One task
//! drives it while it is open.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::environment::Environment;
use crate::domain::mcp::McpTransport;
use crate::instruments::{CallCounters, Family};
use crate::tools::mcp::ConnectionState;
use crate::tools::mcp::driver::Disconnected;
use crate::tools::mcp::failure::{RequestError, RetrySafety, ServerUnavailable};
use crate::tools::mcp::list::{self, ToolList};
use crate::tools::mcp::oauth::sources::TokenSources;
use crate::tools::mcp::open::{self, OpenConnection, OpenError, Opening};
use crate::tools::mcp::session::McpSession;

const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without calls for this long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// A connection that was open this long counts as good, even if it answered no call.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// The most connections beside the last one, so that calls are not on one together.
const MAX_RETIRED: u32 = 64;
/// The first wait before a failed server is tried again. It doubles with each failure.
const INITIAL_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// What all connections share.
pub struct SharedState {
    /// Provides `${VAR}` and the few variables that every server process inherits.
    pub environment: Environment,
    /// Provides access tokens for remote servers.
    pub token_sources: TokenSources,
    /// Owns the task of every open connection.
    pub tasks: TaskTracker,
    /// Closes all connections.
    pub stop: CancellationToken,
    /// Calls of tools by server.
    pub calls: Family<CallCounters>,
}

/// The connection to one server, whether open or not.
pub struct Connection {
    pub name: String,
    transport: McpTransport,
    shared: Arc<SharedState>,
    status: watch::Sender<Status>,
    opening: Opening,
    /// Failures in a row.
    failures: AtomicU32,
    /// Whether the server asks people without saying for which call.
    asks_unnamed: Arc<AtomicBool>,
    /// Connections that take no more calls and wait for their last ones.
    retired: AtomicU32,
    /// The last list, and where it came from.
    cached_list: Mutex<Option<(ListVersion, Arc<ToolList>)>>,
}

/// Identifies a state of the tool list: the session that listed it, and the number of changes that the session had
/// announced.
struct ListVersion {
    session: Weak<McpSession>,
    changes: u64,
}

impl PartialEq for ListVersion {
    fn eq(&self, other: &Self) -> bool {
        self.session.ptr_eq(&other.session) && self.changes == other.changes
    }
}

enum ToolListing {
    /// It has not changed since it was cached.
    Cached(Arc<ToolList>),
    Fresh(ListVersion, ToolList),
}

#[derive(Clone)]
enum Status {
    /// Not needed so far, or ended without a failure.
    Closed,
    /// A task is opening it.
    Opening { since: Instant },
    /// A task drives it.
    Open(Arc<McpSession>),
    /// It is not tried again before `retry_at`.
    Failed { reason: Arc<str>, retry_at: Instant },
}

impl Connection {
    pub fn new(name: String, transport: McpTransport, shared: Arc<SharedState>) -> Self {
        Self {
            name,
            transport,
            shared,
            status: watch::Sender::new(Status::Closed),
            opening: Opening::default(),
            failures: AtomicU32::new(0),
            asks_unnamed: Arc::default(),
            retired: AtomicU32::new(0),
            cached_list: Mutex::default(),
        }
    }

    /// Returns the open session; opens one if there is none. A server that has not started within `open_timeout` goes on
    /// starting, for later callers.
    ///
    /// # Errors
    /// The server cannot be reached, has not started, or failed so recently that it is not tried again yet.
    pub async fn session(
        self: &Arc<Self>,
        open_timeout: Duration,
    ) -> Result<Arc<McpSession>, ServerUnavailable> {
        let mut status = self.status.subscribe();
        let mut has_waited = false;
        loop {
            if self.shared.stop.is_cancelled() {
                return Err(self.unavailable("the daemon is stopping"));
            }
            // A failure that may be retried at once is retried by the next caller.
            if !has_waited || !matches!(*status.borrow(), Status::Failed { .. }) {
                self.open_if_closed();
            }
            let current = status.borrow_and_update().clone();
            match current {
                Status::Open(session) if !session.is_closed() => {
                    session.touch();
                    return Ok(session);
                }
                Status::Failed { reason, .. } => return Err(self.unavailable(&reason)),
                Status::Opening { since } => {
                    let changed = timeout_at(since + open_timeout, status.changed());
                    if changed.await.is_err() {
                        let reason = format!(
                            "it did not answer within {open_timeout:?}; it is still starting, and later runs may use it"
                        );
                        return Err(self.unavailable(&self.opening.explain(&reason)));
                    }
                }
                // Cannot fail: `self` holds the sender.
                Status::Open(_) | Status::Closed => drop(status.changed().await),
            }
            has_waited = true;
        }
    }

    /// Returns the server's tools as they are now.
    ///
    /// # Errors
    /// As [`Connection::session`], or the tools cannot be listed.
    pub async fn list_tools(
        self: &Arc<Self>,
        open_timeout: Duration,
    ) -> Result<Arc<ToolList>, ServerUnavailable> {
        let listing = match self.try_list_tools(open_timeout).await {
            Err(RequestError::Failed(failure)) if failure.retry != RetrySafety::Never => {
                self.try_list_tools(open_timeout).await
            }
            listing => listing,
        };
        let listing = listing.map_err(|error| match error {
            RequestError::Unavailable(error) => error,
            RequestError::Failed(failure) => {
                self.unavailable(&format!("its tools cannot be listed: {}", failure.reason))
            }
        })?;
        let (version, tool_list) = match listing {
            ToolListing::Cached(tool_list) => return Ok(tool_list),
            ToolListing::Fresh(version, tool_list) => (version, tool_list),
        };
        let logged = self.cached_tools();
        if logged.is_none_or(|cached| cached.skipped != tool_list.skipped) {
            for warning in &tool_list.skipped {
                tracing::warn!("{warning}");
            }
        }
        let tool_list = Arc::new(tool_list);
        *self.lock_cached_list() = Some((version, Arc::clone(&tool_list)));
        Ok(tool_list)
    }

    /// One attempt to list the tools.
    async fn try_list_tools(
        self: &Arc<Self>,
        open_timeout: Duration,
    ) -> Result<ToolListing, RequestError> {
        let session = self.session(open_timeout).await?;
        let version = ListVersion {
            session: Arc::downgrade(&session),
            changes: session.list_changes(),
        };
        if let Some((cached_version, tool_list)) = &*self.lock_cached_list()
            && *cached_version == version
            && session.has_change_notifications()
        {
            return Ok(ToolListing::Cached(Arc::clone(tool_list)));
        }
        let list_timeout = LIST_TIMEOUT.max(open_timeout);
        let listing = list::list_tools(&self.name, &session);
        match tokio::time::timeout(list_timeout, listing).await {
            Ok(tool_list) => Ok(ToolListing::Fresh(version, tool_list?)),
            Err(_) => {
                // A server that does not list its tools will not perform calls: the next request opens a new connection.
                let reason = format!("it did not list its tools within {list_timeout:?}");
                session.close(&reason);
                Err(self.unavailable(&reason).into())
            }
        }
    }

    /// The tools that the server listed last.
    pub fn cached_tools(&self) -> Option<Arc<ToolList>> {
        self.lock_cached_list()
            .as_ref()
            .map(|(_, tool_list)| Arc::clone(tool_list))
    }

    pub fn state(&self) -> ConnectionState {
        match &*self.status.borrow() {
            Status::Open(session) if !session.is_closed() => ConnectionState::Open,
            Status::Closed | Status::Open(_) => ConnectionState::Closed,
            Status::Opening { .. } => ConnectionState::Opening,
            Status::Failed { reason, .. } => ConnectionState::Failed(Arc::clone(reason)),
        }
    }

    /// Whether the server could be connected to when that was last tried.
    pub fn is_up(&self) -> bool {
        match &*self.status.borrow() {
            Status::Failed { .. } => false,
            Status::Opening { .. } => self.failures.load(Ordering::Relaxed) == 0,
            Status::Open(_) | Status::Closed => true,
        }
    }

    /// Whether no call is made on a connection with another call, because the server does not say which one a question is about.
    pub fn separates_calls(&self) -> bool {
        self.asks_unnamed.load(Ordering::Relaxed)
            && self.retired.load(Ordering::Relaxed) < MAX_RETIRED
    }

    pub fn count_call(&self, is_error: bool) {
        self.shared.calls.with(&self.name, |counters| {
            counters.calls.increment();
            if is_error {
                counters.errors.increment();
            }
        });
    }

    /// Call this after a successful call.
    pub fn reset_failures(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    fn unavailable(&self, reason: &str) -> ServerUnavailable {
        ServerUnavailable {
            server: self.name.clone(),
            reason: reason.to_owned(),
        }
    }

    fn lock_cached_list(&self) -> std::sync::MutexGuard<'_, Option<(ListVersion, Arc<ToolList>)>> {
        self.cached_list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn open_if_closed(self: &Arc<Self>) {
        let should_open = self.status.send_if_modified(|status| {
            let should_open = match status {
                Status::Closed => true,
                Status::Failed {
                    retry_at: until, ..
                } => *until <= Instant::now(),
                Status::Opening { .. } | Status::Open(_) => false,
            };
            if should_open {
                *status = Status::Opening {
                    since: Instant::now(),
                };
            }
            should_open
        });
        if should_open {
            self.shared.tasks.spawn(Arc::clone(self).run());
        }
    }

    /// Opens the connection and drives it until it ends. Each connection has at most one such task.
    async fn run(self: Arc<Self>) {
        // Resets the status even if this task panics, so nobody waits for it for ever.
        let close_guard = CloseOnDrop(&self);
        let stop = &self.shared.stop;
        let name = &self.name;
        let opened = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            opened = open::open(name, &self.transport, &self.shared.environment, &self.shared.token_sources, &self.opening, &self.asks_unnamed) => opened,
        };
        let OpenConnection {
            session,
            mut driver,
        } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let (reason, backoff) = match error {
                    OpenError::Failed(reason) => (reason, self.next_backoff()),
                    // A login that is made now is to be used by the next run.
                    OpenError::LoginNeeded(reason) => (reason, Duration::ZERO),
                };
                tracing::warn!("MCP server {name} cannot be connected to: {reason}");
                self.set_failed(&reason, backoff);
                return;
            }
        };
        tracing::info!("Connected to MCP server {name} ({})", self.transport.name());
        let opened_at = Instant::now();
        self.status.send_replace(Status::Open(Arc::clone(&session)));
        let disconnected = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            disconnected = driver.wait_closed() => Some(disconnected),
            () = session.wait_retired() => None,
            () = session.wait_unused_for(IDLE_TIMEOUT) => None,
        };
        if let Some(Disconnected(reason)) = disconnected {
            tracing::warn!("The connection to MCP server {name} broke: {reason}");
            match session.has_answered() || opened_at.elapsed() >= STABLE_AFTER {
                true => drop(self.status.send_replace(Status::Closed)),
                false => self.set_failed(&reason, self.next_backoff()),
            }
            return;
        }
        // From here on the status belongs to the next task, which a new call may start.
        drop(close_guard);
        self.retired.fetch_add(1, Ordering::Relaxed);
        // A server that failed one call may still answer others.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            _ = driver.wait_closed() => {}
            () = session.wait_idle() => {}
        }
        self.retired.fetch_sub(1, Ordering::Relaxed);
        driver.close().await;
        tracing::info!("Closed the connection to MCP server {name}");
    }

    /// How long the server is not tried after another failure.
    fn next_backoff(&self) -> Duration {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed);
        INITIAL_BACKOFF
            .saturating_mul(1 << failures.min(10))
            .min(MAX_BACKOFF)
    }

    fn set_failed(&self, reason: &str, backoff: Duration) {
        self.status.send_replace(Status::Failed {
            reason: reason.into(),
            retry_at: Instant::now() + backoff,
        });
    }
}

/// Marks the connection as closed when its task ends, even by a panic.
struct CloseOnDrop<'c>(&'c Connection);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.status.send_if_modified(|status| {
            let is_open = matches!(status, Status::Opening { .. } | Status::Open(_));
            if is_open {
                *status = Status::Closed;
            }
            is_open
        });
    }
}
