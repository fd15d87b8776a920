//! Conversations that outgrow their model's context window: summed up, thinned out or failed, in runs and in sessions, and
//! over the death of the daemon.

use crate::support::app::{Setup, TestApp};
use crate::support::events::{Event, assert_complete, count};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, fails, says};
use crate::support::provider::recorded_request::{RecordedRequest, Wire};
use crate::support::run::Run;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The window of the models here, in tokens.
pub const WINDOW: usize = 8000;

/// Lines of the book that one call reads.
pub const LINES: usize = 60;

pub const READER: &str = "tools = [\"read_file\"]";

/// A daemon with these agents, whose models have a small window, and a long book.
pub fn library(agents: &[(&str, &str)]) -> Setup {
    let page = |line: usize| format!("Line {line} of a long book about nothing at all.\n");
    let book: String = (1..=60 * LINES).map(page).collect();
    let mut setup = TestApp::setup().file("book.txt", &book);
    for (name, toml) in agents {
        setup = setup.agent(name, toml);
        for wire in Wire::ALL {
            let models = format!("[providers.{}.models.{name}]", wire.name());
            setup = setup.config(&format!("{models}\ncontext_window = {WINDOW}"));
        }
    }
    setup
}

/// Four bytes a token, of the whole request.
pub fn tokens(seen: &RecordedRequest) -> usize {
    seen.body.to_string().len() / 4
}

/// Whether it is a request for a summary.
pub fn is_summary(seen: &RecordedRequest) -> bool {
    seen.tools().is_empty()
        && seen.user_messages().len() == 1
        && seen.user_messages()[0].contains("<conversation>")
}

fn reads(page: usize) -> ScriptedAnswer {
    let arguments = json!({"path": "book.txt", "offset": page * LINES + 1, "limit": LINES});
    calls([("read_file", arguments)])
}

/// Reads this many pages, one a turn, then replies `done`. Summaries are numbered. Too long requests are rejected.
fn reader(pages: usize) -> impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static {
    let (turns, summaries) = (AtomicUsize::new(0), AtomicUsize::new(0));
    move |seen| {
        if tokens(seen) > WINDOW {
            return fails(400, format!("prompt is too long: {} tokens", tokens(seen)));
        }
        let answer = match is_summary(seen) {
            true => says(format!(
                "summary {}",
                1 + summaries.fetch_add(1, Ordering::SeqCst)
            )),
            false => match turns.fetch_add(1, Ordering::SeqCst) {
                page if page < pages => reads(page),
                _ => says("done"),
            },
        };
        answer.with_usage(tokens(seen) as u64, 20)
    }
}

fn kind<'a>(events: &'a [Event], kind: &str) -> Vec<&'a Event> {
    events.iter().filter(|event| event.kind() == kind).collect()
}

/// Checks that the record has this many complete pages.
async fn has_pages(run: &Run<'_>, pages: usize) {
    let mut messages = Vec::new();
    let mut after = 0;
    loop {
        let page = run.get(&format!("/messages?after={after}")).await.json();
        messages.extend(page["data"].as_array().expect("data").clone());
        match page["next_after"].as_u64() {
            Some(next) => after = next,
            None => break,
        }
    }
    assert_eq!(messages.len(), 2 * pages + 2);
    let text = Value::from(messages).to_string();
    for page in 0..pages {
        let line = format!("Line {} of", (page + 1) * LINES);
        assert!(text.contains(&line), "{line}");
    }
    assert!(!text.contains("summary 1"));
}

/// The conversation of a request without marks for a cache.
pub fn conversation(seen: &RecordedRequest) -> Vec<String> {
    let mut messages = seen.messages().to_vec();
    let blocks = messages.iter_mut();
    let blocks = blocks.filter_map(|message| message["content"].as_array_mut());
    for block in blocks.flatten().filter_map(Value::as_object_mut) {
        block.remove("cache_control");
    }
    messages.iter().map(Value::to_string).collect()
}

/// Checks that each turn's request begins as the one before it, but after each of `breaks` summaries.
pub fn prefixes_stay(turns: &[&Arc<RecordedRequest>], breaks: usize) {
    let is_broken = |pair: &&[&Arc<RecordedRequest>]| {
        let (before, after) = (conversation(pair[0]), conversation(pair[1]));
        !after.starts_with(&before)
    };
    assert_eq!(turns.windows(2).filter(is_broken).count(), breaks);
}

