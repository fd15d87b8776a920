//! Turns are stored as differences, and copied to another run.

use std::sync::Arc;

use axed::domain::message::{AssistantMessage, ToolResult};
use axed::domain::request_head::RequestHead;
use axed::domain::run::{Outcome, Scope, now};
use axed::record::entry::Entry;
use axed::store::request_delta;
use axed::store::run_store::RunStore;
use axed::store::turn_record::{StoredRequest, TurnAttempt, TurnEntry, TurnRecord, TurnStatus};
use axed::store::{Change, Write};

use crate::store::fixtures::{self, Opened, closing, failure, opening, recorded, root, write};

fn head() -> Arc<RequestHead> {
    Arc::new(RequestHead {
        method: Some("POST".to_owned()),
        url: Some("https://models.example.com/v1/messages".to_owned()),
        ..RequestHead::default()
    })
}

fn entry(turn: u32, request: StoredRequest, body: &str) -> TurnEntry {
    let attempt = TurnAttempt {
        provider: "anthropic".to_owned(),
        model: "claude".to_owned(),
        status: Some(200),
        error: None,
        started_at: now(),
        duration_ms: 5,
    };
    let record = TurnRecord {
        turn,
        provider: "anthropic".to_owned(),
        model: "claude".to_owned(),
        effort: None,
        status: TurnStatus::Completed,
        is_copied: false,
        is_redacted: false,
        request_bytes: Some(body.len() as u64),
        first_token_ms: None,
        attempts: vec![attempt],
        usage: None,
        cost: None,
        stop_reason: None,
        tool_calls: 1,
    };
    let request = Some(request);
    TurnEntry { record, request }
}

fn prompt() -> Entry {
    Entry::Prompted {
        system: "You are a careful reader of reports.".to_owned(),
        message: "Read the report, and summarize it.".into(),
        earlier: Vec::new(),
        compaction: None,
    }
}

fn reply(turn: u32) -> Entry {
    let message = AssistantMessage {
        content: format!("This is the reply of turn {turn}, which calls a tool."),
        ..AssistantMessage::default()
    };
    fixtures::reply(turn, message)
}

fn result(turn: u32) -> Entry {
    let text = format!("turn {turn} has \"quotes\"\n").repeat(200);
    fixtures::result(turn, 0, ToolResult::text("call", text, false))
}

/// What a provider gets with these steps.
fn body(steps: &[Entry]) -> String {
    let texts = steps.iter().flat_map(|step| match step {
        Entry::Prompted {
            system, message, ..
        } => vec![system.clone(), message.to_plain_text().into_owned()],
        Entry::Replied { message, .. } => vec![message.content.clone()],
        Entry::CallCompleted { result, .. } => vec![result.content.clone()],
        _ => Vec::new(),
    });
    let texts: Vec<_> = texts.collect();
    serde_json::json!({"messages": texts, "tools": [{"name": "read_file"}]}).to_string()
}

/// Records a run with this many turns. Returns its steps and the bodies that it sent.
async fn recorded_run(
    store: &dyn RunStore,
    scope: &Scope,
    turns: u32,
) -> (Vec<Entry>, Vec<String>) {
    let mut steps = vec![prompt()];
    let mut first = opening(scope, "writer");
    first.entries.extend(steps.iter().cloned().map(recorded));
    store.write(first).await.expect("created");
    let mut bodies: Vec<String> = Vec::new();
    for turn in 1..=turns {
        let body = body(&steps);
        let texts: Vec<_> = steps.iter().flat_map(request_delta::entry_texts).collect();
        let previous = bodies.last().map(String::as_bytes);
        let delta = request_delta::encode(previous, body.as_bytes(), &texts);
        assert!(delta.pieces.len() < 200, "{} bytes", delta.pieces.len());
        let stored = StoredRequest {
            head: (turn == 1).then(head),
            body: delta,
            shared_text: None,
        };
        let new_steps = [reply(turn), result(turn)];
        let write = Write {
            entries: new_steps.iter().cloned().map(recorded).collect(),
            turns: vec![entry(turn, stored, &body)],
            ..write(scope, Change::Unchanged, 1)
        };
        store.write(write).await.expect("written");
        steps.extend(new_steps);
        bodies.push(body);
    }
    (steps, bodies)
}

/// Every request is read as it was sent, and without the turns it is not there.
async fn each_request_is_read_as_it_was_sent(opened: &Opened) {
    let (store, scope) = (&*opened.store, root());
    let (_, bodies) = recorded_run(store, &scope, 12).await;
    let turns = store.turns(scope.run).await.expect("turns");
    let numbers: Vec<_> = turns.iter().map(|turn| turn.turn).collect();
    assert_eq!(numbers, (1..=12).collect::<Vec<_>>());
    for (turn, body) in (1..).zip(&bodies) {
        let found = store.turn(scope.run, turn).await.expect("a read");
        let found = found.expect("the turn");
        let request = found.request.expect("a request");
        assert_eq!(String::from_utf8(request.body).as_ref(), Ok(body));
        assert_eq!(request.head, head());
        let reply = found.reply.expect("a reply");
        assert!(reply.content.contains(&format!("turn {turn},")));
    }
    assert!(store.turn(scope.run, 13).await.expect("a read").is_none());
}

/// The turns of a copy are complete without their source, also if a result of the copy is another one.
async fn copied_turns_do_not_need_their_source(opened: &Opened) {
    let (store, source, copy) = (&*opened.store, root(), root());
    let (mut steps, bodies) = recorded_run(store, &source, 6).await;
    steps.truncate(1 + 2 * 4);
    if let Entry::CallCompleted { result, .. } = &mut steps[4] {
        result.content = "another result, with which the copy goes on".to_owned();
    }
    let copies: Vec<_> = steps.into_iter().map(recorded).collect();
    let copied = store.copied_turns(source.run, 4, copies.clone()).await;
    let mut first = opening(&copy, "writer");
    first.entries.extend(copies);
    first.turns = copied.expect("turns");
    store.write(first).await.expect("created");
    let outcome = Outcome::Failed {
        failure: failure(),
        partial: None,
    };
    store.write(closing(&source, outcome)).await.expect("ended");
    assert!(store.delete(source.run).await.expect("deleted"));
    assert!(store.turns(source.run).await.expect("turns").is_empty());
    let turns = store.turns(copy.run).await.expect("turns");
    assert!(turns.len() == 4 && turns.iter().all(|turn| turn.is_copied));
    for (turn, body) in (1..=4).zip(&bodies) {
        let found = store.turn(copy.run, turn).await.expect("a read");
        let request = found.expect("the turn").request.expect("a request");
        assert_eq!(String::from_utf8(request.body).as_ref(), Ok(body));
    }
}

shared_stories!(
    each_request_is_read_as_it_was_sent,
    copied_turns_do_not_need_their_source
);
