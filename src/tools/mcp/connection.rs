//! The connection to one server: opened when it is first needed, kept by one task, opened again when it broke, closed
//! when nobody needs it. Knows no run.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::domain::mcp::McpTransport;
use crate::tools::mcp::Common;
use crate::tools::mcp::failure::{Failure, Repeat};
use crate::tools::mcp::link::{self, Ended, Keeper, Link};
use crate::tools::mcp::list::{self, Listed};

/// The longest that a list of tools may take.
const LISTING: Duration = Duration::from_secs(10);
/// After how long without a call one is closed.
const IDLE: Duration = Duration::from_secs(300);
/// A connection that held this long was a good one.
const GOOD: Duration = Duration::from_secs(60);
/// The first wait before a server that failed is tried again; doubles with each failure.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// The longest such wait.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// The connection to one server, open or not.
pub struct Connection {
    /// The server's name.
    pub name: String,
    transport: McpTransport,
    common: Arc<Common>,
    status: watch::Sender<Status>,
    /// Failures since it last was good.
    failures: AtomicU32,
    /// The last list, with the link and the change of the list that it is from.
    known: Mutex<Option<(Known, Arc<Listed>)>>,
}

/// What a list is from: a link, and how many changes it had told.
type Known = (Weak<Link>, u64);

/// A list of tools.
enum List {
    /// It has not changed since.
    Known(Arc<Listed>),
    /// Just listed.
    New(Listed),
}

#[derive(Clone)]
enum Status {
    /// Nobody has needed it, or it ended as it may.
    Closed,
    /// A task opens it.
    Opening,
    /// A task keeps it.
    Open(Arc<Link>),
    /// It is not tried again before this moment.
    Failed { why: Arc<str>, until: Instant },
}

impl Connection {
    /// A closed one.
    pub fn new(name: String, transport: McpTransport, common: Arc<Common>) -> Self {
        Self {
            name,
            transport,
            common,
            status: watch::Sender::new(Status::Closed),
            failures: AtomicU32::new(0),
            known: Mutex::default(),
        }
    }

    /// The open connection; opens it where it is not.
    ///
    /// # Errors
    /// Why there is none, for the model, naming the server.
    pub async fn link(self: &Arc<Self>) -> Result<Arc<Link>, String> {
        let mut status = self.status.subscribe();
        loop {
            if self.common.stop.is_cancelled() {
                return Err(self.unavailable("the daemon is stopping"));
            }
            self.open_if_closed();
            let seen = status.borrow_and_update().clone();
            match seen {
                Status::Open(link) if !link.is_closed() => {
                    link.touch();
                    return Ok(link);
                }
                Status::Failed { why, .. } => return Err(self.unavailable(&why)),
                Status::Open(_) | Status::Opening | Status::Closed => {}
            }
            // The sender is ours: it is there as long as we are.
            let _ = status.changed().await;
        }
    }

    /// Its tools as they are now.
    ///
    /// # Errors
    /// As [`Connection::link`], or why they cannot be listed.
    pub async fn tools(self: &Arc<Self>) -> Result<Arc<Listed>, String> {
        let (link, changes, listed) = match self.list().await? {
            Err(failure) if failure.repeat != Repeat::Never => self.list().await?,
            listed => listed,
        }
        .map_err(|failure| {
            let why = format!("its tools cannot be listed: {}", failure.why);
            self.unavailable(&why)
        })?;
        let listed = match listed {
            List::Known(listed) => return Ok(listed),
            List::New(listed) => listed,
        };
        let told = self.known().map(|known| known.left_out.clone());
        if told.is_none_or(|told| told != listed.left_out) {
            for told in &listed.left_out {
                tracing::warn!("{told}");
            }
        }
        let listed = Arc::new(listed);
        *self.lock_known() = Some(((Arc::downgrade(&link), changes), Arc::clone(&listed)));
        Ok(listed)
    }