/// The window of the model is not known: the service's refusal shows it.
#[tokio::test]
async fn a_run_that_its_service_refuses_continues_with_a_summary() {
    for wire in Wire::ALL {
        let toml = format!("model = \"{}/refused\"\n{READER}", wire.name());
        let app = library(&[]).agent("refused", &toml).spawn().await;
        app.provider.always("refused", reader(45));

        let run = app.run("refused", "Read the book").await;

        assert_eq!(run.output(), "done", "{wire:?}");
        assert_eq!(
            run["turns"], 46,
            "neither a summary nor a refusal is a turn"
        );
        has_pages(&run, 45).await;
        let refused = app.provider.requests();
        let refused = refused.iter().filter(|seen| tokens(seen) > WINDOW);
        assert_eq!(
            refused.count(),
            1,
            "later requests stay below what was refused"
        );
        let events = run.events().await;
        assert_eq!(count(&events, "turn.started"), 46);
        assert!(count(&events, "context.compacted") > 1);
        assert_complete(&events);
    }
}

#[tokio::test]
async fn a_run_far_longer_than_the_window_completes_on_every_wire() {
    for wire in Wire::ALL {
        let toml = format!(
            "model = \"{}/reader\"\nsystem_prompt = \"Read.\"\n{READER}",
            wire.name()
        );
        let app = library(&[("reader", &toml)]).spawn().await;
        app.provider.always("reader", reader(45));

        let run = app.run("reader", "Read the book").await;

        assert_eq!(run.output(), "done", "{wire:?}");
        assert_eq!(run["turns"], 46, "a summary is no turn");
        has_pages(&run, 45).await;
        let seen = app.provider.requests();
        let (summaries, turns): (Vec<_>, Vec<_>) = seen.iter().partition(|seen| is_summary(seen));
        assert!((3..20).contains(&summaries.len()), "{}", summaries.len());
        for turn in &turns {
            assert_eq!(turn.system(), "Read.");
            assert!(turn.user_messages()[0].starts_with("Read the book"));
            assert_eq!(turn.tool_names(), ["read_file"]);
        }
        let last = turns.last().expect("turns");
        let summary = format!("summary {}", summaries.len());
        // Some models' templates refuse two messages of a user in a row: on the chat wire the two are one.
        let parted = if wire == Wire::Openai { 1 } else { 2 };
        assert_eq!(
            last.user_messages().len(),
            parted,
            "{:?}",
            last.user_messages()
        );
        assert!(last.user_messages()[parted - 1].contains(&summary));
        prefixes_stay(&turns, summaries.len());
        // The second summary is made of the first and of what came after it.
        let second = &summaries[1].user_messages()[0];
        assert!(
            second.contains("<summary>\nsummary 1\n</summary>") && second.contains("Read the book")
        );

        let events = run.events().await;
        assert_complete(&events);
        let compacted = kind(&events, "context.compacted");
        assert_eq!(compacted.len(), summaries.len());
        assert_eq!(count(&events, "turn.completed"), 46);
        let mut turn = 0;
        for event in compacted {
            assert_eq!(event["strategy"], "compact");
            assert_eq!(event["from_turn"], turn + 1, "{event:?}");
            turn = event["to_turn"].as_u64().expect("a turn");
            assert!(event["tokens_after"].as_u64() < event["tokens_before"].as_u64());
            assert_eq!(event["model"], "reader");
        }
        let ledger = app.provider.ledger();
        assert_eq!(run.usage().0, ledger.input, "summaries are paid for");
        assert_eq!(run["tree"]["model_calls"], ledger.replies);
    }
}

#[tokio::test]
async fn old_results_are_dropped_if_configured() {
    let toml = format!("{READER}\n[context]\nstrategy = \"drop_tool_results\"");
    let app = library(&[("reader", &toml)]).spawn().await;
    app.provider.always("reader", reader(30));

    let run = app.run("reader", "Read the book").await;

    assert_eq!(run.output(), "done");
    has_pages(&run, 30).await;
    let seen = app.provider.requests();
    assert_eq!(seen.len(), 31, "nothing is requested for it");
    let results = seen[30].tool_results();
    assert_eq!(results.len(), 30);
    assert!(results[29].contains("Line 1800 of"), "the last one stays");
    assert!(
        results[0].contains("result of read_file") && results[0].contains("bytes) was dropped"),
        "{}",
        results[0]
    );
    let events = run.events().await;
    let compacted = kind(&events, "context.compacted");
    let dropped = compacted.iter().map(|event| event["results"].as_u64());
    let dropped: u64 = dropped.map(|results| results.expect("a number")).sum();
    let is_dropped = |text: &&String| text.contains("was dropped");
    assert_eq!(dropped, results.iter().filter(is_dropped).count() as u64);
    let turns: Vec<_> = seen.iter().collect();
    prefixes_stay(&turns, compacted.len());
    assert!(compacted.len() < 15, "{}", compacted.len());
}

