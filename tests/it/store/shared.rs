//! Stories of the store. The shared ones are told against the contract; an engine joins by its own line at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axed::config::{Data, Durability, Retention};
use axed::domain::event::{Event, EventKind, StoredEvent};
use axed::domain::message::{AssistantMessage, Echo, ToolCall, ToolResult};
use axed::domain::run::{Failure, FailureCode, Outcome, Run, RunId, Scope, Status, now};
use axed::domain::usage::{Cost, TokenUsage, TreeUsage, Usage};
use axed::domain::webhook::{DeliveryId, Webhook};
use axed::store::events::EventQuery;
use axed::store::open::open;
use axed::store::outbox::{
    AttemptOutcome, AttemptRecord, DeliveryAttempt, DeliveryStatus, DueQuery, MAX_STORED_ATTEMPTS,
    NewDelivery,
};
use axed::store::retention::{Cutoff, ExpiredQuery, NthNewestQuery};
use axed::store::run_store::RunStore;
use axed::store::runs::{RunFilter, SessionQuery};
use axed::store::{
    Change, ClaimedRun, FinishedRun, IdempotencyClaim, IdempotencyKey, NewRun, Progress,
    ResumeState, Step, StoreError, Write,
};
use axed::workdirs::file_id::FileId;
use jiff::Timestamp;
use serde_json::value::RawValue;
use tempfile::TempDir;

pub type Rung = Arc<Mutex<Vec<(RunId, Vec<StoredEvent>)>>>;

/// A fresh store, and what its bell has told.
pub struct Opened {
    pub store: Arc<dyn RunStore>,
    pub rung: Rung,
    pub place: TempDir,
}

pub fn sqlite() -> Opened {
    let place = tempfile::tempdir().expect("a directory");
    let (store, rung) = sqlite_in(place.path()).expect("a store");
    Opened { store, rung, place }
}

pub fn sqlite_in(dir: &Path) -> Result<(Arc<dyn RunStore>, Rung), StoreError> {
    let rung = Rung::default();
    let heard = Arc::clone(&rung);
    let data = Data {
        dir: dir.to_owned(),
        durability: Durability::Process,
        retention: Retention::default(),
    };
    let store = open(
        &data,
        Box::new(move |root, events| heard.lock().expect("no panic").push((root, events))),
        Box::new(|_| true),
    )?;
    Ok((store, rung))
}

// What is written.

pub fn fresh(run: Run) -> NewRun {
    let continuation = ResumeState {
        definition: "{}".into(),
        deadline: None,
        timeout: 60,
        stream: false,
        webhooks: Vec::new(),
        waiting_since: None,
        workdir: Some(FileId {
            device: u64::MAX,
            inode: 7,
        }),
    };
    NewRun {
        run: Arc::new(run),
        resume_state: continuation,
        claim: None,
    }
}

fn webhook() -> Arc<Webhook> {
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
        model: "asked".to_owned(),
        ..Run::queued(scope, agent.to_owned())
    }
}

pub fn root() -> Scope {
    Scope::root(RunId::new(), Some(5))
}

pub fn child(of: &Scope) -> Scope {
    of.child(RunId::new(), None, of.max_depth)
        .expect("room for a child")
}

fn event(scope: &Scope, turn: u32) -> Event {
    Event {
        run_id: scope.run,
        root_id: scope.root,
        depth: scope.depth.0,
        agent: "writer".into(),
        time: now(),
        kind: EventKind::TurnStarted {
            turn,
            messages: 1,
            results: 0,
        },
    }
}

pub fn write(scope: &Scope, change: Change, events: u32) -> Write {
    Write {
        run: scope.run,
        root: scope.root,
        change,
        steps: Vec::new(),
        events: (1..=events).map(|turn| event(scope, turn)).collect(),
        deliveries: Vec::new(),
    }
}

fn opening(scope: &Scope, agent: &str) -> Write {
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

fn usage(tokens: u64) -> Usage {
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

fn progress(tokens: u64) -> Progress {
    Progress {
        turns: 1,
        model: "answered".to_owned(),
        stop_reason: Some("end_turn".to_owned()),
        usage: usage(tokens),
    }
}

fn closing(scope: &Scope, outcome: Outcome) -> Write {
    let usage = usage(10);
    let closing = FinishedRun {
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

fn failure() -> Failure {
    Failure {
        code: FailureCode::ProviderOverloaded,
        message: "overloaded".to_owned(),
        category: "overloaded".to_owned(),
        retryable: true,
    }
}

fn whole_log(root: &Scope) -> EventQuery {
    EventQuery {
        root: root.run,
        run: root.run,
        exclude_descendants: false,
        after: 0,
        limit: usize::MAX,
    }
}

fn numbers(events: &[StoredEvent]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

async fn stored(store: &dyn RunStore, scope: &Scope) -> Run {
    let found = store.run(scope.run).await.expect("a read");
    found.expect("the run")
}

async fn listed(store: &dyn RunStore, filter: RunFilter) -> Vec<RunId> {
    let page = store.list(filter).await.expect("a page");
    page.runs.iter().map(|run| run.id).collect()
}

fn page() -> RunFilter {
    RunFilter {
        limit: 50,
        ..RunFilter::default()
    }
}

// Shared stories.

/// A root and eight children write at once; the tree's log counts without a gap and the bell tells it in order.
async fn a_trees_log_has_no_gaps(opened: &Opened) {
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "parent")).await.expect("opened");
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, root) = (Arc::clone(store), root);
        tasks.spawn(async move {
            let child = child(&root);
            store.write(opening(&child, "child")).await.expect("opened");
            for round in 0..20 {
                let scope = if round % 4 == 0 { &root } else { &child };
                let some = write(scope, Change::Unchanged, round % 3);
                if round % 2 == 0 {
                    store.enqueue(some).await.expect("posted");
                } else {
                    store.write(some).await.expect("written");
                }
            }
            let last = store.write(completing(&child, "done")).await;
            (child, last.expect("closed"))
        });
    }
    let children = tasks.join_all().await;
    let last = store
        .write(completing(&root, "done"))
        .await
        .expect("closed");

    let log = store.events(whole_log(&root)).await.expect("the log");
    assert_eq!(numbers(&log), (1..=last).collect::<Vec<_>>());
    for event in &log {
        let data: serde_json::Value = serde_json::from_str(&event.data).expect("JSON");
        assert_eq!(data["seq"], event.seq);
        assert_eq!(data["run_id"], event.run_id.to_string());
        assert_eq!(data["type"], event.name);
    }
    let rung = opened.rung.lock().expect("no panic").clone();
    assert!(rung.iter().all(|(of, _)| *of == root.run));
    let told: Vec<_> = rung.into_iter().flat_map(|(_, events)| events).collect();
    assert_eq!(told, log);
    assert_eq!(stored(&**store, &root).await.last_event, last);
    for (child, last) in children {
        assert_eq!(stored(&**store, &child).await.last_event, last);
        let own = log.iter().rev().find(|event| event.run_id == child.run);
        assert_eq!(own.map(|event| event.seq), Some(last));
    }
}

/// Many end a run at once: one of them does, and nothing happens to it afterwards.
async fn a_run_ends_once(opened: &Opened) {
    let (store, root) = (&opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let ends = futures_util::future::join_all((0..16).map(|n| {
        let end = completing(&root, &format!("end {n}"));
        async move { (n, store.write(end).await) }
    }))
    .await;
    let won: Vec<_> = ends.iter().filter(|(_, end)| end.is_ok()).collect();
    assert_eq!(won.len(), 1);
    let lost = |end: &Result<u64, _>| matches!(end, Err(StoreError::AlreadyTerminal(id)) if *id == root.run);
    assert_eq!(ends.iter().filter(|(_, end)| lost(end)).count(), 15);
    let ended = stored(&**store, &root).await;
    assert_eq!(ended.content, Some(format!("end {}", won[0].0)));
    assert_eq!(ended.last_event, 2);

    let reason = "too late".to_owned();
    let late = store.write(write(&root, Change::RequestCancel { reason }, 1));
    assert_eq!(late.await.expect("ignored"), 0);
    for change in [
        Change::Start {
            at: now(),
            deadline: (now(), 60),
        },
        Change::Resume,
        Change::Unchanged,
        Change::Progress(progress(99)),
    ] {
        assert!(lost(&store.write(write(&root, change, 1)).await));
    }
    assert_eq!(stored(&**store, &root).await, ended);
    assert_eq!(
        store.events(whole_log(&root)).await.expect("a log").len(),
        2
    );
}

/// Everything that a record can hold comes back, through every stage of its life.
async fn a_record_reads_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "parent")).await.expect("opened");
    let child = child(&root);
    let mut run = Run {
        tool_call_id: Some("call_1".to_owned()),
        task: Some("the task ✓ ".repeat(500)),
        input: "the message\n\"quoted\" ".repeat(500).into(),
        label: Some("a label".to_owned()),
        completion_status: Some("complete".to_owned()),
        owner: Some("a key".to_owned()),
        labels: BTreeMap::from([("team".to_owned(), "x y".to_owned())]),
        ..record(&child, "child")
    };
    let open = write(&child, Change::Create(Box::new(fresh(run.clone()))), 0);
    assert_eq!(store.write(open).await.expect("opened"), 0);
    run.tree.runs = 1;
    assert_eq!(stored(store, &child).await, run);

    let begun = starting(&child);
    let Change::Start { at, .. } = begun.change else {
        unreachable!()
    };
    assert_eq!(store.write(begun).await.expect("started"), 2);
    run.status = Status::Running;
    run.started_at = Some(at);
    run.last_event = 2;
    assert_eq!(stored(store, &child).await, run);

    let further = write(&child, Change::Progress(progress(7)), 0);
    store.write(further).await.expect("further");
    run.turns = 1;
    run.model = "answered".to_owned();
    run.stop_reason = Some("end_turn".to_owned());
    run.usage = usage(7);
    run.tree.usage = usage(7);
    assert_eq!(stored(store, &child).await, run);

    let reason = "enough".to_owned();
    let stop = write(&child, Change::RequestCancel { reason }, 1);
    assert_eq!(store.write(stop).await.expect("asked to stop"), 3);
    run.status = Status::Cancelling;
    run.cancel_reason = Some("enough".to_owned());
    run.last_event = 3;
    assert_eq!(stored(store, &child).await, run);

    let end = closing(
        &child,
        Outcome::Cancelled {
            reason: "enough".to_owned(),
            partial: Some("half".to_owned()),
        },
    );
    let Change::Finish(close) = &end.change else {
        unreachable!()
    };
    run.finished_at = Some(close.finished_at);
    store.write(end).await.expect("closed");
    run.status = Status::Cancelled;
    run.partial_content = Some("half".to_owned());
    run.usage = usage(10);
    run.tree.usage = usage(10);
    run.last_event = 4;
    assert_eq!(stored(store, &child).await, run);

    let partial = None;
    let failed = Outcome::Failed {
        failure: failure(),
        partial,
    };
    store.write(closing(&root, failed)).await.expect("closed");
    let failed = stored(store, &root).await;
    assert_eq!(
        (failed.status, failed.error),
        (Status::Failed, Some(failure()))
    );
    assert_eq!(store.run(RunId::new()).await.expect("a read"), None);
}

