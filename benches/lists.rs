//! First pages of lists of runs, for every combination of filters, on a store with 300,000 runs beside an empty one.
//! `cargo bench --bench lists [-- runs]`: prints the slowest combinations and fails if one takes more than ten times
//! what it takes on an empty store and more than 10 ms.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axed::config::{Data, Durability, Retention};
use axed::domain::run::{Outcome, Run, RunId, Scope, Status, now};
use axed::domain::usage::{TreeUsage, Usage};
use axed::store::open::open;
use axed::store::{
    Change, Closing, Continuation, Opening, Progress, RunFilter, RunStore, StoreError, Write,
};
use jiff::Timestamp;

const RUNS: u64 = 300_000;
/// Writes under way at a time.
const WRITERS: u64 = 64;
/// Reads of one combination; the median counts.
const REPEATS: usize = 7;
const FILTERS: usize = 8;

fn main() -> Result<(), StoreError> {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("measures only under `cargo bench --bench lists`");
        return Ok(());
    }
    let count = std::env::args().find_map(|argument| argument.parse().ok());
    let count: u64 = count.unwrap_or(RUNS);
    let runtime = tokio::runtime::Runtime::new().map_err(|e| StoreError::Engine(e.to_string()))?;
    let (full_dir, empty_dir) = (tempfile::tempdir(), tempfile::tempdir());
    let (full_dir, empty_dir) = (full_dir.expect("a directory"), empty_dir.expect("another"));
    let (full, empty) = (open_in(full_dir.path())?, open_in(empty_dir.path())?);
    let failed = runtime.block_on(async {
        let (begun, from) = (Instant::now(), now());
        fill(&full, count).await;
        let until = now();
        println!("filled with {count} runs in {:.0?}", begun.elapsed());
        let middle = from + until.duration_since(from) / 2;
        measure(&full, &empty, middle).await
    })?;
    runtime.block_on(async {
        full.close().await;
        empty.close().await;
    });
    if failed > 0 {
        println!("{failed} combinations are too slow");
        std::process::exit(1);
    }
    Ok(())
}

fn open_in(dir: &std::path::Path) -> Result<Arc<dyn RunStore>, StoreError> {
    let data = Data {
        dir: dir.to_owned(),
        durability: Durability::Process,
        retention: Retention::default(),
    };
    open(&data, Box::new(|_, _| {}), Box::new(|_| false))
}

