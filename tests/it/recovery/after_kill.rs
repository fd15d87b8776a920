//! A daemon that is killed, and the next one that resumes its runs: nothing requested twice, nothing lost.

use crate::runs::context_window::{LINES, READER, is_summary, library, requested};
use crate::support::app::TestApp;
use crate::support::events::{Event, assert_complete, count, kinds};
use crate::support::postgres;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, hangs, raw, says};
use crate::support::run::Run;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const PLANNER: &str = "sub_agents = [\"reader\"]";

/// Waits until that many turns of the run's tree have begun in the record.
pub async fn begun(app: &TestApp, id: &str, turns: usize) -> Vec<Event> {
    let mut events = app.events(&app.find(id).await).await;
    events
        .until_matches(|events| count(events, "turn.started") == turns)
        .await
}

/// Starts a run and waits until that many turns of its tree have begun. The last request may not have arrived yet.
pub async fn started(app: &TestApp, agent: &str, turns: usize) -> String {
    let id = app.start(agent, "go").await.id().to_owned();
    begun(app, &id, turns).await;
    id
}

/// A tree's usage is what its provider has charged for.
pub fn is_as_charged(app: &TestApp, run: &Run<'_>) {
    let (input, output, _) = run.tree_usage();
    let ledger = app.provider.ledger();
    assert_eq!((input, output), (ledger.input, ledger.output), "{run:?}");
}

/// Every run of the tree was started by a call of its own.
async fn each_call_has_one_child(run: &Run<'_>) {
    let family = run.tree_runs().await;
    let calls: BTreeSet<_> = family
        .iter()
        .map(|run| {
            (
                run["parent_id"].to_string(),
                run["tool_call_id"].to_string(),
            )
        })
        .collect();
    assert_eq!(calls.len(), family.len(), "{family:#?}");
    assert_eq!(run["tree"]["runs"], family.len());
}

#[tokio::test]
async fn a_run_killed_before_its_first_reply_sends_the_same_request_again() {
    for stream in [false, true] {
        let mut app = TestApp::setup()
            .agent("solo", "system_prompt = \"Work.\"")
            .spawn()
            .await;
        app.provider.will("solo", [hangs(), says("done")]);
        let body = json!({"input": "go", "context": "soon", "stream": stream});
        let id = app.start_with("solo", body).await.id().to_owned();
        app.provider.wait_for_request("solo", 1).await;
        let before = begun(&app, &id, 1).await;

        app.crash_and_restart().await;

        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        assert_eq!(run["attempt"], 2);
        assert_eq!(run["turns"], 1);
        let events = run.events().await;
        assert_complete(&events);
        assert_eq!(events[..before.len()], before, "what was reported stays");
        assert_eq!(count(&events, "run.queued"), 1);
        assert_eq!(count(&events, "run.started"), 1);
        assert_eq!(count(&events, "run.resumed"), 1);
        let resumed = events.iter().find(|event| event.kind() == "run.resumed");
        assert_eq!(
            resumed.map(|event| event["attempt"].clone()),
            Some(2.into())
        );
        let sent = app.provider.requests();
        assert_eq!(sent.len(), 2);
        assert_eq!(sent[0].body, sent[1].body);
        assert_eq!(sent[1].wants_stream(), stream);
        is_as_charged(&app, &run);
        app.daemon.wait_for_log(&id).await;
    }
}

#[tokio::test]
async fn a_run_that_is_killed_repeatedly_resumes_each_time() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [hangs(), hangs(), hangs(), says("done")]);
    let id = started(&app, "solo", 1).await;
    app.provider.wait_for_request("solo", 1).await;
    for attempt in 2..=4 {
        app.crash_and_restart().await;
        if attempt < 4 {
            app.provider.wait_for_request("solo", attempt).await;
            let run = app.find(&id).await;
            let mut events = app.events(&run).await;
            events
                .until_matches(|events| count(events, "run.resumed") == attempt - 1)
                .await;
        }
    }

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["attempt"], 4);
    assert_complete(&run.events().await);
    assert_eq!(app.provider.requests().len(), 4);
}

/// The id and the call of the only child with this status.
fn only_child(children: &[Run<'_>], status: &str) -> (String, Value) {
    let mut found = children.iter().filter(|child| child.status() == status);
    let child = found.next().expect("a child");
    assert!(found.next().is_none(), "one child is {status}");
    (child.id().to_owned(), child["tool_call_id"].clone())
}

/// Checks that the known children still have their calls, and returns the one that was not known.
fn the_new_child<'c, 'app>(children: &'c [Run<'app>], known: &[(String, Value)]) -> &'c Run<'app> {
    for (id, call) in known {
        let child = children.iter().find(|child| child.id() == id.as_str());
        assert_eq!(child.expect("the same child")["tool_call_id"], *call);
    }
    let is_new = |child: &&Run<'_>| known.iter().all(|(id, _)| id != child.id());
    children.iter().find(is_new).expect("a third child")
}