/// Steps come back in their order, with a provider's own JSON as it was, whether or not events came with them.
async fn steps_read_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let raw = |text: &str| Arc::from(RawValue::from_string(text.to_owned()).expect("JSON"));
    let prompt = Step::Prompt {
        system: "system".to_owned(),
        message: "message".into(),
        earlier: Vec::new(),
    };
    let reply = Step::Reply {
        turn: 1,
        message: AssistantMessage {
            content: "line\nline\u{2028}".to_owned(),
            tool_calls: vec![ToolCall {
                id: "1".to_owned(),
                provider_id: String::new(),
                name: "read".to_owned(),
                arguments: raw("{\"n\": 1.0,\n \"a\":2}"),
            }],
            echo: Some(Echo {
                wire: "anthropic".to_owned(),
                body: raw("[1,\n2]"),
                prefix: u64::MAX,
            }),
        },
    };
    let result = |position| Step::Result {
        turn: 1,
        position,
        result: ToolResult::text("1", "found", false),
    };
    let wanted = vec![prompt, reply, result(0), result(1), result(2)];
    for (steps, events) in [(0..1, 2), (1..2, 0), (2..3, 0), (3..5, 1)] {
        let mut some = write(&root, Change::Unchanged, events);
        some.steps = wanted[steps].to_vec();
        let number = store.write(some).await.expect("written");
        assert_eq!(number == 0, events == 0);
    }
    let found = store.steps(root.run).await.expect("steps");
    assert_eq!(format!("{found:?}"), format!("{wanted:?}"));
    let log = store.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), [1, 2, 3, 4]);
}

