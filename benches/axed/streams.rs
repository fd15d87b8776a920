//! What a stream through `/v1/chat/completions` adds to the delay of each chunk. The provider writes the time into its
//! chunks; clients compare it with the time at which they read them, on the same machine's clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::load::request;
use crate::pin::Cores;
use crate::process::Process;
use crate::table::Table;

const ROUNDS: usize = 3;
/// The provider's model: 200 chunks, 10 ms apart.
const MODEL: &str = "stream-200-10";
/// Streams at once.
const CLIENTS: [usize; 2] = [1, 16];
/// The most that the daemon may add at the median, in milliseconds.
const MAX_ADDED_MS: f64 = 1.0;

/// Delays of all chunks, sorted.
struct Delays(Vec<Duration>);

/// Measures the provider alone, through the bare handler and through the daemon, in turn.
pub async fn measure(table: &mut Table) {
    table.title("streams: the delay of each chunk, 200 chunks 10 ms apart");
    let cores = Cores::split();
    let provider = cores.beside(|| Process::provider(Duration::ZERO));
    let bare = cores.measured(|| Process::bare(&provider));
    let agents = [("stream", format!("model = \"bench/{MODEL}\""))];
    let agents: Vec<(&str, &str)> = agents.iter().map(|(name, it)| (*name, &**it)).collect();
    let axed = cores.measured(|| Process::axed_with(&provider, "", &agents));
    let targets = [
        (&provider, "/v1/chat/completions", MODEL),
        (&bare, "/stream", MODEL),
        (&axed, "/v1/chat/completions", "stream"),
    ];
    for clients in CLIENTS {
        let mut delays = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for ((process, path, model), delays) in targets.iter().zip(&mut delays) {
                let body = format!(
                    r#"{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Say hello."}}]}}"#
                );
                let request = request(&process.address, path, &body);
                let streams = (0..clients).map(|_| read_stream(&process.address, &request));
                delays.extend(join_all(streams).await.into_iter().flatten());
            }
        }
        let [alone, bare, axed] = delays.map(Delays::new);
        let names = ["provider alone", "bare handler", "axed"];
        for (name, delays) in names.iter().zip([&alone, &bare, &axed]) {
            let (median, p99) = (delays.quantile(0.5), delays.quantile(0.99));
            table.note(&format!(
                "{name:<16} {clients:>2} clients  median {median:>9.3?}  p99 {p99:>9.3?}  {} chunks",
                delays.0.len()
            ));
        }
        let added = |delays: &Delays, part: f64| {
            let (through, alone) = (delays.quantile(part), alone.quantile(part));
            (through.as_secs_f64() - alone.as_secs_f64()) * 1e3
        };
        let title = |of: &str| format!("milliseconds added by {of}, {clients} clients");
        table.number(&title("the bare handler, median"), added(&bare, 0.5));
        table.at_most(&title("axed, median"), added(&axed, 0.5), MAX_ADDED_MS);
        table.number(&title("axed, p99"), added(&axed, 0.99));
    }
}

/// The delay of each chunk of one stream.
async fn read_stream(address: &str, request: &[u8]) -> Vec<Duration> {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.set_nodelay(true).expect("an option");
    stream.write_all(request).await.expect("a request");
    let (mut delays, mut unread) = (Vec::new(), String::new());
    let mut buffer = vec![0; 64 << 10];
    while !unread.contains("[DONE]") {
        let count = stream.read(&mut buffer).await.expect("a chunk");
        assert!(count > 0, "the stream ended early: {unread}");
        let now = since_epoch();
        unread.push_str(&String::from_utf8_lossy(&buffer[..count]));
        // The times are `@<nanoseconds>;` in the text.
        while let Some((before, rest)) = unread.split_once(';') {
            if let Some((_, time)) = before.rsplit_once('@')
                && let Ok(nanos) = time.parse()
            {
                delays.push(now.saturating_sub(Duration::from_nanos(nanos)));
            }
            unread = rest.to_owned();
        }
    }
    delays
}

/// The time that both ends of a stream read.
pub fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a time after 1970")
}

impl Delays {
    fn new(mut delays: Vec<Duration>) -> Self {
        delays.sort();
        Self(delays)
    }

    fn quantile(&self, part: f64) -> Duration {
        let at = (self.0.len() as f64 * part) as usize;
        self.0[at.min(self.0.len() - 1)]
    }
}