#[tokio::test]
async fn finished_active_and_pending_children_each_count_once() {
    let mut app = TestApp::setup()
        .agent(
            "planner",
            &format!("{PLANNER}\n[sub_agents_config]\nmax_concurrent = 1"),
        )
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2"), ("reader", "3")];
    app.provider
        .will("planner", [delegates(tasks), says("done")]);
    let sent = AtomicUsize::new(0);
    app.provider.always("reader", move |seen| {
        match sent.fetch_add(1, Ordering::SeqCst) {
            1 => hangs(),
            _ => says(format!("read {}", seen.user_messages()[0])),
        }
    });
    let run = app.start("planner", "go").await;
    let id = run.id().to_owned();
    // The first child's result is on the record, and the second child has begun.
    app.events(&run)
        .await
        .until_matches(|events| {
            count(events, "tool.completed") == 1 && count(events, "turn.started") == 3
        })
        .await;
    app.provider.wait_for_request("reader", 2).await;
    let before = run.children().await;
    let finished = only_child(&before, "completed");
    let under_way = only_child(&before, "running");
    drop(before);

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["attempt"], 2);
    assert_eq!(
        app.provider
            .wait_for_request("planner", 2)
            .await
            .tool_results(),
        ["read Task: 1", "read Task: 2", "read Task: 3"]
    );
    assert_eq!(app.provider.requests_for("planner").len(), 2);
    assert_eq!(app.provider.requests_for("reader").len(), 4);
    let children = run.children().await;
    assert_eq!(children.len(), 3);
    for child in &children {
        let key = (child.id().to_owned(), child["tool_call_id"].clone());
        let attempt = if key == under_way { 2 } else { 1 };
        assert_eq!(child["attempt"], attempt, "{child:?}");
        assert_eq!(child.status(), "completed");
    }
    let known = [finished, under_way.clone()];
    let last = the_new_child(&children, &known);
    each_call_has_one_child(&run).await;
    is_as_charged(&app, &run);
    assert_eq!(app.provider.ledger().replies, 5);
    assert_eq!(run.tree_usage().2, 3);
    let events = run.events().await;
    assert_complete(&events);
    let at = |child: &str, kind: &str| {
        let found = events
            .iter()
            .find(|event| event["run_id"] == child && event.kind() == kind);
        found.expect("an event").seq()
    };
    let (second, third) = (&under_way.0, last.id());
    assert!(
        at(third, "run.queued") > at(second, "run.completed"),
        "max_concurrent holds over the restart"
    );
    assert_eq!(count(&events, "tool.completed"), 3);
    assert_eq!(count(&events, "run.queued"), 4);
    assert_eq!(kinds(&events).last(), Some(&"run.completed"));
}

#[tokio::test]
async fn a_tree_of_three_levels_resumes_at_its_leaf() {
    let mut app = TestApp::setup()
        .agent("a", "sub_agents = [\"b\"]")
        .agent("b", "sub_agents = [\"c\"]")
        .agent("c", "sub_agents = [\"d\"]")
        .agent("d", "")
        .spawn()
        .await;
    app.provider
        .will("a", [delegates([("b", "x")]), says("a done")]);
    app.provider
        .will("b", [delegates([("c", "y")]), says("b done")]);
    app.provider
        .will("c", [delegates([("d", "z")]), says("c done")]);
    app.provider.will("d", [hangs(), says("d done")]);
    let id = started(&app, "a", 4).await;
    app.provider.wait_for_request("d", 1).await;
    let ids = |family: Vec<Value>| -> BTreeSet<String> {
        family.iter().map(|run| run["id"].to_string()).collect()
    };
    let before = ids(app.find(&id).await.tree_runs().await);
    assert_eq!(before.len(), 4);

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "a done");
    let family = run.tree_runs().await;
    for run in &family {
        assert_eq!(run["attempt"], 2, "{run}");
        assert_eq!(run["status"], "completed", "{run}");
    }
    assert_eq!(ids(family), before);
    for model in ["a", "b", "c", "d"] {
        assert_eq!(app.provider.requests_for(model).len(), 2, "{model}");
    }
    assert_eq!(
        app.provider.wait_for_request("b", 2).await.tool_results(),
        ["c done"]
    );
    is_as_charged(&app, &run);
    assert_eq!(run.tree_usage().2, 3);
    assert_complete(&run.events().await);
}