/// Pages of runs by everything that a filter knows, newest first, and on with a cursor.
async fn runs_are_listed(opened: &Opened) {
    let store = &*opened.store;
    let start = Timestamp::from_second(1_800_000_000).expect("a time");
    let mut roots = Vec::new();
    for n in 0..12_u32 {
        let scope = root();
        let mut run = record(&scope, if n % 3 == 0 { "a" } else { "b" });
        run.created_at = start + Duration::from_secs(n.into());
        if n % 2 == 0 {
            run.labels.insert("team".to_owned(), "x".to_owned());
            run.labels.insert("n".to_owned(), n.to_string());
        }
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        match n {
            0..4 => drop(
                store
                    .write(completing(&scope, "done"))
                    .await
                    .expect("closed"),
            ),
            4..6 => {
                let end = Outcome::Failed {
                    failure: failure(),
                    partial: None,
                };
                store.write(closing(&scope, end)).await.expect("closed");
            }
            6..8 => drop(store.write(starting(&scope)).await.expect("started")),
            _ => {}
        }
        roots.push(scope);
    }
    let below = child(&roots[11]);
    store.write(opening(&below, "a")).await.expect("opened");
    let ended = child(&roots[11]);
    store.write(opening(&ended, "a")).await.expect("opened");
    store.write(completing(&ended, "x")).await.expect("closed");

    let roots = &roots;
    let newest = |ns: &[usize]| ns.iter().map(|n| roots[*n].run).collect::<Vec<_>>();
    let with = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(
        listed(store, page()).await,
        newest(&[11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    );
    let all = listed(
        store,
        RunFilter {
            include_children: true,
            ..page()
        },
    )
    .await;
    assert_eq!(all[..3], [ended.run, below.run, roots[11].run]);
    assert_eq!(all.len(), 14);

    let a = RunFilter {
        agent: Some("a".to_owned()),
        ..page()
    };
    assert_eq!(listed(store, a.clone()).await, newest(&[9, 6, 3, 0]));
    let done = RunFilter {
        status: Some(Status::Completed),
        ..a.clone()
    };
    assert_eq!(listed(store, done.clone()).await, newest(&[3, 0]));
    let all_done = RunFilter {
        include_children: true,
        ..done
    };
    assert_eq!(
        listed(store, all_done).await,
        [ended.run, roots[3].run, roots[0].run]
    );
    for (status, wanted) in [
        (Status::Failed, newest(&[5, 4])),
        (Status::Running, newest(&[7, 6])),
        (Status::Queued, newest(&[11, 10, 9, 8])),
        (Status::Cancelled, newest(&[])),
    ] {
        let status = Some(status);
        assert_eq!(listed(store, RunFilter { status, ..page() }).await, wanted);
    }

    let tree = RunFilter {
        root: Some(roots[11].run),
        ..page()
    };
    assert_eq!(
        listed(store, tree.clone()).await,
        [ended.run, below.run, roots[11].run]
    );
    let status = Some(Status::Queued);
    assert_eq!(
        listed(store, RunFilter { status, ..tree }).await,
        [below.run, roots[11].run]
    );

    let labels = vec![with("team", "x")];
    let team = RunFilter { labels, ..page() };
    assert_eq!(
        listed(store, team.clone()).await,
        newest(&[10, 8, 6, 4, 2, 0])
    );
    let labels = vec![with("team", "x"), with("n", "4")];
    assert_eq!(
        listed(store, RunFilter { labels, ..page() }).await,
        newest(&[4])
    );
    let agent = Some("b".to_owned());
    assert_eq!(
        listed(store, RunFilter { agent, ..team }).await,
        newest(&[10, 8, 4, 2])
    );

    let at = |seconds, nanos| Some(start + Duration::new(seconds, nanos));
    for (since, until, wanted) in [
        (at(3, 0), at(6, 0), newest(&[5, 4, 3])),
        (at(3, 1), at(6, 1), newest(&[6, 5, 4])),
        (at(10, 0), None, newest(&[11, 10])),
        (None, at(1, 0), newest(&[0])),
    ] {
        let some = RunFilter {
            since,
            until,
            ..page()
        };
        assert_eq!(listed(store, some).await, wanted);
    }

    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let some = RunFilter {
            before,
            limit: 5,
            ..page()
        };
        let ids = listed(store, some).await;
        assert!(ids.len() <= 5);
        before = ids.last().copied();
        if before.is_none() {
            break;
        }
        seen.extend(ids);
    }
    assert_eq!(seen, listed(store, page()).await);
    let limit = 0;
    assert!(
        listed(store, RunFilter { limit, ..page() })
            .await
            .is_empty()
    );
}

/// A page of a log begins after a number, ends with a write, and shows a subtree or one run alone.
async fn a_log_is_read_in_parts(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let (left, right) = (child(&root), child(&root));
    let below = child(&left);
    for (scope, events) in [(&root, 2), (&left, 1), (&right, 1), (&below, 3), (&left, 2)] {
        let change = match store.run(scope.run).await.expect("a read") {
            Some(_) => Change::Unchanged,
            None => Change::Create(Box::new(fresh(record(scope, "a")))),
        };
        store
            .write(write(scope, change, events))
            .await
            .expect("written");
    }
    let part = |of: &Scope, only, after, limit| EventQuery {
        root: root.run,
        run: of.run,
        exclude_descendants: only,
        after,
        limit,
    };
    for (query, wanted) in [
        (part(&root, false, 0, 100), vec![1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (part(&root, false, 5, 100), vec![6, 7, 8, 9]),
        (part(&root, false, 9, 100), vec![]),
        (part(&root, false, 99, 100), vec![]),
        (part(&root, false, 2, 3), vec![3, 4, 5, 6, 7]),
        (part(&root, false, 0, 0), vec![]),
        (part(&root, true, 0, 100), vec![1, 2]),
        (part(&left, false, 0, 100), vec![3, 5, 6, 7, 8, 9]),
        (part(&left, true, 0, 100), vec![3, 8, 9]),
        (part(&left, false, 6, 1), vec![7]),
        (part(&below, false, 0, 100), vec![5, 6, 7]),
        (part(&right, false, 4, 100), vec![]),
    ] {
        let found = store.events(query).await.expect("events");
        assert_eq!(numbers(&found), wanted, "{query:?}");
    }
}

/// What a tree has used is known while it is at work, and stands in the record once it has ended.
async fn a_trees_usage_is_summed(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let child = child(&root);
    let below = child
        .child(RunId::new(), None, child.max_depth)
        .expect("room");
    for scope in [&root, &child, &below] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    for (scope, tokens) in [(&root, 1), (&child, 10), (&below, 100)] {
        let further = write(scope, Change::Progress(progress(tokens)), 0);
        store.write(further).await.expect("further");
    }
    let tree = stored(store, &root).await.tree;
    assert_eq!((tree.runs, tree.usage.tokens.input), (3, 111));
    assert_eq!(tree.usage.cost, Some(Cost(111)));
    assert_eq!((tree.usage.tool_calls, tree.usage.model_calls), (9, 3));
    let tree = stored(store, &child).await.tree;
    assert_eq!((tree.runs, tree.usage.tokens.input), (2, 110));
    let page = store.list(page()).await.expect("a page");
    assert_eq!(page.runs[0].tree.usage.tokens.input, 111);

    let open = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(open[1].run.tree, stored(store, &child).await.tree);
    let open: Vec<_> = open.iter().map(|found| found.run.id).collect();
    assert_eq!(open, [root.run, child.run, below.run]);
    let whole = store.tree(root.run).await.expect("a tree");
    let whole: Vec<_> = whole.iter().map(|run| run.id).collect();
    assert_eq!(whole, [root.run, child.run, below.run]);
    let part = store.tree(child.run).await.expect("a tree");
    assert_eq!(part.len(), 2);
    let children = store.children(root.run).await.expect("children");
    assert_eq!(children.len(), 1);
    assert_eq!(children[0].id, child.run);

    for scope in [&below, &child] {
        store.write(completing(scope, "x")).await.expect("closed");
    }
    let mut end = completing(&root, "x");
    let Change::Finish(close) = &mut end.change else {
        unreachable!()
    };
    let mut sum = usage(500);
    sum.cost = None;
    close.tree_usage = TreeUsage {
        runs: 3,
        usage: sum,
    };
    store.write(end).await.expect("closed");
    let tree = stored(store, &root).await.tree;
    assert_eq!((tree.runs, tree.usage), (3, sum));
    assert!(
        store
            .unfinished_runs()
            .await
            .expect("unfinished")
            .is_empty()
    );
}

/// A root goes with all that is below it, and with nothing else.
async fn a_tree_is_deleted(opened: &Opened) {
    let (store, root, other) = (&*opened.store, root(), root());
    let child = child(&root);
    for scope in [&root, &child, &other] {
        let mut run = record(scope, "a");
        run.labels.insert("k".to_owned(), "v".to_owned());
        run.input = "long ".repeat(1000).into();
        let mut open = write(scope, Change::Create(Box::new(fresh(run))), 1);
        open.steps.push(Step::Prompt {
            system: String::new(),
            message: "m".into(),
            earlier: Vec::new(),
        });
        store.write(open).await.expect("opened");
    }
    assert!(!store.delete(child.run).await.expect("no root"));
    assert!(!store.delete(RunId::new()).await.expect("no run"));
    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(!store.delete(root.run).await.expect("gone"));
    for scope in [&root, &child] {
        assert_eq!(store.run(scope.run).await.expect("a read"), None);
        assert!(store.steps(scope.run).await.expect("steps").is_empty());
        let late = store.write(write(scope, Change::Unchanged, 1)).await;
        assert!(matches!(late, Err(StoreError::RunNotFound(_))), "{late:?}");
    }
    assert!(
        store
            .events(whole_log(&root))
            .await
            .expect("events")
            .is_empty()
    );
    let labels = vec![("k".to_owned(), "v".to_owned())];
    let marked = RunFilter {
        labels,
        include_children: true,
        ..page()
    };
    assert_eq!(listed(store, marked).await, [other.run]);
    assert_eq!(store.steps(other.run).await.expect("steps").len(), 1);
    assert_eq!(stored(store, &other).await.input.text_bytes(), 5000);
}

/// A delivery lies in the outbox exactly where the write that it tells of was committed, until it has arrived.
async fn a_delivery_is_committed_with_its_write(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let with = |mut write: Write, ids: &[DeliveryId]| {
        let new = |id: &DeliveryId| NewDelivery {
            id: *id,
            webhook: webhook(),
            event: "run.completed",
            body: format!("{{\"n\":\"{id}\"}}"),
            created_at: now(),
        };
        write.deliveries = ids.iter().map(new).collect();
        write
    };
    let ids = [DeliveryId::new(), DeliveryId::new()];
    store.write(opening(&root, "a")).await.expect("opened");
    let bell = store.delivery_notify();
    store
        .write(with(completing(&root, "x"), &ids))
        .await
        .expect("closed");
    tokio::time::timeout(Duration::from_secs(30), bell.notified())
        .await
        .expect("rung");
    // A write that is refused tells nothing, and one that is ignored neither.
    let late = with(completing(&root, "y"), &[DeliveryId::new()]);
    assert!(store.write(late).await.is_err());
    let reason = String::new();
    let late = write(&root, Change::RequestCancel { reason }, 1);
    let late = store.write(with(late, &[DeliveryId::new()])).await;
    assert_eq!(late.expect("ignored"), 0);

    let due = |by: Timestamp, not: &[DeliveryId], not_to: &[&str]| {
        let query = DueQuery {
            due_by: by,
            in_flight: not.to_vec(),
            excluded_hosts: not_to
                .iter()
                .map(|host| (String::new(), (*host).to_owned()))
                .collect(),
            limit: 10,
        };
        async move { store.due_deliveries(query).await.expect("what is due") }
    };
    let soon = now() + Duration::from_secs(1);
    let found = due(soon, &[], &["other.example.com"]).await;
    let names: Vec<_> = found.deliveries.iter().map(|it| it.id).collect();
    assert_eq!(names, ids);
    let first = &found.deliveries[0];
    assert_eq!((first.run, first.attempt_count), (root.run, 0));
    assert_eq!(first.agent, "a");
    assert_eq!(first.url, webhook().url);
    assert_eq!(first.host, "hooks.example.com");
    assert_eq!(first.secret_env.as_deref(), Some("SECRET"));
    assert_eq!(first.body, format!("{{\"n\":\"{}\"}}", ids[0]));
    assert_eq!(due(soon, &ids[..1], &[]).await.deliveries.len(), 1);
    let shut = due(soon, &[], &["hooks.example.com"]).await;
    assert!(shut.deliveries.is_empty());
    let early = Timestamp::from_millisecond(1).expect("a time");
    let early = due(early, &[], &[]).await;
    assert!(early.deliveries.is_empty() && early.next_due_at.is_some());

    let since = first.since;
    let tried = |id, then, status| {
        let attempt = DeliveryAttempt {
            time: now(),
            status: Some(status),
            error: Some("why \"so\"".to_owned()).filter(|_| then != AttemptOutcome::Delivered),
        };
        async move {
            let tried = AttemptRecord {
                id,
                since,
                attempt,
                outcome: then,
            };
            store.record_attempt(tried).await.expect("kept")
        }
    };
    // Retention leaves a run until what it tells has arrived, or was given up.
    let old = || async {
        let query = ExpiredQuery {
            status: Status::Completed,
            cutoff: Cutoff::CreatedBefore(RunId::new()),
            after: None,
        };
        let mut found = store.expired_roots(query).await.expect("a page").roots;
        found.retain(|id| *id == root.run);
        found
    };
    assert!(old().await.is_empty());
    let later = now() + Duration::from_secs(3600);
    tried(ids[0], AttemptOutcome::RetryAt(later), 500).await;
    tried(ids[1], AttemptOutcome::Delivered, 200).await;
    let found = due(soon, &[], &[]).await;
    assert!(found.deliveries.is_empty());
    assert_eq!(found.next_due_at, Some(later));
    let listed = store.deliveries(root.run).await.expect("listed");
    let stand: Vec<_> = listed
        .iter()
        .map(|it| (it.id, it.status, it.next_attempt_at, it.attempts.len()))
        .collect();
    assert_eq!(
        stand,
        [
            (ids[0], DeliveryStatus::Pending, Some(later), 1),
            (ids[1], DeliveryStatus::Delivered, None, 1)
        ]
    );
    assert_eq!(listed[0].attempts[0].error.as_deref(), Some("why \"so\""));
    assert_eq!(listed[1].attempts[0].status, Some(200));

    for _ in 0..MAX_STORED_ATTEMPTS + 5 {
        tried(ids[0], AttemptOutcome::GivenUp, 404).await;
    }
    let listed = store.deliveries(root.run).await.expect("listed");
    assert_eq!(listed[0].status, DeliveryStatus::Failed);
    assert_eq!(listed[0].attempts.len(), MAX_STORED_ATTEMPTS);
    assert_eq!(old().await, [root.run]);
    assert!(!store.resend(RunId::new(), ids[0]).await.expect("no run"));
    assert!(
        !store
            .resend(root.run, DeliveryId::new())
            .await
            .expect("none")
    );
    assert!(store.resend(root.run, ids[0]).await.expect("again"));
    let again = due(now() + Duration::from_secs(1), &[], &[]).await;
    assert_eq!(again.deliveries.len(), 1);
    assert_eq!(again.deliveries[0].attempt_count, 0);
    // A try that was under way when it was sent again settles nothing for that.
    tried(ids[0], AttemptOutcome::GivenUp, 404).await;
    let again = due(now() + Duration::from_secs(1), &[], &[]).await;
    assert_eq!(again.deliveries.len(), 1);
    assert_eq!(again.deliveries[0].attempt_count, 0);

    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(store.deliveries(root.run).await.expect("none").is_empty());
    let gone = due(now() + Duration::from_secs(1), &[], &[]).await;
    assert!(gone.deliveries.is_empty() && gone.next_due_at.is_none());
    tried(ids[0], AttemptOutcome::Delivered, 200).await;
}

/// A tree that takes more than one transaction goes as one that does not.
async fn a_large_tree_is_deleted(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let mut below = Vec::new();
    for _ in 0..150 {
        let child = child(&root);
        let grandchild = self::child(&child);
        for scope in [&child, &grandchild] {
            store.write(opening(scope, "b")).await.expect("opened");
            store.enqueue(starting(scope)).await.expect("posted");
        }
        below.extend([child, grandchild]);
    }
    let before = store.commit_count();
    assert!(store.delete(root.run).await.expect("deleted"));
    assert!(!store.delete(root.run).await.expect("gone"));
    for scope in below.iter().chain([&root]) {
        assert_eq!(store.run(scope.run).await.expect("a read"), None);
    }
    let left = store.events(whole_log(&root)).await.expect("events");
    assert!(left.is_empty());
    let still_busy = store.unfinished_runs().await.expect("unfinished");
    assert!(still_busy.is_empty());
    while store.vacuum().await.expect("tidied") {}
    assert!(store.commit_count() > before + 2, "in parts");
}

/// Ended roots are found by how and when they ended and by their place, but not while a run below them goes on.
async fn what_is_old_is_found(opened: &Opened) {
    let store = &*opened.store;
    let mut completed = Vec::new();
    for n in 0..200 {
        let scope = root();
        store.write(opening(&scope, "a")).await.expect("opened");
        if n == 100 {
            let below = child(&scope);
            store.write(opening(&below, "a")).await.expect("opened");
        } else {
            completed.push(scope.run);
        }
        store.write(completing(&scope, "x")).await.expect("closed");
    }
    let failed = root();
    store.write(opening(&failed, "a")).await.expect("opened");
    let close = closing(
        &failed,
        Outcome::Failed {
            failure: failure(),
            partial: None,
        },
    );
    store.write(close).await.expect("closed");
    store.write(opening(&root(), "a")).await.expect("opened");

    let all = async |status, before| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let query = ExpiredQuery {
                status,
                cutoff: before,
                after,
            };
            let page = store.expired_roots(query).await.expect("a page");
            found.extend(page.roots);
            after = page.next;
            if after.is_none() {
                return found;
            }
        }
    };
    let future = Cutoff::EndedBefore(in_an_hour());
    assert_eq!(all(Status::Completed, future).await, completed);
    assert_eq!(all(Status::Failed, future).await, [failed.run]);
    assert!(all(Status::Cancelled, future).await.is_empty());
    let past = Timestamp::from_second(1_000_000_000).expect("a time");
    let past = Cutoff::EndedBefore(past);
    assert!(all(Status::Completed, past).await.is_empty());
    let oldest = Cutoff::CreatedBefore(completed[150]);
    assert_eq!(all(Status::Completed, oldest).await, completed[..150]);

    let newest = async |before, but| {
        let status = Status::Completed;
        let query = NthNewestQuery {
            status,
            before,
            offset: but,
        };
        store.nth_newest_ended(query).await.expect("a place")
    };
    assert_eq!(newest(None, 0).await, Some(completed[198]));
    assert_eq!(newest(Some(completed[198]), 1).await, Some(completed[196]));
    assert_eq!(newest(None, 200).await, None);
}

/// What a run needs to be continued comes back, a queued run's and a started one's, and only those that have not ended.
async fn a_continuation_reads_back(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    let child = child(&root);
    let deadline =
        |millis: i64| Timestamp::from_millisecond(1_900_000_000_000 + millis).expect("a time");
    let kept = |definition: &str, deadline| ResumeState {
        definition: definition.into(),
        deadline,
        timeout: 300,
        stream: deadline.is_none(),
        webhooks: deadline.is_none().then(webhook).into_iter().collect(),
        waiting_since: None,
        workdir: Some(FileId {
            device: u64::MAX,
            inode: 7,
        }),
    };
    let of_child = kept("{\"name\":\"child\"}", Some((deadline(1), 40)));
    let of_root = kept("{\"name\":\"é\"}", None);
    for (scope, continuation) in [(&root, &of_root), (&child, &of_child)] {
        let opening = NewRun {
            resume_state: continuation.clone(),
            ..fresh(record(scope, "a"))
        };
        let open = write(scope, Change::Create(Box::new(opening)), 1);
        store.write(open).await.expect("opened");
    }
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run, stored(store, &root).await);
    assert_eq!(found[0].resume_state, Some(of_root.clone()));
    assert_eq!(found[1].run, stored(store, &child).await);
    assert_eq!(found[1].resume_state, Some(of_child));

    let start = Change::Start {
        at: now(),
        deadline: (deadline(2), 50),
    };
    store.write(write(&root, start, 1)).await.expect("started");
    store.write(completing(&child, "x")).await.expect("closed");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found.len(), 1);
    let started = ResumeState {
        deadline: Some((deadline(2), 50)),
        ..of_root
    };
    assert_eq!(found[0].resume_state, Some(started.clone()));

    // While it waits its time stands still; afterwards it has a new deadline.
    let since = deadline(0);
    let waiting = Change::Pause {
        since,
        waiting_for: axed::domain::run::WaitingFor::Approval,
    };
    store.write(write(&root, waiting, 1)).await.expect("waits");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run.status, Status::Waiting);
    let waits = ResumeState {
        waiting_since: Some(since),
        ..started.clone()
    };
    assert_eq!(found[0].resume_state, Some(waits));
    let going = Change::Unpause {
        deadline: (deadline(9), 50),
    };
    store.write(write(&root, going, 0)).await.expect("goes on");
    let found = store.unfinished_runs().await.expect("unfinished");
    assert_eq!(found[0].run.status, Status::Running);
    let goes = ResumeState {
        deadline: Some((deadline(9), 50)),
        ..started
    };
    assert_eq!(found[0].resume_state, Some(goes));
}