async fn fill(store: &Arc<dyn RunStore>, count: u64) {
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = Arc::clone(store);
        tasks.spawn(async move {
            for n in (writer..count).step_by(WRITERS as usize) {
                write_run(store.as_ref(), n).await.expect("written");
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.expect("a writer ends");
    }
}

/// One run in ten stays queued, one in a thousand was cancelled; labels, sessions, agents and owners repeat.
async fn write_run(store: &dyn RunStore, n: u64) -> Result<(), StoreError> {
    let id = RunId::new();
    let write = |change| Write {
        run: id,
        root: id,
        change,
        steps: Vec::new(),
        events: Vec::new(),
        deliveries: Vec::new(),
    };
    let continuation = Continuation {
        definition: "{}".into(),
        deadline: None,
        timeout: 60,
        stream: false,
        webhooks: Vec::new(),
        waiting_since: None,
        workdir: None,
    };
    let opening = Opening {
        run: Arc::new(run(id, n)),
        continuation,
        claim: None,
    };
    store.write(write(Change::Open(Box::new(opening)))).await?;
    if n.is_multiple_of(10) {
        return Ok(());
    }
    let outcome = if n % 1000 == 1 {
        Outcome::Cancelled {
            reason: String::new(),
            partial: None,
        }
    } else {
        Outcome::Completed {
            content: "The report says that all is well.".to_owned(),
            structured: false,
        }
    };
    let closing = Closing {
        completion_status: None,
        outcome,
        at: now(),
        progress: Progress {
            turns: 1,
            model: "model-large".to_owned(),
            stop_reason: None,
            usage: Usage::default(),
        },
        tree: TreeUsage::default(),
    };
    store.write(write(Change::Close(Box::new(closing)))).await?;
    Ok(())
}

fn run(id: RunId, n: u64) -> Run {
    let labels = [
        ("customer".to_owned(), format!("c{}", n % 1000)),
        ("kind".to_owned(), "nightly".to_owned()),
    ];
    Run {
        owner: Some(format!("key{}", n % 7)),
        session: Some(format!("s{}", n % 5000)),
        agent_version: "sha256:0".to_owned(),
        input: "Summarise the attached report in three sentences.".into(),
        labels: labels.into_iter().collect(),
        model: "model-large".to_owned(),
        ..Run::queued(&Scope::root(id, None), format!("agent-{}", n % 10))
    }
}

/// The filter that has those parts whose bit is set, with values that many runs have or (`rare`) few or none.
fn filter(bits: usize, rare: bool, middle: Timestamp) -> RunFilter {
    let on = |bit: usize| bits & (1 << bit) != 0;
    let text = |common: &str, few: &str| Some(if rare { few } else { common }.to_owned());
    let label = if rare {
        ("customer", "c17")
    } else {
        ("kind", "nightly")
    };
    RunFilter {
        agent: on(0).then(|| text("agent-3", "agent-none")).flatten(),
        owner: on(1).then(|| text("key3", "key6")).flatten(),
        status: on(2).then_some(if rare {
            Status::Cancelled
        } else {
            Status::Completed
        }),
        all: on(3),
        session: on(4).then(|| text("s3", "s-none")).flatten(),
        labels: (on(5).then(|| (label.0.to_owned(), label.1.to_owned())))
            .into_iter()
            .collect(),
        since: on(6).then_some(middle),
        until: on(7).then_some(middle),
        limit: 50,
        ..RunFilter::default()
    }
}

/// Prints the slowest combinations; returns how many are too slow.
async fn measure(
    full: &Arc<dyn RunStore>,
    empty: &Arc<dyn RunStore>,
    middle: Timestamp,
) -> Result<usize, StoreError> {
    let mut lines = Vec::new();
    for bits in 0..1 << FILTERS {
        for rare in [false, true] {
            let filter = filter(bits, rare, middle);
            let (floor, _) = median(empty, &filter).await?;
            let (time, found) = median(full, &filter).await?;
            lines.push((time, floor, found, filter));
        }
    }
    lines.sort_by_key(|(time, ..)| std::cmp::Reverse(*time));
    println!("      full     empty  ratio  runs  filter");
    for (time, floor, found, filter) in lines.iter().take(12) {
        let ratio = time.as_secs_f64() / floor.as_secs_f64();
        let names = describe(filter);
        println!("{time:>10.2?} {floor:>9.2?} {ratio:>6.1} {found:>5}  {names}");
    }
    let too_slow =
        |time: Duration, floor: Duration| time > floor * 10 && time > Duration::from_millis(10);
    Ok(lines.iter().filter(|(t, f, ..)| too_slow(*t, *f)).count())
}

async fn median(
    store: &Arc<dyn RunStore>,
    filter: &RunFilter,
) -> Result<(Duration, usize), StoreError> {
    let (mut times, mut found) = (Vec::with_capacity(REPEATS), 0);
    for _ in 0..REPEATS {
        let begun = Instant::now();
        found = store.list(filter.clone()).await?.runs.len();
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok((times[REPEATS / 2], found))
}

fn describe(filter: &RunFilter) -> String {
    let parts = [
        filter.agent.as_ref().map(|agent| format!("agent={agent}")),
        filter.owner.as_ref().map(|owner| format!("owner={owner}")),
        filter.status.map(|status| format!("status={status:?}")),
        filter.all.then(|| "all".to_owned()),
        filter
            .session
            .as_ref()
            .map(|name| format!("session={name}")),
        filter.labels.first().map(|(k, v)| format!("label.{k}={v}")),
        filter.since.map(|_| "since".to_owned()),
        filter.until.map(|_| "until".to_owned()),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" ")
}