#[tokio::test]
async fn what_a_failed_attempt_used_survives_a_kill() {
    let mut app = TestApp::setup()
        .config("[budgets.all]\ntokens = 5000\nper = \"month\"")
        .agent("solo", "[retry]\ninitial_delay_ms = 1")
        .spawn()
        .await;
    let usage = json!({"input_tokens": 700, "output_tokens": 300});
    let empty = json!({"type": "message", "content": [], "usage": usage}).to_string();
    app.provider.will(
        "solo",
        [
            raw(200, "application/json", empty),
            hangs(),
            says("done").with_usage(50, 7),
        ],
    );
    let id = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 2).await;
    assert_eq!(app.find(&id).await.usage(), (700, 300, 0));

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let (input, output, _) = run.usage();
    assert_eq!((input, output), (750, 307));
    let usage = app.get("/usage?by=model").await.json();
    assert_eq!(usage["budgets"][0]["used_tokens"], 1057);
    assert_eq!(usage["data"].as_array().map(Vec::len), Some(1), "{usage}");
}

#[tokio::test]
async fn recorded_results_are_sent_again_unchanged() {
    let mut app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = [("reader", "1"), ("reader", "2")];
    app.provider.will(
        "planner",
        [
            delegates(tasks).with_text("let me see"),
            hangs(),
            says("done").with_usage(50, 7),
        ],
    );
    app.provider.always("reader", |seen| {
        says(format!("read {}", seen.user_messages()[0]))
    });
    let id = started(&app, "planner", 4).await;
    app.provider.wait_for_request("planner", 2).await;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["turns"], 2);
    let sent = app.provider.requests_for("planner");
    assert_eq!(sent.len(), 3);
    assert_eq!(sent[1].body, sent[2].body);
    assert_eq!(app.provider.requests_for("reader").len(), 2);
    each_call_has_one_child(&run).await;
    is_as_charged(&app, &run);
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.resumed"), 1, "its children had ended");
}

#[tokio::test]
async fn a_run_that_was_being_cancelled_ends_as_cancelled() {
    let mut app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    let tasks = ["1", "2", "3", "4", "5", "6", "7", "8"].map(|task| ("reader", task));
    app.provider.will(
        "planner",
        [delegates(tasks).with_text("so far"), says("never")],
    );
    app.provider.always("reader", |_| hangs());
    let id = started(&app, "planner", 9).await;
    app.provider.wait_for_request("reader", 8).await;
    let path = format!("/runs/{id}/cancel");
    let got = app.post(&path, &json!({"reason": "changed my mind"})).await;
    assert!([200, 202].contains(&got.status), "{}", got.text);

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.status(), "cancelled");
    assert_eq!(run["cancel_reason"], "changed my mind");
    assert_eq!(run["partial_content"], "so far");
    for run in run.tree_runs().await {
        assert_eq!(run["status"], "cancelled", "{run}");
    }
    assert_eq!(
        app.provider.requests().len(),
        9,
        "nothing is requested again"
    );
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "run.cancelling"), 1);
    assert_eq!(count(&events, "run.cancelled"), 9);
}

#[tokio::test]
async fn a_child_that_was_cancelled_alone_is_an_error_to_its_parent() {
    let mut app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .spawn()
        .await;
    // The parent may be answered before the kill and ask again after it.
    app.provider
        .always("planner", |seen| match seen.tool_results().len() {
            0 => delegates([("reader", "x")]),
            _ => says("done"),
        });
    app.provider.always("reader", |_| hangs());
    let id = started(&app, "planner", 2).await;
    app.provider.wait_for_request("reader", 1).await;
    let children = app.find(&id).await.wait_for_children(1).await;
    let child = children[0].id().to_owned();
    drop(children);
    let path = format!("/runs/{child}/cancel");
    app.post(&path, &json!({"reason": "not needed"})).await;

    app.crash_and_restart().await;

    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    let child = app.find(&child).await;
    assert_eq!(child.status(), "cancelled");
    assert_eq!(child["cancel_reason"], "not needed");
    // Whenever it asks, it asks with the same result.
    for sent in &app.provider.requests_for("planner")[1..] {
        assert!(
            sent.tool_results()[0].contains("failed - cancelled: not needed"),
            "{:?}",
            sent.tool_results()
        );
    }
    assert_eq!(app.provider.requests_for("reader").len(), 1);
}

#[tokio::test]
async fn deadlines_count_time_without_a_daemon() {
    let mut app = TestApp::setup()
        .agent("planner", &format!("timeout = 60\n{PLANNER}"))
        .agent("reader", "timeout = 90")
        .spawn()
        .await;
    app.provider.will("planner", [delegates([("reader", "x")])]);
    app.provider.always("reader", |_| hangs());
    let id = started(&app, "planner", 2).await;
    app.provider.wait_for_request("reader", 1).await;

    app.daemon.kill().await;
    // As if a minute had passed.
    app.database()
        .execute("UPDATE runs SET deadline_at = deadline_at - 61000");
    app.restart_after_end().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.failure().0, "timeout", "{run:?}");
    let message = run.failure().1;
    assert!(message.starts_with("timeout after 60s"), "{message}");
    let child = &run.children().await[0];
    assert_eq!(child.failure().0, "timeout", "{child:?}");
    assert_eq!(
        app.provider.requests().len(),
        2,
        "nothing is requested again"
    );
    assert_complete(&run.events().await);
}