/// Every process that goes on with a run counts; where the run stands is not changed by it.
async fn going_on_counts_as_an_attempt(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.write(opening(&root, "a")).await.expect("opened");
    let resume = |events| store.write(write(&root, Change::Resume, events));
    resume(0).await.expect("resumed");
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (2, Status::Queued));
    store.write(starting(&root)).await.expect("started");
    assert_eq!(resume(1).await.expect("resumed"), 3);
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (3, Status::Running));
    let reason = String::new();
    let stop = write(&root, Change::RequestCancel { reason }, 1);
    store.write(stop).await.expect("asked to stop");
    resume(0).await.expect("resumed");
    let now = stored(store, &root).await;
    assert_eq!((now.attempt, now.status), (4, Status::Cancelling));
    store.write(completing(&root, "x")).await.expect("closed");
    let late = resume(1).await;
    assert!(matches!(late, Err(StoreError::AlreadyTerminal(id)) if id == root.run));
    let nobody = store.write(write(&self::root(), Change::Resume, 1)).await;
    assert!(matches!(nobody, Err(StoreError::RunNotFound(_))));
}

/// A session is one key's; its runs come newest first, and can be told apart by agent and end.
async fn runs_are_found_by_session(opened: &Opened) {
    let store = &*opened.store;
    let mut all = Vec::new();
    for (owner, name, agent) in [
        (None, "s", "a"),
        (None, "s", "b"),
        (None, "s", "a"),
        (Some("ada"), "s", "a"),
        (None, "t", "a"),
    ] {
        let scope = root();
        let mut run = record(&scope, agent);
        run.owner = owner.map(str::to_owned);
        run.session = Some(name.to_owned());
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        all.push(scope);
    }
    store.write(opening(&root(), "a")).await.expect("opened");
    let done = completing(&all[0], "done");
    store.write(done).await.expect("closed");
    let of_nobody = || SessionQuery {
        name: "s".to_owned(),
        limit: 50,
        ..SessionQuery::default()
    };
    let of_ada = SessionQuery {
        owner: Some("ada".to_owned()),
        ..of_nobody()
    };
    let of_a = SessionQuery {
        agent: Some("a".to_owned()),
        ..of_nobody()
    };
    let completed = SessionQuery {
        status: Some(Status::Completed),
        ..of_a.clone()
    };
    let older = SessionQuery {
        before: Some(all[1].run),
        ..of_nobody()
    };
    let one = SessionQuery {
        limit: 1,
        ..of_nobody()
    };
    for (query, expected) in [
        (of_nobody(), &[2, 1, 0][..]),
        (of_ada, &[3]),
        (of_a, &[2, 0]),
        (completed, &[0]),
        (older, &[0]),
        (one, &[2]),
    ] {
        let found = store.session_runs(query.clone()).await.expect("a read");
        let found: Vec<RunId> = found.iter().map(|run| run.id).collect();
        let expected: Vec<RunId> = expected.iter().map(|at| all[*at].run).collect();
        assert_eq!(found, expected, "{query:?}");
    }
    let first = stored(store, &all[0]).await;
    assert_eq!(first.session.as_deref(), Some("s"));
}

