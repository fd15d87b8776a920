//! Watches the daemon during a soak, from threads that do nothing else: how long `/livez` takes, and what `/readyz` answers.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest that `/livez` may take; a daemon that is not optimised gets ten times as long.
pub const LIVEZ_LIMIT: Duration =
    Duration::from_millis(if cfg!(debug_assertions) { 1_000 } else { 100 });
/// The most that a bare server takes if the machine is not the cause.
const BARE_LIMIT: Duration = Duration::from_millis(25);
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Shared by its threads. Cheap to clone.
#[derive(Clone, Default)]
pub struct HealthMonitor {
    observations: Arc<Mutex<Observations>>,
    /// Odd while the process is stopped.
    pauses: Arc<AtomicU64>,
}

/// What was seen since it was last taken.
#[derive(Debug, Default)]
pub struct Observations {
    /// The longest answer to `/livez`.
    pub max_livez: Duration,
    /// The longest answer of a bare server on this machine.
    pub max_bare: Duration,
    /// Answers to `/livez` that came too late, with their beginning and end.
    late: Vec<(Instant, Instant)>,
    /// Answers of the bare server that the machine made late.
    disturbed: Vec<(Instant, Instant)>,
    /// When `/readyz` was requested, and its status; 0 for none.
    pub readyz: Vec<(Instant, u16)>,
}

impl Observations {
    /// Answers to `/livez` that came too late although the machine had time.
    pub fn late_count(&self) -> usize {
        let excused = |late: &(Instant, Instant)| {
            let mut disturbed = self.disturbed.iter();
            disturbed.any(|(begin, end)| *begin < late.1 && *end > late.0)
        };
        self.late.iter().filter(|late| !excused(late)).count()
    }
}

impl HealthMonitor {
    /// Watches the daemon at this `host:port` for as long as this process lives.
    pub fn start(address: &str) -> Self {
        let monitor = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let bare = listener.local_addr().expect("an address").to_string();
        std::thread::spawn(move || serve_bare(&listener));
        monitor.spawn(
            &bare,
            "/",
            Duration::from_millis(20),
            |seen, begin, end, _| {
                seen.max_bare = seen.max_bare.max(end - begin);
                if end - begin > BARE_LIMIT {
                    seen.disturbed.push((begin, end));
                }
            },
        );
        monitor.spawn(
            address,
            "/livez",
            Duration::from_millis(20),
            |seen, begin, end, _| {
                seen.max_livez = seen.max_livez.max(end - begin);
                if end - begin > LIVEZ_LIMIT {
                    seen.late.push((begin, end));
                }
            },
        );
        monitor.spawn(
            address,
            "/readyz",
            Duration::from_millis(200),
            |seen, begin, _, status| {
                seen.readyz.push((begin, status));
            },
        );
        monitor
    }

    /// What was seen since the last time.
    pub fn take(&self) -> Observations {
        std::mem::take(&mut *self.lock())
    }

    /// When `/readyz` was first answered 200 to a request sent after `since`, while it is not taken.
    pub fn ready_after(&self, since: Instant) -> Option<Instant> {
        let observations = self.lock();
        let mut ready = observations.readyz.iter();
        ready
            .find(|(begin, status)| *begin > since && *status == 200)
            .map(|(begin, _)| *begin)
    }

    /// The process is stopped: measurements do not count.
    pub fn pause(&self) {
        self.pauses.fetch_add(1, Ordering::SeqCst);
    }

    /// It continues.
    pub fn resume(&self) {
        self.pauses.fetch_add(1, Ordering::SeqCst);
    }

    fn spawn(
        &self,
        address: &str,
        path: &str,
        pause: Duration,
        mut record: impl FnMut(&mut Observations, Instant, Instant, u16) + Send + 'static,
    ) {
        let monitor = self.clone();
        let (address, path) = (address.to_owned(), path.to_owned());
        std::thread::spawn(move || {
            let mut connection = None;
            loop {
                std::thread::sleep(pause);
                let pauses = monitor.pauses.load(Ordering::SeqCst);
                let begin = Instant::now();
                let status = exchange(&mut connection, &address, &path).unwrap_or_else(|_| {
                    connection = None;
                    0
                });
                let end = Instant::now();
                if pauses.is_multiple_of(2) && monitor.pauses.load(Ordering::SeqCst) == pauses {
                    record(&mut monitor.lock(), begin, end, status);
                }
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, Observations> {
        self.observations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request on a connection that is kept; the answer's status.
fn exchange(connection: &mut Option<TcpStream>, address: &str, path: &str) -> io::Result<u16> {
    let stream = match connection {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(READ_TIMEOUT))?;
            connection.insert(stream)
        }
    };
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").as_bytes())?;
    let mut response = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        response.extend_from_slice(&bytes[..read]);
        let text = String::from_utf8_lossy(&response).to_ascii_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let field = |name| head.lines().find_map(|line| line.strip_prefix(name));
        let length = field("content-length:").and_then(|text| text.trim().parse().ok());
        if body.len() >= length.unwrap_or(0) {
            let status = head.split(' ').nth(1).and_then(|text| text.parse().ok());
            return status.ok_or_else(|| io::ErrorKind::InvalidData.into());
        }
    }
}

/// Answers whatever comes on one connection, for ever: shows what the machine lets a server do.
fn serve_bare(listener: &TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        let _ = stream.set_nodelay(true);
        let mut bytes = [0; 4096];
        while stream.read(&mut bytes).is_ok_and(|read| read > 0) {
            let response = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            if stream.write_all(response).is_err() {
                break;
            }
        }
    }
}
