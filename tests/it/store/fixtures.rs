//! Opens stores, and makes the runs and writes of the stories.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axed::config::cluster::Cluster;
use axed::config::{Data, Durability, RequestRecording, Retention};
use axed::domain::event::{EventKind, StoredEvent};
use axed::domain::failure::{Failure, FailureCode};
use axed::domain::message::{AssistantMessage, ToolResult};
use axed::domain::run::{Outcome, Run, RunId, Scope, now};
use axed::domain::usage::{Cost, TokenUsage, TreeUsage, Usage};
use axed::domain::webhook::Webhook;
use axed::record::entry::{Entry, RecordedEntry, ReplyReport};
use axed::record::event::Origin;
use axed::store::events::EventQuery;
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::runs::RunFilter;
use axed::store::{
    Change, FinishedRun, IdempotencyClaim, IdempotencyKey, NewRun, Progress, QueueEntry,
    ResumeState, StoreError, Write,
};
use axed::workdirs::file_id::FileId;
use jiff::Timestamp;
use tempfile::TempDir;

use crate::support::TEST_TIMEOUT;
use crate::support::database::Database;
use crate::support::postgres::Postgres;

pub type PublishedEvents = Arc<Mutex<Vec<(RunId, Vec<StoredEvent>)>>>;

/// A fresh store, and the events that it has published.
pub struct Opened {
    pub store: Arc<dyn RunStore>,
    pub published: PublishedEvents,
    pub place: TempDir,
    /// `None` for SQLite.
    pub postgres: Option<Postgres>,
}

impl Opened {
    /// The database, behind the store's back.
    pub fn database(&self) -> Database {
        match &self.postgres {
            Some(postgres) => Database::Postgres(postgres.url.clone()),
            None => Database::Sqlite(self.place.path().join("axed.db")),
        }
    }
}

pub fn sqlite() -> Opened {
    let place = tempfile::tempdir().expect("a directory");
    let (store, published) = sqlite_in(place.path()).expect("a store");
    Opened {
        store,
        published,
        place,
        postgres: None,
    }
}

/// A store in a database of its own; `None` without a server.
pub fn postgres() -> Option<Opened> {
    let postgres = Postgres::create()?;
    let place = tempfile::tempdir().expect("a directory");
    let url = Some(postgres.url.as_str());
    let (store, published) = open_store(place.path(), url).expect("a store");
    Some(Opened {
        store,
        published,
        place,
        postgres: Some(postgres),
    })
}

/// Another node with the same database.
pub fn beside(opened: &Opened) -> Arc<dyn RunStore> {
    let url = opened.postgres.as_ref().expect("PostgreSQL").url.as_str();
    let place = opened.place.path().join("beside");
    std::fs::create_dir(&place).expect("a directory");
    let (store, _) = open_store(&place, Some(url)).expect("a store");
    store
}

pub fn sqlite_in(dir: &Path) -> Result<(Arc<dyn RunStore>, PublishedEvents), StoreError> {
    open_store(dir, None)
}

fn open_store(
    dir: &Path,
    url: Option<&str>,
) -> Result<(Arc<dyn RunStore>, PublishedEvents), StoreError> {
    let published = PublishedEvents::default();
    let sink = Arc::clone(&published);
    let data = Data {
        dir: dir.to_owned(),
        url: url.map(Into::into),
        listen_url: None,
        cluster: Cluster::default(),
        durability: Durability::Process,
        retention: Retention::default(),
        usage_retention: None,
        requests: RequestRecording::default(),
    };
    let store = open(
        &data,
        Box::new(move |root, events| sink.lock().expect("no panic").push((root, events))),
        Box::new(|_| true),
    )?;
    Ok((store, published))
}

pub fn fresh(run: Run) -> NewRun {
    let continuation = ResumeState {
        definition: "{}".into(),
        deadline: None,
        timeout: 60,
        stream: false,
        webhooks: Vec::new(),
        waiting_since: None,
        is_held: false,
        workdir: Some(FileId {
            device: u64::MAX,
            inode: 7,
        }),
    };
    NewRun {
        node_labels: Arc::default(),
        pinned_agents: None,
        run: Arc::new(run),
        resume_state: continuation,
        claim: None,
        entry: QueueEntry::STARTED,
    }
}

pub fn webhook() -> Arc<Webhook> {
    Arc::new(Webhook {
        url: "https://hooks.example.com/a?b=c".to_owned(),
        secret_env: Some("SECRET".to_owned()),
        events: vec!["run.failed".to_owned()],
    })
}

pub fn record(scope: &Scope, agent: &str) -> Run {
    Run {
        agent_version: "sha256:00".to_owned(),
        input: "the input".into(),
        model: "requested".to_owned(),
        ..Run::queued(scope, agent.to_owned())
    }
}

pub fn root() -> Scope {
    Scope::root(RunId::new(), Some(5))
}

pub fn child(of: &Scope) -> Scope {
    of.child(RunId::new(), None, of.max_depth)
        .expect("a child within the depth limit")
}

pub fn recorded(entry: impl Into<Entry>) -> RecordedEntry {
    RecordedEntry {
        time: now(),
        is_copied: false,
        entry: entry.into(),
    }
}

pub fn event(turn: u32) -> RecordedEntry {
    recorded(EventKind::TurnStarted {
        turn,
        messages: 1,
        results: 0,
    })
}