/// Fifty clients say the same at once: one run is made, and the others are told of it.
async fn a_key_accepts_one_run(opened: &Opened) {
    let store = &*opened.store;
    let scopes: Vec<_> = (0..50).map(|_| root()).collect();
    let results = futures_util::future::join_all(scopes.iter().enumerate().map(|(n, scope)| {
        let claim = claim("k", n as u8, in_an_hour());
        store.write(claiming(scope, claim))
    }))
    .await;
    let won: Vec<_> = (0..50).filter(|n| results[*n].is_ok()).collect();
    let [won] = won[..] else { panic!("{won:?}") };
    let wanted = ClaimedRun {
        run: scopes[won].run,
        body_hash: [won as u8; 32],
    };
    for (n, result) in results.iter().enumerate() {
        let refused = matches!(result, Err(StoreError::AlreadyClaimed(by)) if *by == wanted);
        assert_eq!(refused, n != won, "{result:?}");
    }
    assert_eq!(listed(store, page()).await, [wanted.run]);
    let key = |key: &str| store.claimed_run(claim(key, 0, in_an_hour()).key);
    assert_eq!(key("k").await.expect("a read"), Some(wanted));
    assert_eq!(key("other").await.expect("a read"), None);

    // The refused run never was: neither broken, nor in the way of its own id, nor with a log.
    let refused = &scopes[(won + 1) % 50];
    let again = claiming(refused, claim("k", 0, in_an_hour()));
    store.enqueue(again).await.expect("posted");
    let late = store.write(write(refused, Change::Unchanged, 1)).await;
    assert!(matches!(late, Err(StoreError::RunNotFound(_))), "{late:?}");
    let open = claiming(refused, claim("other", 7, in_an_hour()));
    assert_eq!(store.write(open).await.expect("opened"), 1);

    // Everything of a key tells it from others.
    for change in [
        |key: &mut IdempotencyKey| key.credential.push('x'),
        |key: &mut IdempotencyKey| key.route.push('x'),
        |key: &mut IdempotencyKey| key.key.push('x'),
    ] {
        let mut other = claim("k", 0, in_an_hour());
        change(&mut other.key);
        store.write(claiming(&root(), other)).await.expect("opened");
    }
    assert!(store.delete(wanted.run).await.expect("deleted"));
    assert_eq!(key("k").await.expect("a read"), None);
    let anew = claiming(&root(), claim("k", 1, in_an_hour()));
    store.write(anew).await.expect("opened");
}

