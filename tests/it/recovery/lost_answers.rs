//! A change that a client requests is committed, and the store's answer is lost: the client gets an error and repeats its
//! request. The run then does what the record says. The same may happen to the start of a tool.

use std::fs;

use axed::domain::run::{RunId, Status};
use axed::engine::control::add_message::{AddMessageError, MessageRequest};
use axed::engine::fork::request::{DefinitionChoice, ForkEdit, ForkPoint, ForkRequest};
use axed::engine::request::RunRequest;
use axed::store::runs::RunRecords;
use axed::store::{IdempotencyClaim, IdempotencyKey, StoreError};
use jiff::Timestamp;
use serde_json::json;
use tempfile::TempDir;

use crate::recovery::model::{Life, ROOT};
use crate::recovery::model_outcome;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, says};

/// A run whose first reply waits for the gate.
struct Story {
    life: Life,
    run: RunId,
    gate: Gate,
    dir: TempDir,
}

impl Story {
    async fn begin() -> Self {
        Self::begin_with("", says("one")).await
    }

    /// The settings are those of the agent.
    async fn begin_with(settings: &str, first: ScriptedAnswer) -> Self {
        let dir = TempDir::new().expect("a directory");
        fs::create_dir(dir.path().join("agents")).expect("a directory");
        fs::create_dir(dir.path().join("work")).expect("a directory");
        let toml = format!(
            "name = \"{ROOT}\"\nmodel = \"fake/{ROOT}\"\nsystem_prompt = \"Go.\"\n{settings}"
        );
        fs::write(dir.path().join(format!("agents/{ROOT}.toml")), toml).expect("an agent");
        let child = "name = \"child\"\nmodel = \"fake/child\"\nsystem_prompt = \"Go.\"\n";
        fs::write(dir.path().join("agents/child.toml"), child).expect("an agent");
        let (provider, gate) = (FakeProvider::start().await, Gate::closed());
        provider.will(ROOT, [first.after_gate(&gate), says("two")]);
        let life = Life::open(dir.path(), usize::MAX, provider);
        let run = life.start().await.id;
        life.provider.wait_for_request(ROOT, 1).await;
        Self {
            life,
            run,
            gate,
            dir,
        }
    }

    /// A child whose parent has not reached it, with this next reply: the parent is a fork and waits for a permit, because others
    /// have all of them. Returns one of these too.
    async fn begin_unreached(reply: ScriptedAnswer) -> (Self, RunId) {
        let settings = "sub_agents = [\"child\"]\n";
        let story = Self::begin_with(settings, delegates([("child", "read")])).await;
        let provider = &story.life.provider;
        provider.will("child", [says("a page"), reply]);
        story.gate.open();
        story.has_status(Status::Completed).await;
        let source = story.child_of(story.run).await;

        provider.always(ROOT, |_| hangs());
        let permits = model_outcome::settings(story.dir.path()).runs.max_running;
        let mut others = Vec::new();
        for _ in 0..permits {
            others.push(story.life.start().await.id);
        }
        provider.wait_for_request(ROOT, 2 + permits).await;
        let request = ForkRequest {
            is_by_admin: true,
            source: story.run,
            at: ForkPoint {
                run: Some(source),
                turn: Some(1),
                after_reply: false,
            },
            edit: ForkEdit::default(),
            definition: DefinitionChoice::default(),
            labels: None,
            adds_memory: false,
            new_run: RunRequest::default(),
        };
        let fork = story.life.runner.fork(request).await.expect("a fork");
        let run = story.child_of(fork.id).await;
        (Self { run, ..story }, others[0])
    }

    async fn hold(&self, is_held: bool) -> Option<bool> {
        let changed = self.life.runner.set_held(self.run, is_held, None).await;
        changed.ok().map(|(_, is_changed)| is_changed)
    }

    async fn cancel(&self, run: RunId) -> Result<(), StoreError> {
        self.life.runner.cancel(run, None).await.map(drop)
    }

    async fn add(&self, text: &str) -> Result<u32, AddMessageError> {
        let key = IdempotencyKey {
            credential: String::new(),
            route: "messages".to_owned(),
            key: "k".to_owned(),
        };
        let claim = IdempotencyClaim {
            key,
            body_hash: [0; 32],
            expires_at: Timestamp::MAX,
        };
        let request = MessageRequest {
            content: text.into(),
            by: None,
            claim: Some(claim),
        };
        self.life.runner.add_message(self.run, request).await
    }

    /// Waits for the second look, which begins after the first has done what the record says.
    async fn has_looked_twice(&self) {
        let look = async || (self.life.store.looks() > 1).then_some(());
        eventually("two looks", look).await;
    }

    /// The only child of a run.
    async fn child_of(&self, run: RunId) -> RunId {
        let children = self.life.store.children(run).await.expect("children");
        children[0].id
    }

    /// Waits until the record has this status.
    async fn has_status(&self, status: Status) {
        let look = async || {
            let run = self.life.store.run(self.run).await.expect("a record");
            run.filter(|run| run.status == status)
        };
        eventually(status.as_str(), look).await;
    }

    async fn end(self) {
        self.life.ended(self.run).await;
        self.life.end().await;
    }
}