pub fn write(scope: &Scope, change: Change, events: u32) -> Write {
    Write {
        origin: Origin {
            run_id: scope.run,
            root_id: scope.root,
            depth: scope.depth.0,
            agent: "writer".into(),
        },
        change,
        entries: (1..=events).map(event).collect(),
        deliveries: Vec::new(),
        warnings: None,
        turns: Vec::new(),
    }
}

/// A prompt of this text.
pub fn prompt(message: &str) -> Entry {
    Entry::Prompted {
        system: String::new(),
        message: message.into(),
        earlier: Vec::new(),
        compaction: None,
    }
}

/// A reply, which adds an event.
pub fn reply(turn: u32, message: AssistantMessage) -> Entry {
    Entry::Replied {
        turn,
        message,
        report: ReplyReport::default(),
    }
}

/// A result, which adds an event.
pub fn result(turn: u32, position: u32, result: ToolResult) -> Entry {
    Entry::CallCompleted {
        turn,
        position,
        tool: "t".to_owned(),
        duration_ms: 0,
        result,
        refused_by: Vec::new(),
    }
}

pub fn opening(scope: &Scope, agent: &str) -> Write {
    write(
        scope,
        Change::Create(Box::new(fresh(record(scope, agent)))),
        1,
    )
}

pub fn claim(key: &str, body: u8, expires: Timestamp) -> IdempotencyClaim {
    IdempotencyClaim {
        key: IdempotencyKey {
            credential: "ci".to_owned(),
            route: "POST /agents/writer/runs".to_owned(),
            key: key.to_owned(),
        },
        body_hash: [body; 32],
        expires_at: expires,
    }
}

pub fn in_an_hour() -> Timestamp {
    now() + Duration::from_secs(3600)
}

pub fn claiming(scope: &Scope, claim: IdempotencyClaim) -> Write {
    let opening = NewRun {
        claim: Some(claim),
        ..fresh(record(scope, "writer"))
    };
    write(scope, Change::Create(Box::new(opening)), 1)
}

pub fn starting(scope: &Scope) -> Write {
    write(
        scope,
        Change::Start {
            at: now(),
            deadline: (now(), 60),
        },
        1,
    )
}

pub fn usage(tokens: u64) -> Usage {
    Usage {
        tokens: TokenUsage {
            input: tokens,
            output: 2 * tokens,
            cache_read: 1,
            cache_write: 2,
            reasoning: 0,
        },
        model_calls: 1,
        tool_calls: 3,
        cost: Some(Cost(tokens)),
        unreported: 0,
    }
}

pub fn progress(tokens: u64) -> Progress {
    Progress {
        turns: 1,
        model: "answered".to_owned(),
        stop_reason: Some("end_turn".to_owned()),
        usage: usage(tokens),
        models: Vec::new(),
        charges: Vec::new(),
    }
}

pub fn closing(scope: &Scope, outcome: Outcome) -> Write {
    let usage = usage(10);
    let closing = FinishedRun {
        messages: None,
        scorers: Vec::new(),
        completion_status: None,
        outcome,
        finished_at: now(),
        progress: progress(10),
        tree_usage: TreeUsage { runs: 1, usage },
    };
    write(scope, Change::Finish(Box::new(closing)), 1)
}

pub fn completing(scope: &Scope, content: &str) -> Write {
    let content = content.to_owned();
    closing(
        scope,
        Outcome::Completed {
            content,
            structured: false,
        },
    )
}

pub fn failure() -> Failure {
    Failure {
        code: FailureCode::ProviderOverloaded,
        message: "overloaded".to_owned(),
        category: "overloaded".to_owned(),
        retryable: true,
    }
}

pub fn whole_log(root: &Scope) -> EventQuery {
    EventQuery {
        root: root.run,
        run: root.run,
        exclude_descendants: false,
        after: 0,
        limit: usize::MAX,
    }
}

pub fn numbers(events: &[StoredEvent]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

pub async fn stored(store: &dyn RunStore, scope: &Scope) -> Run {
    let found = store.run(scope.run).await.expect("a read");
    found.expect("the run")
}

/// As many as the filter wants. A search on a slow machine has them on several pages.
pub async fn listed(store: &dyn RunStore, mut filter: RunFilter) -> Vec<RunId> {
    let mut ids = Vec::new();
    loop {
        let page = store.list(filter.clone()).await.expect("a page");
        ids.extend(page.runs.iter().map(|run| run.id));
        match page.next {
            Some(next) if page.runs.len() < filter.limit => {
                filter.limit -= page.runs.len();
                filter.before = Some(next);
            }
            _ => return ids,
        }
    }
}

pub fn page() -> RunFilter {
    RunFilter {
        limit: 50,
        ..RunFilter::default()
    }
}

fn database(dir: &Path) -> rusqlite::Connection {
    let file = rusqlite::Connection::open(dir.join("axed.db")).expect("opened");
    file.busy_timeout(TEST_TIMEOUT).expect("a timeout");
    file
}

pub fn count(dir: &Path, table: &str) -> u32 {
    let sql = format!("SELECT count(*) FROM {table}");
    database(dir)
        .query_row(&sql, [], |row| row.get(0))
        .expect("a count")
}

/// Another connection to the file.
pub fn sql(dir: &Path, text: &str) {
    database(dir).execute_batch(text).expect("done");
}

pub fn opening_of(scope: &Scope, input: &str) -> Write {
    let mut run = record(scope, "b");
    run.input = input.into();
    write(scope, Change::Create(Box::new(fresh(run))), 1)
}
