//! Pending connections: those whose first request is not complete. Opening one needs no key, so their number is limited, per
//! address and in total; above a limit the oldest is closed. Later requests of a connection do not count, because a
//! reverse proxy keeps many connections from one address.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use rustix::process::{Resource, getrlimit};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::config;
use crate::web::server::forwarded::ClientAddress;

/// The minimum time of each connection, so that many clients may connect at once and send their requests then.
const GRACE_PERIOD: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug)]
pub struct PendingLimits {
    /// Per address; per /64 network for IPv6.
    pub per_address: usize,
    pub total: usize,
}

impl PendingLimits {
    /// The configured limits, but at most half of the files that this process may open: the store, tools and other
    /// connections need the rest.
    pub fn new(server: &config::Server) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2;
        let files = usize::try_from(files).unwrap_or(usize::MAX).max(1);
        Self {
            per_address: server.max_pending_per_address,
            total: server.max_pending_connections.min(files),
        }
    }
}

/// The pending connections of one listener.
#[derive(Debug)]
pub struct PendingConnections {
    limits: PendingLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By number, oldest first.
    connections: BTreeMap<u64, Entry>,
    addresses: HashMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Entry {
    address: IpAddr,
    close: oneshot::Sender<()>,
}

impl PendingConnections {
    pub fn new(limits: PendingLimits) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { limits, state })
    }

    /// Adds a connection that was just accepted. If that exceeds a limit, the oldest connection is closed.
    pub fn add(self: &Arc<Self>, peer: IpAddr) -> (Arc<PendingConnection>, CloseSignal) {
        let address = ClientAddress(peer).network();
        let (close, closed) = oneshot::channel();
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.connections.insert(number, Entry { address, close });
        let same = state.addresses.entry(address).or_default();
        same.insert(number);
        let oldest = if same.len() > self.limits.per_address {
            same.first().copied()
        } else if state.connections.len() > self.limits.total {
            state.connections.keys().next().copied()
        } else {
            None
        };
        if let Some(entry) = oldest.and_then(|oldest| state.remove(oldest)) {
            // The receiver is gone if the connection has ended in the meantime.
            let _ = entry.close.send(());
        }
        drop(state);
        let connection = Arc::new(PendingConnection {
            peer,
            list: Arc::clone(self),
            number,
            is_settled: AtomicBool::new(false),
        });
        let close_signal = CloseSignal {
            connection: Arc::clone(&connection),
            since: Instant::now(),
            closed,
        };
        (connection, close_signal)
    }

    /// Closes all of them, to free file descriptors.
    pub fn close_all(&self) {
        let mut state = self.lock();
        state.addresses.clear();
        let all = std::mem::take(&mut state.connections);
        drop(state);
        for entry in all.into_values() {
            let _ = entry.close.send(());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.connections.remove(&number)?;
        if let Some(same) = self.addresses.get_mut(&entry.address) {
            same.remove(&number);
            if same.is_empty() {
                self.addresses.remove(&entry.address);
            }
        }
        Some(entry)
    }
}

/// A connection that is pending until [`PendingConnection::settle`], or until it is dropped.
#[derive(Debug)]
pub struct PendingConnection {
    peer: IpAddr,
    list: Arc<PendingConnections>,
    number: u64,
    is_settled: AtomicBool,
}

impl PendingConnection {
    /// The first request is complete, or has been answered before that.
    pub fn settle(&self) {
        if !self.is_settled.swap(true, Ordering::Relaxed) {
            self.list.lock().remove(self.number);
        }
    }

