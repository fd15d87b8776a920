//! A disk that fails reads: SQLite calls the database damaged, and the runs go on if it can be read before long.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use axed::domain::run::{Run, RunId, Status};
use axed::engine::request::{RunRequest, StartError};
use axed::store::StoreError;
use axed::store::runs::RunRecords;
use tempfile::TempDir;

use crate::recovery::model::{Life, ROOT};
use crate::support::gate::Gate;
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

/// A daemon's engine whose provider replies once the gate is open.
async fn begin(gate: &Gate) -> (TempDir, Life) {
    let dir = TempDir::new().expect("a directory");
    fs::create_dir(dir.path().join("agents")).expect("a directory");
    let toml = format!("name = \"{ROOT}\"\nmodel = \"fake/{ROOT}\"\nsystem_prompt = \"Go.\"\n");
    fs::write(dir.path().join(format!("agents/{ROOT}.toml")), toml).expect("an agent");
    let provider = FakeProvider::start().await;
    let opened = gate.clone();
    provider.always(ROOT, move |_| says("done").after_gate(&opened));
    let life = Life::open(dir.path(), usize::MAX, provider);
    (dir, life)
}

/// The second run of a session, whose conversation can be read after this many failed reads; and how many of them are left.
/// Other runs are accepted meanwhile. It is cancelled if only `cancelled_at` are left.
async fn continued_after(failed_reads: usize, cancelled_at: Option<usize>) -> (Run, usize) {
    let gate = Gate::closed();
    let (_dir, life) = begin(&gate).await;
    start(&life).await.expect("accepted");
    // It is queued behind the first one.
    let next = start(&life).await.expect("accepted");
    life.store.fail_reads_of_steps(failed_reads);
    gate.open();
    within_timeout("the end", async {
        tokio::select! {
            ended = life.runner.wait(next.id, Duration::MAX) => drop(ended.expect("a record")),
            () = run_others(&life, next.id, cancelled_at) => {}
        }
    })
    .await;
    life.ended(next.id).await;
    let unreadable = life.store.unreadable();
    let run = life.store.run(next.id).await.expect("a record");
    life.end().await;
    (run.expect("the run"), unreadable)
}

/// Runs of no session, one after the other, for ever; cancels a run if only that many failures of reads are left.
async fn run_others(life: &Life, run: RunId, cancelled_at: Option<usize>) {
    loop {
        if cancelled_at.is_some_and(|left| life.store.unreadable() <= left) {
            let _ = life.runner.cancel(run, None).await;
        }
        let other = life.start().await;
        let ended = life.runner.wait(other.id, Duration::MAX).await;
        ended.expect("a record");
    }
}

async fn start(life: &Life) -> Result<Arc<Run>, StartError> {
    let request = RunRequest {
        agent: ROOT.to_owned(),
        input: Some("go".into()),
        session: Some("talk".to_owned()),
        ..RunRequest::default()
    };
    life.runner.start(request).await
}

#[tokio::test]
async fn a_run_whose_record_can_be_read_again_completes() {
    for failed_reads in [1, 2] {
        let (run, unreadable) = continued_after(failed_reads, None).await;
        assert_eq!((run.status, unreadable), (Status::Completed, 0));
    }
}

#[tokio::test]
async fn a_run_that_is_not_accepted_is_refused_with_the_reason() {
    let gate = Gate::closed();
    let (_dir, life) = begin(&gate).await;
    gate.open();
    let first = start(&life).await.expect("accepted");
    let ended = within_timeout("the end", life.runner.wait(first.id, Duration::MAX)).await;
    assert!(ended.expect("a record").is_some());

    life.store.fail_reads_of_steps(1);
    let refused = start(&life).await;
    assert!(
        matches!(refused, Err(StartError::Store(StoreError::Malformed(_)))),
        "{:?}",
        refused.err()
    );
    // Of no session.
    life.start().await;
    let next = start(&life).await.expect("accepted");
    life.ended(next.id).await;
    life.end().await;
}

#[tokio::test]
async fn a_run_whose_record_stays_unreadable_waits_until_it_is_cancelled() {
    let (run, unreadable) = continued_after(100, Some(96)).await;
    assert_eq!(run.status, Status::Cancelled);
    assert!(unreadable <= 96, "it was tried {} times", 100 - unreadable);
}
