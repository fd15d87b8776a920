//! How many single-turn runs a second the store takes, and how long reads last on a full one.
//! `cargo bench --bench store -- [directory]`; the directory is where the database is put, the system's own otherwise.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axed::config::{Data, Durability};
use axed::domain::event::EventKind;
use axed::domain::message::AssistantMessage;
use axed::domain::run::{Outcome, Run, RunId, Scope, Status, now};
use axed::domain::usage::{TokenUsage, TreeUsage, Usage};
use axed::record::entry::{Entry, RecordedEntry, ReplyReport};
use axed::record::event::Origin;
use axed::store::events::EventQuery;
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::runs::RunFilter;
use axed::store::{Change, FinishedRun, NewRun, Progress, ResumeState, StoreError, Write};

const MEASURE_TIME: Duration = Duration::from_secs(3);
const FULL_STORE_RUNS: u64 = 100_000;
/// What every run of the bench runs by, about as long as a real one.
static DEFINITION: LazyLock<Arc<str>> =
    LazyLock::new(|| format!("{{\"instructions\":\"{}\"}}", "Be careful. ".repeat(200)).into());

fn main() -> Result<(), StoreError> {
    let dir = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let dir = dir.unwrap_or_else(|| std::env::temp_dir().display().to_string());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .map_err(|error| StoreError::Backend(error.to_string()))?;
    for durability in [Durability::Process, Durability::Power] {
        for callers in [1, 16, 64, 256] {
            let dir = temp_dir(&dir);
            let store = open_in(dir.path(), durability)?;
            let (runs, elapsed) = runtime.block_on(load(&store, callers, u64::MAX));
            let rate = runs as f64 / elapsed.as_secs_f64();
            println!(
                "{durability:?} {callers:>4} callers {rate:>8.0} runs/s {:>8.0} writes/s",
                rate * 3.0
            );
            runtime.block_on(store.close());
        }
    }
    let dir = temp_dir(&dir);
    let store = open_in(dir.path(), Durability::Process)?;
    runtime.block_on(async {
        let (runs, elapsed) = load(&store, 64, FULL_STORE_RUNS).await;
        println!("filled with {runs} runs in {elapsed:?}");
        read(&store).await
    })
}

fn temp_dir(parent: &str) -> tempfile::TempDir {
    tempfile::tempdir_in(parent).expect("a directory to measure in")
}

fn open_in(dir: &std::path::Path, durability: Durability) -> Result<Arc<dyn RunStore>, StoreError> {
    let data = Data {
        dir: dir.to_owned(),
        url: None,
        listen_url: None,
        cluster: axed::config::cluster::Cluster::default(),
        durability,
        retention: axed::config::Retention::default(),
        usage_retention: None,
        requests: axed::config::RequestRecording::default(),
    };
    open(&data, Box::new(|_, _| {}), Box::new(|_| false))
}

