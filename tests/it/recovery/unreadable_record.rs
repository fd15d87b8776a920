//! A disk that fails reads: SQLite calls the database damaged, and the runs go on if it can be read before long.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use axed::domain::run::{Run, Status};
use axed::engine::request::RunRequest;
use axed::store::runs::RunRecords;
use tempfile::TempDir;

use crate::recovery::model::{Life, ROOT};
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

/// The second run of a session, whose conversation can be read after this many failed reads; and how many of them are left.
async fn continued_after(failed_reads: usize) -> (Run, usize) {
    let dir = TempDir::new().expect("a directory");
    fs::create_dir(dir.path().join("agents")).expect("a directory");
    let toml = format!("name = \"{ROOT}\"\nmodel = \"fake/{ROOT}\"\nsystem_prompt = \"Go.\"\n");
    fs::write(dir.path().join(format!("agents/{ROOT}.toml")), toml).expect("an agent");
    let provider = FakeProvider::start().await;
    provider.always(ROOT, |_| says("done"));
    let life = Life::open(dir.path(), usize::MAX, provider);
    let first = start(&life).await;
    let ended = within_timeout("the end", life.runner.wait(first.id, Duration::MAX)).await;
    assert!(ended.expect("a record").is_some());

    life.store.fail_reads_of_steps(failed_reads);
    let next = start(&life).await;
    life.ended(next.id).await;
    let unreadable = life.store.unreadable();
    let run = life.store.run(next.id).await.expect("a record");
    life.end().await;
    (run.expect("the run"), unreadable)
}

async fn start(life: &Life) -> Arc<Run> {
    let request = RunRequest {
        agent: ROOT.to_owned(),
        input: Some("go".into()),
        session: Some("talk".to_owned()),
        ..RunRequest::default()
    };
    life.runner.start(request).await.expect("accepted")
}

#[tokio::test]
async fn a_run_whose_record_can_be_read_again_completes() {
    for failed_reads in [1, 2] {
        let (run, unreadable) = continued_after(failed_reads).await;
        assert_eq!((run.status, unreadable), (Status::Completed, 0));
    }
}

#[tokio::test]
async fn a_run_whose_record_stays_unreadable_fails() {
    let (run, unreadable) = continued_after(100).await;
    assert_eq!(run.status, Status::Failed);
    let message = run.error.expect("an error").message;
    assert!(message.contains("the database is damaged"), "{message}");
    assert!(unreadable <= 96, "it was tried {} times", 100 - unreadable);
}