/// A key that has expired accepts once more.
async fn a_key_expires(opened: &Opened) {
    let store = &*opened.store;
    for n in 0..20 {
        let old = claim(&n.to_string(), n, now());
        store.write(claiming(&root(), old)).await.expect("opened");
    }
    let expired = claim("7", 1, in_an_hour());
    let found = store.claimed_run(expired.key.clone()).await;
    assert_eq!(found.expect("a read"), None);
    let (first, second) = (root(), root());
    let open = claiming(&first, expired.clone());
    store.write(open).await.expect("opened");
    let refused = store.write(claiming(&second, expired)).await;
    assert!(matches!(refused, Err(StoreError::AlreadyClaimed(by)) if by.run == first.run));
    assert_eq!(listed(store, page()).await.len(), 21);
}

/// A key's holder sees his own runs, ended or not, and pages through them like anybody.
async fn runs_are_listed_by_owner(opened: &Opened) {
    let store = &*opened.store;
    let mut mine = Vec::new();
    for n in 0..12 {
        let scope = root();
        let mut run = record(&scope, if n % 4 == 0 { "a" } else { "b" });
        run.owner = [None, Some("me"), Some("me too")][n % 3].map(str::to_owned);
        run.labels.insert("k".to_owned(), "v".to_owned());
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        if n < 8 {
            store.write(completing(&scope, "x")).await.expect("closed");
        }
        if n % 3 == 1 {
            mine.insert(0, scope.run);
        }
    }
    let owner = Some("me".to_owned());
    let by = RunFilter { owner, ..page() };
    assert_eq!(listed(store, by.clone()).await, mine);
    let limit = 2;
    assert_eq!(
        listed(
            store,
            RunFilter {
                limit,
                ..by.clone()
            }
        )
        .await,
        mine[..2]
    );
    let before = Some(mine[1]);
    assert_eq!(
        listed(
            store,
            RunFilter {
                before,
                ..by.clone()
            }
        )
        .await,
        mine[2..]
    );
    let agent = Some("a".to_owned());
    assert_eq!(
        listed(
            store,
            RunFilter {
                agent,
                ..by.clone()
            }
        )
        .await,
        [mine[2]]
    );
    let status = Some(Status::Completed);
    assert_eq!(
        listed(
            store,
            RunFilter {
                status,
                ..by.clone()
            }
        )
        .await,
        mine[1..]
    );
    let labels = vec![("k".to_owned(), "v".to_owned())];
    assert_eq!(
        listed(
            store,
            RunFilter {
                labels,
                ..by.clone()
            }
        )
        .await,
        mine
    );
    for (root, wanted) in [(mine[3], &mine[3..]), (RunId::new(), &[])] {
        let root = Some(root);
        assert_eq!(
            listed(store, RunFilter { root, ..by.clone() }).await,
            wanted
        );
    }
    assert_eq!(listed(store, page()).await.len(), 12);
}

/// Writes that are wrong fail alone, whoever they are committed with.
async fn a_wrong_write_spoils_no_other(opened: &Opened) {
    let (store, root, nobody) = (&*opened.store, root(), root());
    store.write(opening(&root, "a")).await.expect("opened");
    let results = futures_util::future::join_all((0..60).map(|n| {
        store.write(match n % 3 {
            0 => write(&root, Change::Unchanged, 1),
            1 => starting(&nobody),
            _ => opening(&root, "again"),
        })
    }))
    .await;
    let mut number = 1;
    for (n, result) in results.into_iter().enumerate() {
        if n % 3 == 0 {
            number += 1;
            assert_eq!(result.expect("written"), number);
        } else {
            let error = result.expect_err("refused");
            let unknown = matches!(error, StoreError::RunNotFound(id) if id == nobody.run);
            assert_eq!(unknown, n % 3 == 1, "{error}");
        }
    }
    let orphan = child(&nobody);
    let orphan = store.write(opening(&orphan, "a")).await;
    assert!(matches!(orphan, Err(StoreError::RunNotFound(id)) if id == nobody.run));
    let log = store.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), (1..=number).collect::<Vec<_>>());
}

/// Nobody waits for a posted write; when it fails its run takes no further one, and other runs are as before.
async fn a_failed_post_stops_its_run(opened: &Opened) {
    let (store, broken, whole) = (&*opened.store, root(), root());
    for scope in [&broken, &whole] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    store
        .enqueue(opening(&broken, "again"))
        .await
        .expect("posted");
    store.enqueue(starting(&whole)).await.expect("posted");
    let later = store.write(starting(&broken)).await.expect_err("a gap");
    assert!(matches!(later, StoreError::Suspended), "{later}");
    let later = store.write(completing(&broken, "x")).await;
    assert!(matches!(later, Err(StoreError::Suspended)));
    store.write(completing(&whole, "x")).await.expect("closed");
    assert_eq!(stored(store, &broken).await.status, Status::Queued);
    assert_eq!(stored(store, &whole).await.status, Status::Completed);
    // Its owner goes on from what is committed.
    store.clear_failed(vec![broken.run]).await.expect("mended");
    store.write(completing(&broken, "x")).await.expect("closed");
}

/// What was handed over before the close is kept; afterwards nothing is taken.
async fn a_closed_store_refuses(opened: &Opened) {
    let (store, root) = (&*opened.store, root());
    store.check().await.expect("in order");
    store.write(opening(&root, "a")).await.expect("opened");
    for _ in 0..500 {
        let some = write(&root, Change::Unchanged, 1);
        store.enqueue(some).await.expect("posted");
    }
    store.close().await;
    assert_eq!(opened.rung.lock().expect("no panic").len(), 501);
    store.close().await;
    let closed = |error| matches!(error, StoreError::Closed);
    assert!(store.write(starting(&root)).await.is_err_and(closed));
    assert!(store.enqueue(starting(&root)).await.is_err_and(closed));
    assert!(store.run(root.run).await.is_err_and(closed));
    assert!(store.delete(root.run).await.is_err_and(closed));
    assert!(store.check().await.is_err_and(closed));
}

macro_rules! shared_stories {
    ($engine:ident: $($story:ident),+ $(,)?) => {
        mod $engine {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                super::$story(&super::$engine()).await;
            }
        )+}
    };
}

shared_stories!(sqlite:
    a_trees_log_has_no_gaps,
    a_run_ends_once,
    a_record_reads_back,
    steps_read_back,
    runs_are_listed,
    a_log_is_read_in_parts,
    a_trees_usage_is_summed,
    a_tree_is_deleted,
    a_delivery_is_committed_with_its_write,
    a_large_tree_is_deleted,
    what_is_old_is_found,
    a_continuation_reads_back,
    going_on_counts_as_an_attempt,
    a_key_accepts_one_run,
    a_key_expires,
    runs_are_listed_by_owner,
    runs_are_found_by_session,
    a_wrong_write_spoils_no_other,
    a_failed_post_stops_its_run,
    a_closed_store_refuses,
);