#[tokio::test]
async fn strategy_fail_fails_before_the_request() {
    let toml = format!("{READER}\n[context]\nstrategy = \"fail\"\ncompact_at = 0.5");
    let app = library(&[("reader", &toml)]).spawn().await;
    app.provider.always("reader", reader(30));

    let run = app.run("reader", "Read the book").await;

    let (code, message) = run.failure();
    assert_eq!(code, "config");
    assert!(message.contains("context.compact_at = 0.5"), "{message}");
    let seen = app.provider.requests();
    assert!(seen.iter().all(|seen| tokens(seen) < 5000));
    assert!(seen.len() > 3);
}

#[tokio::test]
async fn an_irreducible_request_fails_with_advice() {
    let toml = format!("{READER}\n[params]\nmax_tokens = 1000");
    let app = library(&[("reader", &toml)]).spawn().await;
    let whole = json!({"path": "book.txt", "limit": 1000});
    app.provider
        .will("reader", [reads(0), calls([("read_file", whole)])]);
    app.provider.always("reader", |_| says("a summary"));

    let run = app.run("reader", "Read the book").await;

    let (code, message) = run.failure();
    assert_eq!(code, "config");
    assert!(message.contains("window of 8000"), "{message}");
    assert!(
        message.contains("the tool results of one turn with"),
        "{message}"
    );
    assert!(app.provider.requests().len() <= 3);

    // The task alone.
    let run = app.run("reader", &"term ".repeat(8000)).await;
    let (_, message) = run.failure();
    assert!(message.contains("a user message with"), "{message}");
}

#[tokio::test]
async fn an_unknown_window_changes_nothing() {
    let app = TestApp::setup()
        .agent("reader", READER)
        .file("book.txt", &"A line\n".repeat(9000))
        .spawn()
        .await;
    let whole = || calls([("read_file", json!({"path": "book.txt"}))]);
    app.provider
        .will("reader", [whole(), whole(), whole(), says("done")]);

    let run = app.run("reader", "go").await;

    assert_eq!(run.output(), "done");
    assert_eq!(count(&run.events().await, "context.compacted"), 0);
}

#[tokio::test]
async fn reported_tokens_override_a_smaller_estimate() {
    let app = library(&[("reader", READER)]).spawn().await;
    app.provider.will(
        "reader",
        [
            reads(0),
            reads(1),
            reads(2).with_usage(7000, 10),
            says("short"),
            says("done"),
        ],
    );

    let run = app.run("reader", "go").await;

    assert_eq!(run.output(), "done");
    let events = run.events().await;
    let compacted = kind(&events, "context.compacted");
    assert_eq!(compacted.len(), 1);
    let before = compacted[0]["tokens_before"].as_u64().expect("tokens");
    assert!((7010..8000).contains(&before), "{before}");
}

#[tokio::test]
async fn without_a_summary_results_are_dropped_with_a_warning() {
    for no_summary in [
        fails(400, "I do not sum up"),
        says(" "),
        says("no").into_refusal(),
    ] {
        let app = library(&[("reader", READER)]).spawn().await;
        let (read, done) = (reader(20), no_summary.clone());
        app.provider
            .always("reader", move |seen| match is_summary(seen) {
                true => done.clone(),
                false => read(seen),
            });

        let run = app.run("reader", "go").await;

        assert_eq!(run.output(), "done");
        let events = run.events().await;
        let warnings = kind(&events, "model.warning");
        let dropped = kind(&events, "context.compacted");
        assert!(!warnings.is_empty());
        assert_eq!(warnings.len(), dropped.len());
        let message = warnings[0]["message"].as_str().expect("a text");
        assert!(message.contains("could not be summarized"), "{message}");
        assert_eq!(dropped[0]["strategy"], "drop_tool_results");
    }
}