#[tokio::test]
async fn a_run_is_resumed() {
    let story = Story::begin().await;
    assert_eq!(story.hold(true).await, Some(true));
    assert_eq!(story.add("go on").await.expect("added"), 1);
    story.life.store.lose_next_answer();
    assert_eq!(story.hold(false).await, None);
    assert_eq!(story.hold(false).await, Some(false), "it is so already");
    story.gate.open();
    story.has_status(Status::Completed).await;
    story.end().await;
}

#[tokio::test]
async fn a_run_is_paused() {
    let story = Story::begin().await;
    story.life.store.lose_next_answer();
    assert_eq!(story.hold(true).await, None);
    assert_eq!(story.hold(true).await, Some(false), "it is so already");
    assert_eq!(story.add("go on").await.expect("added"), 1);
    story.gate.open();
    story.has_status(Status::Waiting).await;
    assert_eq!(story.life.provider.requests_for(ROOT).len(), 1);
    assert_eq!(story.hold(false).await, Some(true));
    story.has_status(Status::Completed).await;
    story.end().await;
}

#[tokio::test]
async fn a_run_is_resumed_without_another_request() {
    let story = Story::begin().await;
    assert_eq!(story.hold(true).await, Some(true));
    assert_eq!(story.add("go on").await.expect("added"), 1);
    story.life.store.lose_next_answer();
    assert_eq!(story.hold(false).await, None);
    story.gate.open();
    story.has_status(Status::Completed).await;
    story.end().await;
}

#[tokio::test]
async fn a_run_is_paused_without_another_request() {
    let story = Story::begin().await;
    story.life.store.lose_next_answer();
    assert_eq!(story.hold(true).await, None);
    story.has_looked_twice().await;
    assert_eq!(story.add("go on").await.expect("added"), 1);
    story.gate.open();
    story.has_status(Status::Waiting).await;
    assert_eq!(story.life.provider.requests_for(ROOT).len(), 1);
    assert_eq!(story.hold(false).await, Some(true));
    story.has_status(Status::Completed).await;
    story.end().await;
}

#[tokio::test]
async fn a_child_is_paused_that_its_parent_has_not_reached() {
    let (story, other) = Story::begin_unreached(says("a chapter")).await;
    story.life.store.lose_next_answer();
    assert_eq!(story.hold(true).await, None);
    story.has_looked_twice().await;
    story.cancel(other).await.expect("a free permit");
    story.has_status(Status::Waiting).await;
    assert_eq!(story.life.provider.requests_for("child").len(), 1);
    assert_eq!(story.hold(false).await, Some(true));
    story.has_status(Status::Completed).await;
    story.life.end().await;
}

#[tokio::test]
async fn a_child_is_cancelled_that_its_parent_has_not_reached() {
    let (story, other) = Story::begin_unreached(hangs()).await;
    story.life.store.lose_next_answer();
    story
        .cancel(story.run)
        .await
        .expect_err("the answer is lost");
    story.cancel(other).await.expect("a free permit");
    story.has_status(Status::Cancelled).await;
    story.life.end().await;
}

#[tokio::test]
async fn a_memory_has_one_entry_of_a_run() {
    let story = Story::begin_with("[memory]\nenabled = true\n", says("one")).await;
    story.life.store.lose_next_answer();
    story.gate.open();
    story.has_status(Status::Completed).await;
    let run = story.life.store.run(story.run).await.expect("a record");
    assert!(run.expect("the run").warnings.is_empty());
    let entries = story.life.runner.memory(ROOT, None).await;
    assert_eq!(entries.expect("a memory").len(), 1);
    story.end().await;
}

#[tokio::test]
async fn a_message_is_part_of_the_next_request() {
    let story = Story::begin().await;
    story.life.store.lose_next_answer();
    story
        .add("stop that")
        .await
        .expect_err("the answer is lost");
    let again = story.add("stop that").await;
    let Err(AddMessageError::Store(StoreError::AlreadyClaimed(claimed))) = again else {
        panic!("{again:?}");
    };
    assert_eq!(claimed.number, Some(1));
    story.gate.open();
    story.has_status(Status::Completed).await;
    let requests = story.life.provider.requests_for(ROOT);
    assert_eq!(requests.len(), 2, "none for a run that was suspended");
    let second = requests[1].body["messages"].to_string();
    assert!(second.contains("stop that"), "{second}");
    story.end().await;
}

#[tokio::test]
async fn a_run_is_cancelled() {
    let story = Story::begin().await;
    story.life.store.lose_next_answer();
    let cancelled = story.life.runner.cancel(story.run, None).await;
    cancelled.expect_err("the answer is lost");
    story.has_status(Status::Cancelled).await;
    story.end().await;
}

#[tokio::test]
async fn a_tool_whose_start_is_recorded_is_executed() {
    let settings = "workdir = \"work\"\ntools = [\"write_file\"]\n";
    let write = json!({"path": "a.txt", "content": "written"});
    let story = Story::begin_with(settings, calls([("write_file", write)])).await;
    story.life.store.lose_next_answer();
    story.gate.open();
    story.has_status(Status::Completed).await;
    let text = fs::read_to_string(story.dir.path().join("work/a.txt"));
    assert_eq!(text.expect("the file"), "written");
    assert_eq!(story.life.provider.requests_for(ROOT).len(), 2);
    story.end().await;
}