#[tokio::test]
async fn a_crash_after_the_end_changes_nothing() {
    let mut app = TestApp::setup()
        .agent("planner", PLANNER)
        .agent("reader", "")
        .agent("failing", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);
    let done = app.run("planner", "go").await.id().to_owned();
    let failed = app.run("failing", "go").await.id().to_owned();
    let sent = app.provider.requests().len();
    let look = async |app: &TestApp| {
        let mut texts = Vec::new();
        for id in [&done, &failed] {
            for path in ["", "/events", "/tree", "/messages"] {
                texts.push(app.get(&format!("/runs/{id}{path}")).await.text);
            }
        }
        texts
    };
    let before = look(&app).await;

    app.crash_and_restart().await;

    assert_eq!(look(&app).await, before);
    assert_eq!(app.provider.requests().len(), sent);
}

#[tokio::test]
async fn a_provider_missing_after_a_crash_fails_the_run() {
    let provider =
        "[providers.small]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\napi_key = \"k\"";
    let mut app = TestApp::setup()
        .config(&format!("{provider}\n[runs]\nunserved = 1"))
        .agent("solo", "model = \"small/solo\"")
        .spawn()
        .await;
    app.provider.always("solo", |_| hangs());
    let id = started(&app, "solo", 1).await;
    app.provider.wait_for_request("solo", 1).await;

    app.daemon.kill().await;
    let config = fs::read_to_string(app.path("config/axed.toml")).expect("a file");
    app.write(
        "config/axed.toml",
        &config.replace("[providers.small]", "[providers.large]"),
    );
    app.restart_after_end().await;

    let run = app.find(&id).await.wait_for_end().await;
    // On PostgreSQL another node may have the provider: the run waits for one, as long as `unserved` says.
    let code = match postgres::server() {
        Some(_) => "no_node",
        None => "config",
    };
    assert_eq!(run.failure().0, code, "{run:?}");
    assert!(run.failure().1.contains("small"), "{run:?}");
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn a_hundred_unfinished_runs_all_end() {
    let mut app = TestApp::setup()
        .config("[runs]\nmax_running = 40")
        .agent("planner", PLANNER)
        .agent("reader", "stream = true")
        .spawn()
        .await;
    app.provider
        .always("planner", |seen| match seen.tool_results().as_slice() {
            [] => delegates([("reader", "1"), ("reader", "2")]),
            results => says(results.join(", ")),
        });
    let hang_or = |hang: bool| {
        move |seen: &crate::support::provider::recorded_request::RecordedRequest| -> ScriptedAnswer {
            match hang {
                true => hangs(),
                false => says(format!("read {}", seen.user_messages()[0])),
            }
        }
    };
    app.provider.always("reader", hang_or(true));
    let mut ids = Vec::new();
    for _ in 0..100 {
        ids.push(app.start("planner", "go").await.id().to_owned());
    }
    app.provider.wait_for_request("reader", 80).await;

    app.daemon.kill().await;
    app.provider.always("reader", hang_or(false));
    app.restart_after_end().await;

    for id in &ids {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), "read Task: 1, read Task: 2");
        assert_eq!(run["tree"]["runs"], 3);
        each_call_has_one_child(&run).await;
        assert_complete(&run.events().await);
    }
    let page = app.get("/runs?limit=200").await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(100));
}

#[tokio::test]
async fn what_the_first_piece_of_a_summary_used_survives_a_kill() {
    let mut app = library(&[("reader", READER)]).spawn().await;
    let (turns, summaries) = (AtomicUsize::new(0), AtomicUsize::new(0));
    app.provider.always("reader", move |seen| {
        let pages = |from: usize| {
            let arguments = (from..from + 7).map(
                |page| json!({"path": "book.txt", "offset": page * LINES + 1, "limit": LINES}),
            );
            calls(arguments.map(|arguments| ("read_file", arguments)))
        };
        let answer = match is_summary(seen) {
            true if summaries.fetch_add(1, Ordering::SeqCst) == 1 => hangs(),
            true => says("a summary"),
            false => match turns.fetch_add(1, Ordering::SeqCst) {
                turn @ 0..2 => pages(7 * turn),
                _ => says("done"),
            },
        };
        answer.with_usage(1000, 20)
    });
    let id = app.start("reader", "go").await.id().to_owned();
    requested(&app, 2, is_summary).await;
    let used = app.find(&id).await.usage().0;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    let ledger = app.provider.ledger();
    assert_eq!(run.usage().0, ledger.input, "the first piece is paid for");
    assert_eq!(used, 3000, "two turns and the first piece");
}
