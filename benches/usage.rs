//! Sums of usage on a store with 300,000 runs of 60 days. `cargo bench --bench usage [-- runs]`: prints how long each grouping
//! takes, and fails if one takes more than 100 ms. `--profile dev` is quicker to build, and slower.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axed::config::{Data, Durability, Retention};
use axed::domain::calendar::time_zone;
use axed::domain::run::{Outcome, Run, RunId, Scope, now};
use axed::domain::usage::{Cost, TokenUsage, TreeUsage, Usage};
use axed::record::event::Origin;
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::usage::{UsageDimension, UsageQuery};
use axed::store::{Change, FinishedRun, NewRun, Progress, ResumeState, StoreError, Write};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use tokio::task::JoinSet;

const RUNS: u64 = 300_000;
const DAYS: u64 = 60;
/// Concurrent writes.
const WRITERS: u64 = 64;
/// Reads of one grouping; the median counts.
const REPEATS: usize = 7;
const LIMIT: Duration = Duration::from_millis(100);

fn main() -> Result<(), StoreError> {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("measures only under `cargo bench --bench usage`");
        return Ok(());
    }
    let count = std::env::args().find_map(|argument| argument.parse().ok());
    let count: u64 = count.unwrap_or(RUNS);
    let runtime = tokio::runtime::Runtime::new().map_err(|e| StoreError::Backend(e.to_string()))?;
    let dir = tempfile::tempdir().expect("a directory");
    let data = Data {
        dir: dir.path().to_owned(),
        url: None,
        listen_url: None,
        cluster: axed::config::cluster::Cluster::default(),
        durability: Durability::Process,
        retention: Retention::default(),
        usage_retention: None,
        requests: axed::config::RequestRecording::default(),
    };
    let store = open(&data, Box::new(|_, _| {}), Box::new(|_| false))?;
    let is_quick = runtime.block_on(async {
        let start = Instant::now();
        fill(&store, count).await;
        println!("filled with {count} runs in {:.0?}", start.elapsed());
        let is_quick = measure(&*store).await;
        store.close().await;
        is_quick
    })?;
    if !is_quick {
        std::process::exit(1);
    }
    Ok(())
}

async fn fill(store: &Arc<dyn RunStore>, count: u64) {
    let start = now() - Duration::from_secs(DAYS * 86_400);
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = Arc::clone(store);
        writers.spawn(async move {
            for n in (writer..count).step_by(WRITERS as usize) {
                let age = n * DAYS * 86_400 / count;
                let created_at = start + Duration::from_secs(age);
                write_run(&*store, n, created_at).await.expect("written");
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.expect("no panic");
    }
}

async fn write_run(store: &dyn RunStore, n: u64, created_at: Timestamp) -> Result<(), StoreError> {
    let id = RunId::new();
    let write = |change| Write {
        origin: Origin::from(&Run::queued(&Scope::root(id, None), String::new())),
        change,
        entries: Vec::new(),
        deliveries: Vec::new(),
        warnings: None,
        turns: Vec::new(),
    };
    // A mixture without a pattern.
    let dice = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let team = ("team".to_owned(), format!("team{}", dice % 6));
    let run = Run {
        owner: Some(format!("key{}", dice % 4)),
        session: dice.is_multiple_of(4).then(|| format!("s{}", dice % 2_003)),
        labels: BTreeMap::from([team]),
        model: "model".to_owned(),
        created_at,
        ..Run::queued(&Scope::root(id, None), format!("agent{}", dice % 23))
    };
    let opening = NewRun {
        node_labels: Arc::default(),
        pinned_agents: None,
        run: Arc::new(run),
        resume_state: ResumeState {
            definition: "{}".into(),
            deadline: None,
            timeout: 60,
            stream: false,
            webhooks: Vec::new(),
            waiting_since: None,
            is_held: false,
            workdir: None,
        },
        claim: None,
        entry: axed::store::QueueEntry::STARTED,
    };
    let opened = store.write(write(Change::Create(Box::new(opening))));
    opened.await?;
    let usage = Usage {
        tokens: TokenUsage {
            input: dice % 9_000,
            output: dice % 700,
            ..TokenUsage::default()
        },
        model_calls: 1,
        cost: Some(Cost(dice % 1_000_000_000)),
        ..Usage::default()
    };
    let closing = FinishedRun {
        completion_status: None,
        outcome: Outcome::Completed {
            content: "done".to_owned(),
            structured: false,
        },
        finished_at: now(),
        progress: Progress {
            turns: 1,
            model: format!("model{}", dice % 5),
            usage,
            ..Progress::default()
        },
        tree_usage: TreeUsage { runs: 1, usage },
        messages: None,
        scorers: Vec::new(),
    };
    let ended = store.write(write(Change::Finish(Box::new(closing))));
    ended.await.map(drop)
}

/// Returns whether every grouping is quick.
async fn measure(store: &dyn RunStore) -> Result<bool, StoreError> {
    use UsageDimension::{Agent, Day, Key, Label, Model, Session};
    let team = || Label("team".to_owned());
    let berlin = time_zone("Europe/Berlin").unwrap_or(TimeZone::UTC);
    let kathmandu = time_zone("Asia/Kathmandu").unwrap_or(TimeZone::UTC);
    let mut is_quick = true;
    for (name, by, zone) in [
        ("totals", vec![], TimeZone::UTC),
        ("agent", vec![Agent], TimeZone::UTC),
        ("agent,model", vec![Agent, Model], TimeZone::UTC),
        ("label.team,key", vec![team(), Key], TimeZone::UTC),
        ("session", vec![Session], TimeZone::UTC),
        ("day", vec![Day], TimeZone::UTC),
        ("day in Berlin", vec![Day], berlin.clone()),
        ("day in Kathmandu", vec![Day], kathmandu),
        ("day,agent in Berlin", vec![Day, Agent], berlin),
    ] {
        let query = UsageQuery {
            by,
            time_zone: zone,
            since: None,
            until: None,
            owner: None,
            agent: None,
            visible_agents: None,
            labels: Vec::new(),
            max_rows: 10_000,
        };
        let mut times = Vec::with_capacity(REPEATS);
        let mut rows = 0;
        for _ in 0..REPEATS {
            let start = Instant::now();
            let report = store.usage(query.clone()).await?;
            times.push(start.elapsed());
            rows = report.rows.map_or(0, |rows| rows.len());
        }
        times.sort_unstable();
        let median = times[REPEATS / 2];
        println!("{median:>8.1?}  by {name}: {rows} groups");
        is_quick &= median <= LIMIT;
    }
    Ok(is_quick)
}