#[tokio::test]
async fn named_and_ad_hoc_children_are_compacted_too() {
    let planner = "sub_agents = [\"reader\"]\n[subagent]\nenabled = true\nsummary = \"always\"";
    let app = library(&[("planner", planner), ("reader", READER)])
        .spawn()
        .await;
    app.provider.always("reader", reader(20));
    app.provider.will(
        "planner",
        [delegates([("reader", "Read the book")]), says("done")],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let child = &run.children().await[0];
    assert!(count(&child.events().await, "context.compacted") > 0);
    assert_eq!(run.tree_usage().0, app.provider.ledger().input);

    let app = library(&[(
        "solo",
        &format!("{READER}\n[subagent]\nenabled = true\ndefault_max_turns = 30"),
    )])
    .spawn()
    .await;
    let task = json!({"label": "read", "task_prompt": "Read the book"});
    let read = reader(20);
    let is_asked = AtomicUsize::new(0);
    app.provider
        .always("solo", move |seen| match seen.user_messages()[0].as_str() {
            "go" if is_asked.fetch_add(1, Ordering::SeqCst) == 0 => {
                calls([("subagent", task.clone())])
            }
            "go" => says("all done"),
            _ => read(seen),
        });
    let run = app.run("solo", "go").await;
    assert_eq!(run.output(), "all done");
    let child = &run.children().await[0];
    assert_eq!(child.output(), "done");
    assert!(count(&child.events().await, "context.compacted") > 0);
}

/// Waits for this many such requests.
pub async fn requested(app: &TestApp, count: usize, is_such: impl Fn(&RecordedRequest) -> bool) {
    for requests in 1.. {
        app.provider.wait_for_request("reader", requests).await;
        let seen = app.provider.requests();
        if seen.iter().filter(|seen| is_such(seen)).count() >= count {
            return;
        }
    }
}

#[tokio::test]
async fn a_summary_interrupted_by_a_kill_is_requested_again() {
    let mut app = library(&[("reader", READER)]).spawn().await;
    let (read, gate) = (reader(12), Gate::closed());
    let held = gate.clone();
    let is_held = AtomicUsize::new(0);
    app.provider.always("reader", move |seen| {
        let answer = read(seen);
        match is_summary(seen) && is_held.fetch_add(1, Ordering::SeqCst) == 0 {
            true => answer.after_gate(&held),
            false => answer,
        }
    });
    let id = app.start("reader", "go").await.id().to_owned();
    requested(&app, 1, is_summary).await;

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["turns"], 13);
    has_pages(&run, 12).await;
    let mut summaries = app.provider.requests();
    summaries.retain(|seen| is_summary(seen));
    assert_eq!(summaries[0].body, summaries[1].body);
    assert_eq!(
        run["tree"]["complete"], false,
        "what the first cost is not known"
    );
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(count(&events, "context.compacted"), summaries.len() - 1);
    gate.open();
}

#[tokio::test]
async fn the_responses_of_a_run_count_its_summaries() {
    let app = library(&[("reader", READER)]).spawn().await;
    let (read, requests) = (reader(12), AtomicUsize::new(0));
    app.provider.always("reader", move |seen| {
        match requests.fetch_add(1, Ordering::SeqCst) {
            0 => calls([("choose", json!({}))]).with_usage(tokens(seen) as u64, 20),
            _ => read(seen),
        }
    });
    let tools = json!([{"type": "function", "name": "choose", "parameters": {"type": "object"}}]);
    let body = json!({"model": "reader", "input": "Read the book", "tools": tools});
    let first = app.post("/v1/responses", &body).await;
    let call = &first.json()["output"][0]["call_id"];
    let result = json!([{"type": "function_call_output", "call_id": call, "output": "this one"}]);
    let id = &first.json()["id"];
    let body =
        json!({"model": "reader", "input": result, "previous_response_id": id, "tools": tools});

    let second = app.post("/v1/responses", &body).await;

    let run = app.find(second.header("x-run-id")).await;
    assert_eq!(run.output(), "done");
    assert_eq!(first.header("x-run-id"), run.id());
    let events = run.events().await;
    assert!(count(&events, "context.compacted") > 0);
    let of = |field: &str| {
        let responses = [&first, &second].map(|got| got.json()["usage"][field].as_u64());
        responses.into_iter().flatten().sum::<u64>()
    };
    let (input, output, _) = run.usage();
    assert_eq!((of("input_tokens"), of("output_tokens")), (input, output));
}

