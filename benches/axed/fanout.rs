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
const SLOW: usize = 50;

const AGENTS: [(&str, &str); 1] = [(
    "wide",
    "model = \"bench/gate-fan-50-solo\"\nsub_agents = [\"solo\"]",
)];

/// Follows runs of 51 runs' events.
pub async fn measure(table: &mut Table) {
    table.title(&format!(
        "event fan-out: a run with 50 children, followed by {CLIENTS} clients"
    ));
    let alone = followed(0, 0).await;
    table.number("milliseconds the run takes when nobody follows", alone.run);
    let all = followed(CLIENTS, 0).await;
    let some = followed(CLIENTS, SLOW).await;
    table.number("events", all.events as f64);
    table.most(
        "clients that missed an event",
        (all.missed + some.missed) as f64,
        0.0,
    );
    table.number(
        "milliseconds until the last client has the last event",
        all.last,
    );
    table.number(
        "deliveries a second, in thousands",
        (all.events as usize * CLIENTS) as f64 / all.last,
    );
    table.number(
        &format!("milliseconds where {SLOW} of them read nothing"),
        some.last,
    );
    table.most("KiB a client that follows", all.kib, 20.0);
    table.number("KiB a client at the most", all.peak_kib);
    table.number("KiB a client at the most, some slow", some.peak_kib);
}

struct Followed {
    /// Milliseconds from the gate's opening to the run's end.
    run: f64,
    /// Milliseconds from the gate's opening until every client that reads has everything.
    last: f64,
    /// The run's last event.
    events: u64,
    /// Clients that did not get every number once.
    missed: usize,
    /// Memory of the daemon for each client before the gate opens.
    kib: f64,
    /// The same at its highest.
    peak_kib: f64,
}

async fn followed(clients: usize, slow: usize) -> Followed {
    let provider = Process::provider(Duration::ZERO);
    let axed = Process::axed_with(&provider, "", &AGENTS);
    // What the first run and the first stream leave behind is not a client's.
    let id = load::start_run(&axed.address, "solo").await;
    Follower::follow(&axed.address, &id)
        .await
        .all_there_is()
        .await;
    let id = load::start_run(&axed.address, "wide").await;
    load::until_body(&provider.address, "/busy", "1").await;
    let before = axed.resident_kib();
    let mut followers = Vec::with_capacity(clients);
    while followers.len() < clients {
        let wave = (clients - followers.len()).min(100);
        followers.extend(join_all((0..wave).map(|_| Follower::follow(&axed.address, &id))).await);
    }
    let so_far = shown(&axed, &id).await["last_event"].as_u64();
    let so_far = so_far.expect("a number");
    join_all(followers.iter_mut().map(|follower| follower.until(so_far))).await;
    let each = |kib: u64| kib.saturating_sub(before) as f64 / clients.max(1) as f64;
    let kib = each(axed.resident_kib());

    let reading = followers.split_off(slow);
    let begin = Instant::now();
    load::post(&provider.address, "/gate", "").await;
    let milliseconds = || begin.elapsed().as_secs_f64() * 1000.0;
    let ended = async {
        load::get(&axed.address, &format!("/runs/{id}?wait=60")).await;
        milliseconds()
    };
    let following = async {
        let ends = join_all(reading.into_iter().map(Follower::all_there_is)).await;
        (ends, milliseconds())
    };
    let (run, (mut ends, last)) = tokio::join!(ended, following);
    ends.extend(join_all(followers.into_iter().map(Follower::all_there_is)).await);
    let shown = shown(&axed, &id).await;
    assert_eq!(shown["status"], "completed", "{shown}");
    let events = shown["last_event"].as_u64().expect("a number");
    Followed {
        run,
        last,
        events,
        missed: ends.iter().filter(|end| **end != Some(events)).count(),
        kib,
        peak_kib: each(axed.peak_kib()),
    }
}

async fn shown(axed: &Process, id: &str) -> serde_json::Value {
    let body = load::get(&axed.address, &format!("/runs/{id}")).await;
    serde_json::from_str(&body).expect("JSON")
}

/// One client, which keeps no more than the line it is at.
struct Follower {
    stream: TcpStream,
    line: Vec<u8>,
    /// The last number; none after a gap.
    last: Option<u64>,
}

impl Follower {
    async fn follow(address: &str, id: &str) -> Self {
        let mut stream = TcpStream::connect(address).await.expect("connect");
        let ask = format!(
            "GET /runs/{id}/events HTTP/1.1\r\nhost: {address}\r\naccept: text/event-stream\r\n\
             connection: close\r\n\r\n"
        );
        stream.write_all(ask.as_bytes()).await.expect("ask");
        Self {
            stream,
            line: Vec::new(),
            last: Some(0),
        }
    }

    async fn until(&mut self, number: u64) {
        while self.last.is_some_and(|last| last < number) {
            assert!(self.read().await, "the stream ended too early");
        }
    }

    async fn all_there_is(mut self) -> Option<u64> {
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
                self.take_line();
            }
        }
        read > 0
    }

    fn take_line(&mut self) {
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