// Stories of the SQLite file.

#[tokio::test]
async fn a_file_opened_again_has_everything() {
    let Opened { store, place, .. } = sqlite();
    let (ended, at_work) = (root(), root());
    let key = claim("k", 1, in_an_hour());
    let open = claiming(&ended, key.clone());
    store.write(open).await.expect("opened");
    store.write(opening(&at_work, "a")).await.expect("opened");
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    store
        .write(completing(&ended, "done"))
        .await
        .expect("closed");
    let before = (
        stored(&*store, &ended).await,
        stored(&*store, &at_work).await,
    );
    store.close().await;
    assert!(
        !place.path().join("axed.db-wal").exists(),
        "the log is folded in"
    );

    // Closed and not yet dropped: the lock is free.
    let (again, _) = sqlite_in(place.path()).expect("opened again");
    let after = (
        stored(&*again, &ended).await,
        stored(&*again, &at_work).await,
    );
    assert_eq!(before, after);
    let left = again.unfinished_runs().await.expect("unfinished");
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].resume_state, unfinished[1].resume_state);
    assert!(left[0].resume_state.is_some());
    let claimed = ClaimedRun {
        run: ended.run,
        body_hash: [1; 32],
    };
    let found = again.claimed_run(key.key.clone()).await;
    assert_eq!(found.expect("a read"), Some(claimed));
    let refused = again.write(claiming(&root(), key)).await;
    assert!(matches!(refused, Err(StoreError::AlreadyClaimed(by)) if by == claimed));
    let next = again.write(completing(&at_work, "done")).await;
    assert_eq!(next.expect("closed"), 2, "the tree's log counts on");
}

#[tokio::test]
async fn a_dropped_store_has_kept_what_was_posted() {
    let Opened { store, place, .. } = sqlite();
    let root = root();
    store.write(opening(&root, "a")).await.expect("opened");
    for _ in 0..100 {
        let some = write(&root, Change::Unchanged, 1);
        store.enqueue(some).await.expect("posted");
    }
    drop(store);
    let (store, _) = sqlite_in(place.path()).expect("opened again");
    assert_eq!(stored(&*store, &root).await.last_event, 101);
}

#[tokio::test]
async fn a_killed_process_has_kept_what_was_answered() {
    let Opened { store, place, .. } = sqlite();
    let root = root();
    store.write(opening(&root, "a")).await.expect("opened");
    store
        .write(completing(&root, "done"))
        .await
        .expect("closed");
    // The files as a dead process leaves them: nobody has folded the log in.
    let left = tempfile::tempdir().expect("a directory");
    for name in ["axed.db", "axed.db-wal", "lock"] {
        std::fs::copy(place.path().join(name), left.path().join(name)).expect("a copy");
    }
    let (found, _) = sqlite_in(left.path()).expect("opened");
    assert_eq!(stored(&*found, &root).await, stored(&*store, &root).await);
    let log = found.events(whole_log(&root)).await.expect("a log");
    assert_eq!(numbers(&log), [1, 2]);
}

#[tokio::test]
async fn a_second_process_is_told_who_holds_the_directory() {
    let opened = sqlite();
    let dir = opened.place.path();
    let error = sqlite_in(dir).err().expect("refused");
    let StoreError::Locked { dir: named, holder } = &error else {
        panic!("{error}");
    };
    assert_eq!(*named, dir.display().to_string());
    let us = format!("(process {})", std::process::id());
    assert!(
        holder.starts_with("it") && holder.ends_with(&us),
        "{holder}"
    );
    // The one that was refused has taken nothing away.
    let root = root();
    opened
        .store
        .write(opening(&root, "a"))
        .await
        .expect("opened");
    drop(opened.store);
    sqlite_in(dir).expect("free again");
}

#[tokio::test]
async fn a_directory_is_made_for_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let place = tempfile::tempdir().expect("a directory");
    let dir = place.path().join("a/b");
    let (store, _) = sqlite_in(&dir).expect("opened");
    store.check().await.expect("in order");
    for (path, mode) in [
        ("", 0o700),
        ("lock", 0o600),
        ("axed.db", 0o600),
        ("axed.db-wal", 0o600),
    ] {
        let found = std::fs::metadata(dir.join(path)).expect(path);
        assert_eq!(found.permissions().mode() & 0o777, mode, "{path}");
    }
}

#[tokio::test]
async fn a_file_that_is_not_ours_is_refused_by_name() {
    type Damage = fn(&Path);
    let cases: [(Damage, &str); 4] = [
        (
            |dir| sql(dir, "PRAGMA user_version = 99"),
            "axed.db was written by a newer version of axed",
        ),
        (
            |dir| sql(dir, "PRAGMA application_id = 1"),
            "axed.db is a database of another program",
        ),
        (
            |dir| std::fs::write(dir.join("axed.db"), [7; 5000]).expect("written"),
            "axed.db: file is not a database",
        ),
        (
            |dir| {
                std::fs::remove_file(dir.join("axed.db")).expect("removed");
                std::fs::create_dir(dir.join("axed.db")).expect("made");
            },
            "axed.db: Is a directory",
        ),
    ];
    for (damage, wanted) in cases {
        let Opened { store, place, .. } = sqlite();
        store.close().await;
        damage(place.path());
        let error = sqlite_in(place.path()).err().expect("refused").to_string();
        assert!(error.contains(wanted), "{error}");
        assert!(
            error.contains(&place.path().display().to_string()),
            "{error}"
        );
    }
    let place = tempfile::NamedTempFile::new().expect("a file");
    let error = sqlite_in(place.path()).err().expect("refused").to_string();
    assert!(
        error.contains("could not make the data directory"),
        "{error}"
    );
}

#[tokio::test]
async fn a_failing_engine_leaves_nothing_half_done() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let gaps = Arc::<Mutex<Vec<RunId>>>::default();
    let heard = Arc::clone(&gaps);
    store.on_write_failed(Box::new(move |root| {
        heard.lock().expect("roots").push(root);
    }));
    let (root, posted) = (root(), root());
    for scope in [&root, &posted] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    sql(
        dir,
        "CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk full'); END",
    );
    let error = store.write(starting(&root)).await.expect_err("full");
    assert!(error.to_string().contains("disk full"), "{error}");
    store.enqueue(starting(&posted)).await.expect("posted");
    assert!(store.write(starting(&root)).await.is_err());
    assert_eq!(stored(store, &root).await.status, Status::Queued);
    sql(dir, "DROP TRIGGER full");
    assert_eq!(store.write(starting(&root)).await.expect("started"), 2);
    let gap = store.write(starting(&posted)).await.expect_err("a gap");
    assert!(matches!(gap, StoreError::Suspended), "{gap}");
    assert_eq!(*gaps.lock().expect("roots"), [posted.run]);
    store.clear_failed(vec![posted.run]).await.expect("mended");
    assert_eq!(store.write(starting(&posted)).await.expect("started"), 2);
}

