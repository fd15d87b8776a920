//! First pages of lists of runs, for every combination of filters, on a store with 300,000 runs beside an empty one.
//! `cargo bench --bench lists [-- runs]`: prints the slowest combinations and fails if one takes more than ten times
//! what it takes on an empty store and more than 10 ms. Then searches texts, and fails if a first page takes more than 300 ms or
//! another one more than a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axed::config::{Data, Durability, Retention};
use axed::domain::failure::FailureCode;
use axed::domain::run::{Outcome, Run, RunId, Scope, Status, now};
use axed::domain::search_text::SearchText;
use axed::domain::usage::{TreeUsage, Usage};
use axed::record::event::Origin;
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::runs::RunFilter;
use axed::store::{Change, FinishedRun, NewRun, Progress, ResumeState, StoreError, Write};
use jiff::Timestamp;

const RUNS: u64 = 300_000;
/// Concurrent writes.
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
    let runtime = tokio::runtime::Runtime::new().map_err(|e| StoreError::Backend(e.to_string()))?;
    let (full_dir, empty_dir) = (tempfile::tempdir(), tempfile::tempdir());
    let (full_dir, empty_dir) = (full_dir.expect("a directory"), empty_dir.expect("another"));
    let (full, empty) = (open_in(full_dir.path())?, open_in(empty_dir.path())?);
    let failed = runtime.block_on(async {
        let (start, fill_started) = (Instant::now(), now());
        fill(&full, count).await;
        let fill_ended = now();
        println!("filled with {count} runs in {:.0?}", start.elapsed());
        let middle = fill_started + fill_ended.duration_since(fill_started) / 2;
        let slow_lists = measure(&full, &empty, middle).await?;
        let slow_searches = measure_searches(&full).await?;
        Ok::<_, StoreError>(slow_lists + slow_searches)
    })?;
    runtime.block_on(async {
        full.close().await;
        empty.close().await;
    });
    if failed > 0 {
        println!("{failed} lists or searches are too slow");
        std::process::exit(1);
    }
    Ok(())
}

fn open_in(dir: &std::path::Path) -> Result<Arc<dyn RunStore>, StoreError> {
    let data = Data {
        dir: dir.to_owned(),
        url: None,
        listen_url: None,
        cluster: axed::config::cluster::Cluster::default(),
        durability: Durability::Process,
        retention: Retention::default(),
        usage_retention: None,
        requests: axed::config::RequestRecording::default(),
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
    while let Some(result) = tasks.join_next().await {
        result.expect("a writer ends");
    }
}

/// One run in ten stays queued, one in a thousand was cancelled; labels, sessions, agents and owners repeat.
async fn write_run(store: &dyn RunStore, n: u64) -> Result<(), StoreError> {
    let id = RunId::new();
    let write = |change| Write {
        origin: Origin::from(&Run::queued(&Scope::root(id, None), String::new())),
        change,
        entries: Vec::new(),
        deliveries: Vec::new(),
        warnings: None,
        turns: Vec::new(),
    };
    let continuation = ResumeState {
        definition: "{}".into(),
        deadline: None,
        timeout: 60,
        stream: false,
        webhooks: Vec::new(),
        waiting_since: None,
        is_held: false,
        workdir: None,
    };
    let opening = NewRun {
        node_labels: Arc::default(),
        pinned_agents: None,
        run: Arc::new(run(id, n)),
        resume_state: continuation,
        claim: None,
        entry: axed::store::QueueEntry::STARTED,
    };
    store
        .write(write(Change::Create(Box::new(opening))))
        .await?;
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
    let closing = FinishedRun {
        completion_status: None,
        outcome,
        finished_at: now(),
        progress: Progress {
            turns: 1,
            model: "model-large".to_owned(),
            stop_reason: None,
            usage: Usage::default(),
            models: Vec::new(),
            charges: Vec::new(),
        },
        tree_usage: TreeUsage::default(),
        messages: None,
        scorers: Vec::new(),
    };
    store
        .write(write(Change::Finish(Box::new(closing))))
        .await?;
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
        input: match n {
            0 => "Who built the first airship?".into(),
            _ => "Summarise the attached report in three sentences.".into(),
        },
        labels: labels.into_iter().collect(),
        model: "model-large".to_owned(),
        ..Run::queued(&Scope::root(id, None), format!("agent-{}", n % 10))
    }
}

