//! Sessions that exceed the context window.

use crate::runs::context_window::{WINDOW, library, prefixes_stay, tokens};
use crate::support::app::TestApp;
use crate::support::provider::answer::{ScriptedAnswer, fails, says};
use crate::support::provider::recorded_request::RecordedRequest;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a user writes in a long session.
fn essay(number: usize) -> String {
    format!("{number}: {}", "I have this to add.. ".repeat(60))
}

/// Says as much again. Summaries are numbered.
pub fn talker() -> impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static {
    let summaries = AtomicUsize::new(0);
    move |seen| {
        if tokens(seen) > WINDOW {
            return fails(400, "prompt is too long");
        }
        let task = seen.user_messages().last().cloned().unwrap_or_default();
        match task.contains("<conversation>") {
            true => says(format!(
                "gist {}",
                1 + summaries.fetch_add(1, Ordering::SeqCst)
            )),
            false => says(format!("Got: {task}")),
        }
    }
}

#[tokio::test]
async fn a_session_far_longer_than_the_window_is_summarized_once() {
    let mut app = library(&[("talker", "")]).spawn().await;
    app.provider.always("talker", talker());
    let talk = |number| json!({"input": essay(number), "session": "talk"});
    const RUNS: usize = 45;
    for number in 1..=RUNS {
        let run = app.run_with("talker", talk(number)).await;
        assert!(run.output().starts_with(&format!("Got: {number}:")));
        if number == 30 {
            app.crash_and_restart().await;
        }
    }

    let seen = app.provider.requests();
    let summaries = seen.len() - RUNS;
    assert!((2..12).contains(&summaries), "{summaries} summaries");
    let is_turn =
        |seen: &&Arc<RecordedRequest>| !seen.user_messages()[0].contains("<conversation>");
    let turns: Vec<_> = seen.iter().filter(is_turn).collect();
    prefixes_stay(&turns, summaries);
    let last = turns.last().expect("turns").user_messages();
    assert!(
        last[0].contains(&format!("gist {summaries}")),
        "{}",
        last[0]
    );
    // The record has it all.
    let session = app.get("/sessions/talk").await.json();
    assert_eq!(session["messages"], 2 * RUNS);
    let id = session["run"].as_str().expect("a run").to_owned();
    let run = app.find(&id).await;
    let text = run.messages().await["data"].to_string();
    assert!(text.contains(&essay(1)) && text.contains(&essay(RUNS)));
    assert!(!text.contains("gist 1"));
}

/// The window of the model is not known: the service's refusal shows it.
#[tokio::test]
async fn a_session_that_its_service_refuses_is_summarized() {
    let app = TestApp::setup().agent("talker", "").spawn().await;
    app.provider.always("talker", talker());
    for number in 1..=30 {
        let body = json!({"input": essay(number), "session": "talk"});
        let run = app.run_with("talker", body).await;
        assert!(run.output().starts_with(&format!("Got: {number}:")));
    }
    let session = app.get("/sessions/talk").await.json();
    assert_eq!(session["messages"], 60, "the record has it all");
}

#[tokio::test]
async fn what_stays_too_long_is_refused_once() {
    let app = TestApp::setup()
        .agent("talker", "")
        .agent("strict", "context = { strategy = \"fail\" }")
        .spawn()
        .await;
    let refused = "This model's maximum context length is 10 tokens.";
    for (agent, requests) in [("talker", 2), ("strict", 1)] {
        app.provider.will(agent, [says("hello")]);
        let talk = json!({"input": essay(1), "session": agent});
        app.run_with(agent, talk.clone()).await;
        app.provider.always(agent, move |_| fails(400, refused));
        let before = app.provider.requests().len();

        let run = app.run_with(agent, talk).await;

        let (code, message) = run.failure();
        assert_eq!(code, "provider_bad_request");
        assert!(message.contains(refused), "{message}");
        assert_eq!(app.provider.requests().len() - before, requests, "{agent}");
    }
}

#[tokio::test]
async fn a_session_cut_to_its_limits_keeps_its_summary() {
    let app = library(&[("talker", "")])
        .config("[limits]\nsession_messages = 30")
        .spawn()
        .await;
    app.provider.always("talker", talker());
    for number in 1..=30 {
        let body = json!({"input": essay(number), "session": "talk"});
        let run = app.run_with("talker", body).await;
        assert!(run.output().starts_with("Got"), "{number}");
    }
    let seen = app.provider.requests();
    let last = seen.last().expect("requests").user_messages();
    assert_eq!(
        last.iter().filter(|text| text.contains("gist")).count(),
        1,
        "{last:#?}"
    );
}