/// Runs one after another in each of the callers, until the time or the number is reached.
async fn load(store: &Arc<dyn RunStore>, callers: usize, max_runs: u64) -> (u64, Duration) {
    let done = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for caller in 0..callers {
        let (store, done) = (Arc::clone(store), Arc::clone(&done));
        tasks.spawn(async move {
            let agent: Arc<str> = format!("agent-{}", caller % 10).into();
            while (max_runs < u64::MAX || start.elapsed() < MEASURE_TIME)
                && done.fetch_add(1, Ordering::Relaxed) < max_runs
            {
                single_turn(store.as_ref(), &agent)
                    .await
                    .expect("the store takes a run");
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.expect("a caller ends");
    }
    (done.load(Ordering::Relaxed).min(max_runs), start.elapsed())
}

/// The three writes of a run of one turn, as the journal makes them.
async fn single_turn(store: &dyn RunStore, agent: &Arc<str>) -> Result<u64, StoreError> {
    let run = BenchRun {
        id: RunId::new(),
        agent,
    };
    store.write(run.acceptance()).await?;
    store.enqueue(run.start()).await?;
    store.write(run.end()).await
}

const VERSION: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const TASK: &str = "Summarise the attached report in three sentences.";
const MODEL: &str = "model-large";

struct BenchRun<'a> {
    id: RunId,
    agent: &'a Arc<str>,
}

impl BenchRun<'_> {
    fn write(&self, change: Change, entries: Vec<Entry>) -> Write {
        let time = now();
        let recorded = |entry| RecordedEntry {
            time,
            is_copied: false,
            entry,
        };
        Write {
            origin: Origin {
                run_id: self.id,
                root_id: self.id,
                depth: 0,
                agent: Arc::clone(self.agent),
            },
            change,
            entries: entries.into_iter().map(recorded).collect(),
            deliveries: Vec::new(),
            warnings: None,
            turns: Vec::new(),
        }
    }

    fn acceptance(&self) -> Write {
        let run = Run {
            agent_version: VERSION.to_owned(),
            input: TASK.into(),
            model: MODEL.to_owned(),
            ..Run::queued(&Scope::root(self.id, None), self.agent.to_string())
        };
        let queued = Entry::Event(EventKind::RunQueued {
            request: None,
            parent_id: None,
            tool_call_id: None,
        });
        let new_run = NewRun {
            node_labels: Arc::default(),
            pinned_agents: None,
            run: Arc::new(run),
            resume_state: ResumeState {
                definition: Arc::clone(&DEFINITION),
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
        self.write(Change::Create(Box::new(new_run)), vec![queued])
    }

    fn start(&self) -> Write {
        let prompt = Entry::Prompted {
            system: "You are a careful assistant. ".repeat(10),
            message: TASK.into(),
            earlier: Vec::new(),
            compaction: None,
        };
        let started = Entry::Event(EventKind::RunStarted {
            model: MODEL.to_owned(),
            agent_version: VERSION.to_owned(),
        });
        let turn = Entry::Event(EventKind::TurnStarted {
            turn: 1,
            messages: 1,
            results: 0,
        });
        let change = Change::Start {
            at: now(),
            deadline: (now(), 60),
        };
        self.write(change, vec![started, prompt, turn])
    }

    fn end(&self) -> Write {
        let content = "The report says that all is well. ".repeat(8);
        let usage = Usage {
            tokens: TokenUsage {
                input: 120,
                output: 80,
                ..TokenUsage::default()
            },
            model_calls: 1,
            ..Usage::default()
        };
        let finished = FinishedRun {
            messages: None,
            scorers: Vec::new(),
            completion_status: None,
            outcome: Outcome::Completed {
                content: content.clone(),
                structured: false,
            },
            finished_at: now(),
            progress: Progress {
                turns: 1,
                model: MODEL.to_owned(),
                stop_reason: Some("end_turn".to_owned()),
                usage,
                models: Vec::new(),
                charges: Vec::new(),
            },
            tree_usage: TreeUsage { runs: 1, usage },
        };
        let completed = Entry::Event(EventKind::RunCompleted {
            turns: 1,
            characters: content.len(),
            content: content.clone(),
            truncated: false,
        });
        let reply = Entry::Replied {
            turn: 1,
            message: AssistantMessage {
                content,
                ..AssistantMessage::default()
            },
            report: ReplyReport {
                model: MODEL.to_owned(),
                stop_reason: Some("end_turn".to_owned()),
                tokens: usage.tokens,
                tool_calls: Vec::new(),
            },
        };
        let change = Change::Finish(Box::new(finished));
        self.write(change, vec![reply, completed])
    }
}

/// Times of reads on the full store.
async fn read(store: &Arc<dyn RunStore>) -> Result<(), StoreError> {
    let newest = RunFilter {
        limit: 50,
        ..RunFilter::default()
    };
    let by_agent = RunFilter {
        agent: Some("agent-3".to_owned()),
        status: Some(Status::Completed),
        ..newest.clone()
    };
    let none = RunFilter {
        status: Some(Status::Failed),
        ..newest.clone()
    };
    let newest_runs = store.list(newest.clone()).await?.runs;
    let id = newest_runs.last().map(|run| run.id).unwrap_or_default();
    for (what, filter) in [
        ("newest 50", newest),
        ("newest 50 of an agent that completed", by_agent),
        ("newest 50 that failed (none)", none),
    ] {
        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            store.list(filter.clone()).await?;
            times.push(start.elapsed());
        }
        print(what, times);
    }
    let (mut run_times, mut event_times) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        let start = Instant::now();
        store.run(id).await?;
        run_times.push(start.elapsed());
        let start = Instant::now();
        let query = EventQuery {
            root: id,
            run: id,
            exclude_descendants: false,
            after: 0,
            limit: 200,
        };
        store.events(query).await?;
        event_times.push(start.elapsed());
    }
    print("one run", run_times);
    print("its events", event_times);
    Ok(())
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    println!("{what}: median {:?}", times[times.len() / 2]);
}
