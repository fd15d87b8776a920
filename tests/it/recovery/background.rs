//! Children in the background over the death of a process after any of its writes: each end reaches its parent once.

use std::fs;
use std::path::Path;
use std::time::Duration;

use axed::domain::event::EventName;
use axed::domain::run::Status;
use axed::record::entry::{self, Entry};
use axed::store::events::{self, EventLog, EventQuery};
use axed::store::runs::RunRecords;
use serde_json::json;

use crate::recovery::model::{Life, ROOT};
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::{ScriptedAnswer, calls, hangs, says};
use crate::support::within_timeout;

/// What the parent does once it has started two children.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Story {
    /// Waits for the first, and ends.
    Awaits,
    /// Calls another agent, and ends.
    WorksOn,
    /// Ends, which cancels them.
    Cancels,
}

fn in_background(agents: &[&str]) -> ScriptedAnswer {
    calls(agents.iter().map(|agent| {
        let arguments = json!({"agent": agent, "task": "be it", "background": true});
        ("call_agent", arguments)
    }))
}

async fn begin(story: Story, place: &Path, lets_through: usize) -> Life {
    let provider = FakeProvider::start().await;
    provider.always(ROOT, move |seen| match (seen.turn(), story) {
        (1, _) => in_background(&["a", "b"]),
        (2, Story::Awaits) => calls([("await_agents", json!({"any": true}))]),
        (2, Story::WorksOn) => calls([("call_agent", json!({"agent": "c", "task": "be it"}))]),
        (turn, _) => says(format!("turn {turn}")),
    });
    for child in ["a", "b", "c"] {
        provider.always(child, move |_| match story {
            Story::Cancels => hangs(),
            _ => says(format!("text of {child}")),
        });
    }
    Life::open(place, lets_through, provider)
}

fn furnish(story: Story, place: &Path) {
    fs::create_dir_all(place.join("agents")).expect("a directory");
    let on_end = match story {
        Story::Cancels => "on_end = \"cancel\"\n",
        _ => "",
    };
    let root = format!(
        "sub_agents = [\"a\", \"b\", \"c\"]\n[sub_agents_config]\nbackground = true\n{on_end}"
    );
    for (name, more) in [(ROOT, root.as_str()), ("a", ""), ("b", ""), ("c", "")] {
        let text = format!("name = \"{name}\"\nmodel = \"fake/{name}\"\n{more}");
        fs::write(place.join(format!("agents/{name}.toml")), text).expect("a file");
    }
}

/// The run has ended, and its record has each end once.
async fn is_whole(life: &Life, story: Story, after: usize) {
    let root = life.root().await.expect("the root");
    let what = format!("{story:?} after {after} writes");
    assert_eq!(root.status, Status::Completed, "{what}: {root:?}");
    let entries = life.store.entries(root.id).await.expect("entries");
    let (mut unread, mut texts) = (0_i64, String::new());
    for step in entry::steps(entries) {
        match step {
            Entry::CallCompleted { result, .. } => texts.push_str(&result.content),
            Entry::MessageAdded { content, .. } => {
                unread += 1;
                texts.push_str(&content.to_plain_text());
            }
            Entry::MessagesRead { .. } => unread = 0,
            _ => {}
        }
    }
    let tree = life.store.tree(root.id).await.expect("a tree");
    let query = EventQuery {
        root: root.id,
        run: root.id,
        exclude_descendants: true,
        after: 0,
        limit: 100_000,
    };
    let events = life.store.events(query).await.expect("events");
    let count = |name: EventName| {
        let events = events.iter().map(events::recorded);
        let names = events.map(|it| it.expect("an event").kind.name());
        names.filter(|it| *it == name).count()
    };
    for child in ["a", "b"] {
        let runs: Vec<_> = tree.iter().filter(|run| run.agent == child).collect();
        assert_eq!(runs.len(), 1, "{what}: {child} {runs:?}");
        let times = texts.matches(&format!("text of {child}")).count();
        match story {
            Story::Cancels => {
                assert_eq!((runs[0].status, times), (Status::Cancelled, 0), "{what}");
            }
            _ => {
                assert_eq!(runs[0].status, Status::Completed, "{what}");
                assert_eq!(times, 1, "{what}: {child} in {texts}");
            }
        }
    }
    assert_eq!(unread, 0, "{what}");
    let called = count(EventName::AgentCalled);
    let returned = count(EventName::AgentReturned);
    match story {
        Story::Awaits => assert_eq!((called, returned), (2, 2), "{what}"),
        Story::WorksOn => assert_eq!((called, returned), (3, 3), "{what}"),
        Story::Cancels => assert_eq!((called, returned), (2, 0), "{what}"),
    }
}

async fn survives_every_write(story: Story) {
    let place = tempfile::tempdir().expect("a directory");
    furnish(story, place.path());
    let life = begin(story, place.path(), usize::MAX).await;
    let run = life.start().await;
    life.ended(run.id).await;
    is_whole(&life, story, usize::MAX).await;
    let writes = life.store.writes();
    life.end().await;

    for after in 1..=writes {
        let place = tempfile::tempdir().expect("a directory");
        furnish(story, place.path());
        let life = begin(story, place.path(), after).await;
        let living = async {
            let run = life.start().await;
            let _ = life.runner.wait(run.id, Duration::MAX).await;
        };
        // It may need fewer writes than before.
        within_timeout("the death", async {
            tokio::select! {
                () = living => {}
                () = life.store.wait_for_crash() => {}
            }
        })
        .await;
        life.end().await;
        let next = begin(story, place.path(), usize::MAX).await;
        let root = next.root().await.expect("the run");
        next.runner.recover().await.expect("a recovery");
        next.ended(root.id).await;
        is_whole(&next, story, after).await;
        next.end().await;
    }
}

#[tokio::test]
async fn an_end_that_is_awaited_is_delivered_once() {
    survives_every_write(Story::Awaits).await;
}

#[tokio::test]
async fn an_end_that_is_a_message_is_delivered_once() {
    survives_every_write(Story::WorksOn).await;
}

#[tokio::test]
async fn children_that_the_end_cancels_stay_cancelled() {
    survives_every_write(Story::Cancels).await;
}