/// The filter that has those parts whose bit is set, with values that many runs have or (`rare`) few or none.
fn filter(bits: usize, rare: bool, middle: Timestamp) -> RunFilter {
    let is_set = |bit: usize| bits & (1 << bit) != 0;
    let text = |common: &str, few: &str| Some(if rare { few } else { common }.to_owned());
    let label = if rare {
        ("customer", "c17")
    } else {
        ("kind", "nightly")
    };
    RunFilter {
        agent: is_set(0).then(|| text("agent-3", "agent-none")).flatten(),
        owner: is_set(1).then(|| text("key3", "key6")).flatten(),
        status: is_set(2).then_some(if rare {
            Status::Cancelled
        } else {
            Status::Completed
        }),
        include_children: is_set(3),
        session: is_set(4).then(|| text("s3", "s-none")).flatten(),
        labels: (is_set(5).then(|| (label.0.to_owned(), label.1.to_owned())))
            .into_iter()
            .collect(),
        since: is_set(6).then_some(middle),
        until: is_set(7).then_some(middle),
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
            let (baseline, _) = median(empty, &filter).await?;
            let (time, count) = median(full, &filter).await?;
            lines.push((time, baseline, count, filter));
        }
    }
    lines.sort_by_key(|(time, ..)| std::cmp::Reverse(*time));
    println!("      full     empty  ratio  runs  filter");
    for (time, baseline, count, filter) in lines.iter().take(12) {
        let ratio = time.as_secs_f64() / baseline.as_secs_f64();
        let names = describe(filter);
        println!("{time:>10.2?} {baseline:>9.2?} {ratio:>6.1} {count:>5}  {names}");
    }
    let too_slow =
        |time: Duration, floor: Duration| time > floor * 10 && time > Duration::from_millis(10);
    Ok(lines.iter().filter(|(t, f, ..)| too_slow(*t, *f)).count())
}

/// Searches words that every run has, one in a thousand, the oldest and none; returns how many searches are too slow.
async fn measure_searches(store: &Arc<dyn RunStore>) -> Result<usize, StoreError> {
    let mut too_slow = 0;
    println!("first page  longest  pages  runs  search");
    for (text, error_code, agent) in [
        (Some("ATTACHED"), None, None),
        (Some("airship"), None, None),
        (Some("airship"), None, Some("agent-0")),
        (Some("nowhere"), None, Some("agent-3")),
        (None, Some(FailureCode::Timeout), None),
    ] {
        let mut filter = RunFilter {
            text: text.and_then(SearchText::parse),
            error_code,
            agent: agent.map(str::to_owned),
            limit: 50,
            ..RunFilter::default()
        };
        let (mut times, mut runs) = (Vec::new(), 0);
        // A common word is on every page.
        while runs < 1_000 {
            let start = Instant::now();
            let page = store.list(filter.clone()).await?;
            times.push(start.elapsed());
            runs += page.runs.len();
            filter.before = page.next;
            if page.next.is_none() {
                break;
            }
        }
        let (first, pages) = (times[0], times.len());
        let longest = times.into_iter().max().unwrap_or_default();
        println!(
            "{first:>10.2?} {longest:>8.2?} {pages:>6} {runs:>5}  {text:?} {error_code:?} {agent:?}"
        );
        let is_slow = first > Duration::from_millis(300) || longest > Duration::from_secs(1);
        too_slow += usize::from(is_slow);
    }
    Ok(too_slow)
}

async fn median(
    store: &Arc<dyn RunStore>,
    filter: &RunFilter,
) -> Result<(Duration, usize), StoreError> {
    let (mut times, mut count) = (Vec::with_capacity(REPEATS), 0);
    for _ in 0..REPEATS {
        let start = Instant::now();
        count = store.list(filter.clone()).await?.runs.len();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok((times[REPEATS / 2], count))
}

fn describe(filter: &RunFilter) -> String {
    let parts = [
        filter.agent.as_ref().map(|agent| format!("agent={agent}")),
        filter.owner.as_ref().map(|owner| format!("owner={owner}")),
        filter.status.map(|status| format!("status={status:?}")),
        filter.include_children.then(|| "all".to_owned()),
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