#[tokio::test]
async fn a_recorded_summary_is_used_after_a_kill() {
    for strategy in ["compact", "drop_tool_results"] {
        let toml = format!("{READER}\n[context]\nstrategy = \"{strategy}\"");
        let mut app = library(&[("reader", &toml)]).spawn().await;
        let (read, gate) = (reader(14), Gate::closed());
        let held = gate.clone();
        let is_held = AtomicUsize::new(0);
        let is_short = |seen: &RecordedRequest| {
            let is_dropped = |text: &String| text.contains("was dropped");
            seen.user_messages().len() > 1 || seen.tool_results().iter().any(is_dropped)
        };
        app.provider.always("reader", move |seen| {
            // Two turns after the first time.
            match is_short(seen) && is_held.fetch_add(1, Ordering::SeqCst) == 2 {
                true => says("never").after_gate(&held),
                false => read(seen),
            }
        });
        let id = app.start("reader", "go").await.id().to_owned();
        requested(&app, 3, is_short).await;
        let mut events = app.events(&app.find(&id).await).await;
        let turn = app
            .provider
            .requests()
            .iter()
            .filter(|seen| !is_summary(seen))
            .count();
        events
            .until_matches(|events| count(events, "turn.started") == turn)
            .await;
        let before = app.provider.requests();

        app.crash_and_restart().await;

        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done", "{strategy}");
        has_pages(&run, 14).await;
        let seen = app.provider.requests();
        let again = &seen[before.len()];
        let first = before.last().expect("requests");
        assert_eq!(
            again.body, first.body,
            "{strategy}: the same request, and no new summary"
        );
        assert_complete(&run.events().await);
    }
}

#[tokio::test]
async fn messages_no_longer_sent_can_be_recalled() {
    let toml = format!("{READER}\n[context]\nrecall = true");
    let app = library(&[("reader", &toml)]).spawn().await;
    let (read, sent) = (reader(12), AtomicUsize::new(0));
    app.provider.always("reader", move |seen| {
        let is_done = !is_summary(seen) && sent.fetch_add(1, Ordering::SeqCst) == 12;
        match is_done {
            true => calls([("recall", json!({"query": "line 17 BOOK", "limit": 2}))]),
            false => read(seen),
        }
    });

    let run = app.run("reader", "Read the book").await;

    assert_eq!(run.output(), "done");
    let seen = app.provider.requests();
    let turns: Vec<_> = seen.iter().filter(|seen| !is_summary(seen)).collect();
    for turn in &turns {
        assert_eq!(turn.tool_names(), ["read_file", "recall"]);
    }
    let last = turns.last().expect("turns");
    let results = last.tool_results();
    assert!(!results[0].contains("Line 17 of"), "it was summarized");
    let recalled = results.last().expect("results");
    assert!(
        recalled.contains("turn 1, the result of read_file"),
        "{recalled}"
    );
    assert!(recalled.contains("Line 17 of a long book"), "{recalled}");
    assert!(recalled.len() < 2000, "{recalled}");

    // Without words of its own, and past its bounds.
    for (arguments, answer) in [
        (json!({"query": "unheard-of"}), "Nothing was found"),
        (json!({"query": ""}), "do not fit its schema"),
        (
            json!({"query": "line", "limit": 21}),
            "do not fit its schema",
        ),
    ] {
        app.provider
            .will("reader", [calls([("recall", arguments)]), says("done")]);
        app.run("reader", "again").await;
        let seen = app.provider.requests();
        let results = seen.last().expect("requests").tool_results();
        assert!(results[0].contains(answer), "{results:?}");
    }
}

#[tokio::test]
async fn earlier_runs_of_a_session_can_be_recalled_only_by_their_owner() {
    let app = library(&[("talker", "[context]\nrecall = true")])
        .config("[limits]\nsession_messages = 2")
        .spawn()
        .await;
    app.provider.always("talker", |_| says("noted"));
    let talk = |input: &str, session: &str| json!({"input": input, "session": session});
    app.run_with("talker", talk("The password is swordfish", "talk"))
        .await;
    for _ in 0..3 {
        app.run_with("talker", talk("and now?", "talk")).await;
    }
    for (session, answer) in [
        (
            "talk",
            "turn 0, a user's message:\nThe password is swordfish",
        ),
        ("other", "Nothing was found"),
    ] {
        let recall = calls([("recall", json!({"query": "swordfish"}))]);
        app.provider.will("talker", [recall, says("done")]);
        app.run_with("talker", talk("which was it?", session)).await;
        let seen = app.provider.requests();
        let results = seen.last().expect("requests").tool_results();
        assert!(results[0].contains(answer), "{results:?}");
    }
}