    /// One attempt to list its tools.
    ///
    /// # Errors
    /// There is no connection.
    async fn list(self: &Arc<Self>) -> Result<Result<(Arc<Link>, u64, List), Failure>, String> {
        let link = self.link().await?;
        let changes = link.changes();
        if let Some(((from, at), listed)) = &*self.lock_known()
            && from.as_ptr() == Arc::as_ptr(&link)
            && *at == changes
            && link.tells_changes()
        {
            let known = List::Known(Arc::clone(listed));
            return Ok(Ok((Arc::clone(&link), changes, known)));
        }
        let listing = tokio::time::timeout(LISTING, list::all(&self.name, &link));
        match listing.await {
            Ok(listed) => Ok(listed.map(|listed| (link, changes, List::New(listed)))),
            Err(_) => {
                // Who does not list its tools will not perform them: the next one that asks need not wait as long.
                let why = format!("it did not list its tools within {LISTING:?}");
                link.give_up(&why);
                Err(self.unavailable(&why))
            }
        }
    }

    /// Its tools as they were when it last told them.
    pub fn known(&self) -> Option<Arc<Listed>> {
        self.lock_known()
            .as_ref()
            .map(|(_, listed)| Arc::clone(listed))
    }

    /// A call was answered: the server is well.
    pub fn is_well(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    /// The sentence that says why a call or a list failed.
    pub fn unavailable(&self, why: &str) -> String {
        format!("MCP server \"{}\" is not available: {why}", self.name)
    }

    fn lock_known(&self) -> std::sync::MutexGuard<'_, Option<(Known, Arc<Listed>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_if_closed(self: &Arc<Self>) {
        let opens = self.status.send_if_modified(|status| {
            let opens = match status {
                Status::Closed => true,
                Status::Failed { until, .. } => *until <= Instant::now(),
                Status::Opening | Status::Open(_) => false,
            };
            if opens {
                *status = Status::Opening;
            }
            opens
        });
        if opens {
            self.common.tasks.spawn(Arc::clone(self).keep());
        }
    }

    /// Opens it and keeps it to its end. The one task of a connection.
    async fn keep(self: Arc<Self>) {
        // Whatever happens in here, nobody waits for ever for this task.
        let end = End(&self);
        let stop = &self.common.stop;
        let name = &self.name;
        let opened = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            opened = link::open(name, &self.transport, &self.common.environment) => opened,
        };
        let Keeper { link, mut running } = match opened {
            Ok(keeper) => keeper,
            Err(why) => {
                tracing::warn!("MCP server {name} cannot be connected to: {why}");
                self.failed(&why);
                return;
            }
        };
        tracing::info!("Connected to MCP server {name} ({})", self.transport.name());
        let since = Instant::now();
        self.status.send_replace(Status::Open(Arc::clone(&link)));
        let ended = tokio::select! {
            biased;
            () = stop.cancelled() => None,
            ended = running.ended() => Some(ended),
            () = link.retired() => None,
            () = link.idle_for(IDLE) => None,
        };
        if let Some(Ended(why)) = ended {
            tracing::warn!("The connection to MCP server {name} broke: {why}");
            match link.has_answered() || since.elapsed() >= GOOD {
                true => drop(self.status.send_replace(Status::Closed)),
                false => self.failed(&why),
            }
            return;
        }
        // Whoever comes from here on opens a new one, whose status is no longer this task's.
        drop(end);
        // A server that failed one call may still answer others.
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            _ = running.ended() => {}
            () = link.unused() => {}
        }
        running.close().await;
        tracing::info!("Closed the connection to MCP server {name}");
    }

    fn failed(&self, why: &str) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed);
        let wait = FIRST_WAIT
            .saturating_mul(1 << failures.min(10))
            .min(MOST_WAIT);
        self.status.send_replace(Status::Failed {
            why: why.into(),
            until: Instant::now() + wait,
        });
    }
}

/// Closes the connection for those who wait for it when its task ends, also by a panic.
struct End<'c>(&'c Connection);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.status.send_if_modified(|status| {
            let is_open = matches!(status, Status::Opening | Status::Open(_));
            if is_open {
                *status = Status::Closed;
            }
            is_open
        });
    }
}