/// A definition lies once for each content, whoever hands it over, and no rollback makes the writer believe otherwise.
#[tokio::test]
async fn a_definition_is_stored_once() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let text: Arc<str> = "{\"name\":\"shared\"}".into();
    let running_by = |definition: &Arc<str>| {
        let scope = root();
        let mut opening = fresh(record(&scope, "a"));
        opening.resume_state.definition = Arc::clone(definition);
        write(&scope, Change::Create(Box::new(opening)), 1)
    };
    sql(
        dir,
        "CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk full'); END",
    );
    let full = store.write(running_by(&text)).await;
    assert!(full.is_err());
    sql(dir, "DROP TRIGGER full");
    store.write(running_by(&text)).await.expect("opened");
    assert_eq!(count(dir, "definitions"), 1);
    let again: Arc<str> = Arc::from(&*text);
    for text in [&text, &again, &Arc::from("{}")] {
        store.write(running_by(text)).await.expect("opened");
    }
    assert_eq!(count(dir, "definitions"), 2);
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    let texts: Vec<_> = unfinished
        .iter()
        .map(|found| &*found.resume_state.as_ref().expect("known").definition)
        .collect();
    assert_eq!(texts, [&*text, &*text, &*text, "{}"]);

    sql(dir, "DELETE FROM definitions WHERE body = '{}'");
    let unfinished = store.unfinished_runs().await.expect("unfinished");
    assert!(unfinished[3].resume_state.is_none());
}

/// A file from before webhooks keeps its runs, and can hold deliveries from then on.
#[tokio::test]
async fn a_file_from_before_webhooks_is_brought_up() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    opened
        .store
        .write(opening(&root, "a"))
        .await
        .expect("opened");
    let before = stored(&*opened.store, &root).await;
    opened.store.close().await;
    sql(
        dir,
        "ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; ALTER TABLE runs DROP COLUMN workdir_device; ALTER TABLE runs DROP COLUMN workdir_inode; ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN waiting_since; DROP INDEX runs_session; ALTER TABLE runs DROP COLUMN session; DROP TABLE deliveries; ALTER TABLE runs DROP COLUMN webhook; ALTER TABLE runs DROP COLUMN structured; \
         DROP INDEX definitions_used; ALTER TABLE definitions DROP COLUMN used_until; \
         ALTER TABLE definitions DROP COLUMN only_run; PRAGMA user_version = 1",
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    assert_eq!(stored(&*store, &root).await, before);
    let found = store.unfinished_runs().await.expect("unfinished");
    let kept = found[0].resume_state.as_ref().expect("known");
    assert_eq!(kept.webhooks, []);
    assert_eq!(count(dir, "deliveries"), 0);
}

/// A run from when it had one webhook keeps it.
#[tokio::test]
async fn a_file_from_before_several_webhooks_is_brought_up() {
    let opened = sqlite();
    let (dir, root) = (opened.place.path(), root());
    let mut write = opening(&root, "a");
    let Change::Create(opens) = &mut write.change else {
        panic!("no opening");
    };
    opens.resume_state.webhooks = vec![webhook()];
    opened.store.write(write).await.expect("opened");
    opened.store.close().await;
    sql(
        dir,
        "UPDATE runs SET webhook = json_extract(webhook, '$[0]'); \
         ALTER TABLE runs DROP COLUMN waiting_for; DROP TABLE attachments; DROP TABLE attachment_uses; DROP TABLE clock; DROP TABLE deletions; \
         ALTER TABLE runs DROP COLUMN waited; ALTER TABLE runs DROP COLUMN workdir_device; \
          ALTER TABLE runs DROP COLUMN workdir_inode; DROP INDEX deliveries_due; \
          ALTER TABLE deliveries DROP COLUMN owner; CREATE INDEX deliveries_due ON deliveries (host); \
          PRAGMA user_version = 6",
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    let found = store.unfinished_runs().await.expect("unfinished");
    let kept = found[0].resume_state.as_ref().expect("known");
    assert_eq!(kept.webhooks, [webhook()]);
}

/// Expired keys go as new ones come, and a deleted run takes its keys along.
#[tokio::test]
async fn expired_keys_are_removed() {
    let opened = sqlite();
    let (store, dir) = (&*opened.store, opened.place.path());
    let kept = root();
    let open = claiming(&kept, claim("kept", 0, in_an_hour()));
    store.write(open).await.expect("opened");
    sql(
        dir,
        "WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 20) \
         INSERT INTO claims (credential, route, key, run, body, expires) \
         SELECT '', '', n, zeroblob(16), zeroblob(32), 1000 FROM n",
    );
    for (n, left) in (0..7).zip([18, 15, 12, 9, 6, 7, 8]) {
        let new = claim(&n.to_string(), 0, in_an_hour());
        store.write(claiming(&root(), new)).await.expect("opened");
        assert_eq!(count(dir, "claims"), left, "after {n}");
    }
    assert!(store.delete(kept.run).await.expect("deleted"));
    assert_eq!(count(dir, "claims"), 7);
}

pub fn count(dir: &Path, table: &str) -> u32 {
    let file = rusqlite::Connection::open(dir.join("axed.db")).expect("opened");
    let sql = format!("SELECT count(*) FROM {table}");
    file.query_row(&sql, [], |row| row.get(0)).expect("a count")
}

/// Another hand on the file.
fn sql(dir: &Path, text: &str) {
    let file = rusqlite::Connection::open(dir.join("axed.db")).expect("opened");
    file.execute_batch(text).expect("done");
}

/// A deletion that a kill broke off is seen as done, and is finished by the next start.
#[tokio::test]
async fn a_deletion_is_finished_after_a_kill() {
    let opened = sqlite();
    let (dir, root, other) = (opened.place.path(), root(), root());
    let text = "x".repeat(5000);
    for (scope, key) in [(&root, "k"), (&other, "l")] {
        let mut run = record(scope, "a");
        run.session = Some("talk".to_owned());
        run.input = text.as_str().into();
        let opening = NewRun {
            claim: Some(claim(key, 0, in_an_hour())),
            ..fresh(run)
        };
        let open = write(scope, Change::Create(Box::new(opening)), 1);
        opened.store.write(open).await.expect("opened");
        for _ in 0..20 {
            let child = child(scope);
            let open = opening_of(&child, &text);
            opened.store.write(open).await.expect("opened");
            opened
                .store
                .write(completing(&child, "x"))
                .await
                .expect("closed");
        }
        opened
            .store
            .write(completing(scope, "x"))
            .await
            .expect("closed");
    }
    let children = opened.store.children(root.run).await.expect("children");
    opened.store.close().await;
    // As a part of the tree's removal leaves it.
    let hex = root.run.0.simple();
    sql(
        dir,
        &format!(
            "INSERT INTO deletions VALUES (x'{hex}'); DELETE FROM entries WHERE root = x'{hex}' AND last_seq > 30; \
             DELETE FROM runs WHERE id = x'{}'",
            children[19].id.0.simple()
        ),
    );

    let (store, _) = sqlite_in(dir).expect("a store");
    // The writer may be at it or not: nobody can tell.
    let seen = listed(
        &*store,
        RunFilter {
            include_children: true,
            ..page()
        },
    )
    .await;
    assert!(!seen.contains(&root.run) && seen.len() == 21, "{seen:?}");
    for id in [root.run, children[0].id] {
        assert_eq!(store.run(id).await.expect("a read"), None);
        assert!(store.tree(id).await.expect("a tree").is_empty());
        assert!(store.steps(id).await.expect("steps").is_empty());
    }
    assert!(
        store
            .events(whole_log(&root))
            .await
            .expect("events")
            .is_empty()
    );
    assert!(!store.delete(root.run).await.expect("gone"));
    let session = SessionQuery {
        name: "talk".to_owned(),
        limit: 1,
        before: Some(root.run),
        ..SessionQuery::default()
    };
    assert!(
        store
            .session_runs(session)
            .await
            .expect("a page")
            .is_empty()
    );
    let again = store.claimed_run(claim("k", 0, in_an_hour()).key).await;
    assert_eq!(again.expect("a read"), None);
    while store.vacuum().await.expect("tidied") {}
    assert_eq!((count(dir, "runs"), count(dir, "deletions")), (21, 0));
    assert_eq!(count(dir, "entries"), 21 + 21);
    assert_eq!(count(dir, "claims"), 1);
}

fn opening_of(scope: &Scope, input: &str) -> Write {
    let mut run = record(scope, "b");
    run.input = input.into();
    write(scope, Change::Create(Box::new(fresh(run))), 1)
}
