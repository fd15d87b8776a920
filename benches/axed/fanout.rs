//! Many clients that follow the events of one run: all get everything, and none makes the others wait.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::load;
use crate::process::Process;
use crate::table::Table;

/// Clients that follow one run, and how many of them read nothing for a while.
const CLIENTS: usize = 1000;
const SLOW_CLIENTS: usize = 50;

const AGENTS: [(&str, &str); 1] = [(
    "wide",
    "model = \"bench/gate-fan-50-solo\"\nsub_agents = [\"solo\"]",
)];

/// Follows runs of 51 runs' events.
pub async fn measure(table: &mut Table) {
    table.title(&format!(
        "event fan-out: a run with 50 children, followed by {CLIENTS} clients"
    ));
    let baseline = measure_fanout(0, 0).await;
    table.number(
        "milliseconds the run takes when nobody follows",
        baseline.run_ms,
    );
    let all_fast = measure_fanout(CLIENTS, 0).await;
    let with_slow = measure_fanout(CLIENTS, SLOW_CLIENTS).await;
    table.number("events", all_fast.events as f64);
    table.at_most(
        "clients that missed an event",
        (all_fast.missed + with_slow.missed) as f64,
        0.0,
    );
    table.number(
        "milliseconds until the last client has the last event",
        all_fast.last_ms,
    );
    table.number(
        "deliveries a second, in thousands",
        (all_fast.events as usize * CLIENTS) as f64 / all_fast.last_ms,
    );
    table.number(
        &format!("milliseconds where {SLOW_CLIENTS} of them read nothing"),
        with_slow.last_ms,
    );
    table.at_most("KiB a client that follows", all_fast.kib_per_client, 20.0);
    table.number("KiB a client at the most", all_fast.peak_kib_per_client);
    table.number(
        "KiB a client at the most, some slow",
        with_slow.peak_kib_per_client,
    );
}

struct FanoutResult {
    /// Milliseconds from the gate's opening to the run's end.
    run_ms: f64,
    /// Milliseconds from the gate's opening until every client that reads has everything.
    last_ms: f64,
    /// The run's last event.
    events: u64,
    /// Clients that did not get every number once.
    missed: usize,
    /// Memory of the daemon for each client before the gate opens.
    kib_per_client: f64,
    /// The same at its highest.
    peak_kib_per_client: f64,
}

async fn measure_fanout(clients: usize, slow: usize) -> FanoutResult {
    let provider = Process::provider(Duration::ZERO);
    let axed = Process::axed_with(&provider, "", &AGENTS);
    // What the first run and the first stream leave behind is not a client's.
    let id = load::start_run(&axed.address, "solo").await;
    Subscriber::connect(&axed.address, &id)
        .await
        .read_to_end()
        .await;
    let id = load::start_run(&axed.address, "wide").await;
    load::wait_for_body(&provider.address, "/busy", "1").await;
    let before = axed.resident_kib();
    let mut subscribers = Vec::with_capacity(clients);
    while subscribers.len() < clients {
        let batch = (clients - subscribers.len()).min(100);
        subscribers
            .extend(join_all((0..batch).map(|_| Subscriber::connect(&axed.address, &id))).await);
    }
    let last_event = get_run(&axed, &id).await["last_event"].as_u64();
    let last_event = last_event.expect("a number");
    join_all(
        subscribers
            .iter_mut()
            .map(|subscriber| subscriber.read_until(last_event)),
    )
    .await;
    let per_client = |kib: u64| kib.saturating_sub(before) as f64 / clients.max(1) as f64;
    let kib_per_client = per_client(axed.resident_kib());

    let readers = subscribers.split_off(slow);
    let begin = Instant::now();
    load::post(&provider.address, "/gate", "").await;
    let milliseconds = || begin.elapsed().as_secs_f64() * 1000.0;
    let ended = async {
        load::get(&axed.address, &format!("/runs/{id}?wait=60")).await;
        milliseconds()
    };
    let following = async {
        let ends = join_all(readers.into_iter().map(Subscriber::read_to_end)).await;
        (ends, milliseconds())
    };
    let (run_ms, (mut ends, last_ms)) = tokio::join!(ended, following);
    ends.extend(join_all(subscribers.into_iter().map(Subscriber::read_to_end)).await);
    let run = get_run(&axed, &id).await;
    assert_eq!(run["status"], "completed", "{run}");
    let events = run["last_event"].as_u64().expect("a number");
    FanoutResult {
        run_ms,
        last_ms,
        events,
        missed: ends.iter().filter(|end| **end != Some(events)).count(),
        kib_per_client,
        peak_kib_per_client: per_client(axed.peak_kib()),
    }
}

async fn get_run(axed: &Process, id: &str) -> serde_json::Value {
    let body = load::get(&axed.address, &format!("/runs/{id}")).await;
    serde_json::from_str(&body).expect("JSON")
}

/// One client, which keeps no more than the line it is at.
struct Subscriber {
    stream: TcpStream,
    line: Vec<u8>,
    /// The last number; none after a gap.
    last: Option<u64>,
}

impl Subscriber {
    async fn connect(address: &str, id: &str) -> Self {
        let mut stream = TcpStream::connect(address).await.expect("connect");
        let request = format!(
            "GET /runs/{id}/events HTTP/1.1\r\nhost: {address}\r\naccept: text/event-stream\r\n\
             connection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("ask");
        Self {
            stream,
            line: Vec::new(),
            last: Some(0),
        }
    }

    async fn read_until(&mut self, number: u64) {
        while self.last.is_some_and(|last| last < number) {
            assert!(self.read().await, "the stream ended too early");
        }
    }

    async fn read_to_end(mut self) -> Option<u64> {
        while self.read().await {}
        self.last
    }

    /// Reads what has come; false at the end.
    async fn read(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        let read = self.stream.read(&mut bytes).await.expect("a whole stream");
        for part in bytes[..read].split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                self.parse_line();
            }
        }
        read > 0
    }

    fn parse_line(&mut self) {
        let number = self.line.strip_prefix(b"id: ").and_then(|rest| {
            std::str::from_utf8(rest)
                .ok()?
                .trim_end()
                .parse::<u64>()
                .ok()
        });
        if let Some(number) = number {
            self.last = self.last.filter(|last| number == last + 1).map(|_| number);
        }
        self.line.clear();
    }
}