    /// The address that the connection comes from.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    pub fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Relaxed)
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Tells when a pending connection has to be closed.
#[derive(Debug)]
pub struct CloseSignal {
    connection: Arc<PendingConnection>,
    since: Instant,
    closed: oneshot::Receiver<()>,
}

impl CloseSignal {
    /// True when the connection has to be closed, because a limit is exceeded or `timeout` is over; false if its first
    /// request is complete by then.
    pub async fn should_close(self, timeout: Duration) -> bool {
        let close_result = timeout_at(self.since + timeout, self.closed).await;
        if let Ok(Ok(())) = close_result {
            sleep_until(self.since + GRACE_PERIOD).await;
        }
        !self.connection.is_settled()
    }
}

/// The body of a connection's first request: settles the connection when it is complete.
pub struct FirstBody {
    body: Incoming,
    connection: Arc<PendingConnection>,
}

impl FirstBody {
    /// Settles the connection at once if there is no body.
    pub fn new(body: Incoming, connection: Arc<PendingConnection>) -> Self {
        if body.is_end_stream() {
            connection.settle();
        }
        Self { body, connection }
    }
}

impl Body for FirstBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.connection.settle();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use super::{CloseSignal, PendingConnections, PendingLimits};
    use crate::web::server::forwarded::ClientAddress;

    const LONG: Duration = Duration::from_secs(3600);
    const LIMITS: PendingLimits = PendingLimits {
        per_address: 2,
        total: 4,
    };

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn is_undecided(close_signal: &mut CloseSignal) -> bool {
        close_signal.closed.try_recv().is_err()
    }

    #[tokio::test]
    async fn above_the_limit_of_an_address_its_oldest_is_closed() {
        let list = PendingConnections::new(LIMITS);
        let (_other, mut other) = list.add(ip("10.0.0.2"));
        let (_first, first) = list.add(ip("10.0.0.1"));
        let (second, second_signal) = list.add(ip("10.0.0.1"));
        let (_third, mut third) = list.add(ip("10.0.0.1"));
        assert!(first.should_close(LONG).await);
        assert!(is_undecided(&mut other) && is_undecided(&mut third));
        second.settle();
        assert!(!second_signal.should_close(LONG).await);
        // The settled connection does not count any more.
        let (_fourth, _overdue) = list.add(ip("10.0.0.1"));
        assert!(is_undecided(&mut third));
    }

    #[tokio::test]
    async fn above_the_total_limit_the_oldest_is_closed() {
        let list = PendingConnections::new(LIMITS);
        let mut all: Vec<_> = (1..=5)
            .map(|n| list.add(ip(&format!("10.0.0.{n}"))))
            .collect();
        let (_connection, oldest) = all.remove(0);
        assert!(oldest.should_close(LONG).await);
        assert!(all.iter_mut().all(|(_, overdue)| is_undecided(overdue)));
        drop(all);
        assert!(list.lock().connections.is_empty() && list.lock().addresses.is_empty());
    }

    #[tokio::test]
    async fn a_request_within_the_grace_period_is_in_time() {
        let list = PendingConnections::new(LIMITS);
        let (connection, close_signal) = list.add(ip("10.0.0.1"));
        let more: Vec<_> = (0..2).map(|_| list.add(ip("10.0.0.1"))).collect();
        connection.settle();
        assert!(!close_signal.should_close(LONG).await);
        drop(more);
    }

    #[tokio::test]
    async fn closing_all_resets_the_counts() {
        let list = PendingConnections::new(LIMITS);
        let (_one, one_signal) = list.add(ip("10.0.0.1"));
        let (two, two_signal) = list.add(ip("10.0.0.1"));
        list.close_all();
        two.settle();
        assert!(one_signal.should_close(LONG).await && !two_signal.should_close(LONG).await);
        let mut more: Vec<_> = (0..2).map(|_| list.add(ip("10.0.0.1"))).collect();
        assert!(more.iter_mut().all(|(_, overdue)| is_undecided(overdue)));
    }

    #[tokio::test]
    async fn a_pending_connection_times_out() {
        let list = PendingConnections::new(LIMITS);
        let (_connection, close_signal) = list.add(ip("10.0.0.1"));
        assert!(close_signal.should_close(Duration::from_millis(10)).await);
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let network = |peer| ClientAddress(peer).network();
        assert_eq!(
            network(ip("2001:db8::1:2")),
            network(ip("2001:db8::ffff:3"))
        );
        assert_ne!(network(ip("2001:db8:0:1::1")), network(ip("2001:db8::1")));
        assert_eq!(network(ip("::ffff:10.0.0.1")), ip("10.0.0.1"));
    }
}
