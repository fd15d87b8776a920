//! Asking a person: the question, the answer, and what happens to a run in between.

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{ApiResponse, Setup, TestApp, key, send};
use crate::support::events::{assert_complete, count, kinds};
use crate::support::gate::Gate;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::tools::approvals::find;
use crate::tools::wait::result;
use crate::webhooks::messages::{daemon, webhook};

const ASKS: &str = "[ask]\nenabled = true\n";

pub fn curious(settings: &str) -> Setup {
    TestApp::setup()
        .agent("curious", &format!("{settings}{ASKS}"))
        .agent("solo", "")
        .agent("planner", "sub_agents = [\"curious\"]")
}

pub fn asks(arguments: Value) -> ScriptedAnswer {
    calls([("ask_person", arguments)])
}

fn asks_for_trip() -> ScriptedAnswer {
    asks(json!({"question": "Which trip?", "schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}, "nights": {"type": "integer", "minimum": 1}},
        "required": ["city"],
    }}))
}

/// The questions that wait, once there are that many.
pub async fn questions(app: &TestApp, many: usize) -> Vec<Value> {
    let is_many = |got: &ApiResponse| {
        let got = got.json();
        got["data"].as_array().is_some_and(|it| it.len() == many)
    };
    let page = app.get_until("/inputs", is_many).await.json();
    page["data"].as_array().expect("a list").clone()
}

/// Sets the agent to work and waits until the run waits for the answer to its question.
pub async fn waiting(app: &TestApp, agent: &str) -> (String, Value) {
    let id = app.start(agent, "go").await.id().to_owned();
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    (id, questions(app, 1).await.remove(0))
}

fn path_of(question: &Value) -> String {
    let of = |key: &str| question[key].as_str().expect(key).to_owned();
    format!("/runs/{}/inputs/{}", of("run_id"), of("id"))
}

pub async fn answer(app: &TestApp, question: &Value, body: Value) -> ApiResponse {
    app.post(&path_of(question), &body).await
}

#[tokio::test]
async fn an_answer_becomes_the_result_of_the_call() {
    let app = curious("").spawn().await;
    let arguments = json!({"question": "Which city?", "options": ["Berlin", "Paris"]});
    app.provider
        .will("curious", [asks(arguments), says("done")]);
    let (id, question) = waiting(&app, "curious").await;
    let run = app.find(&id).await;
    assert_eq!(run["waiting_for"], "input");
    assert_eq!(run["wait"]["reason"], "input");
    assert!(run["wait"]["since"].is_string(), "{}", run["wait"]);
    assert_eq!(run["wait"].get("until"), None);
    assert_eq!(run["pending_inputs"], json!([question]));
    assert_eq!(run["pending_approvals"], json!([]));
    assert_eq!(app.get("/approvals").await.json()["data"], json!([]));
    assert_eq!(question["question"], "Which city?");
    assert_eq!(question["options"], json!(["Berlin", "Paris"]));
    assert_eq!(
        (&question["schema"], &question["until"]),
        (&json!(null), &json!(null))
    );
    assert_eq!(question["id"], question["call_id"]);
    assert_eq!(
        (&question["run_id"], &question["root_id"]),
        (&json!(id), &json!(id))
    );

    let answered = answer(&app, &question, json!({"answer": "Rome"})).await;
    assert_eq!(answered.status, 202, "{}", answered.text);
    assert_eq!(answered.json()["id"], id);
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(
        result(&run).await,
        ("A person answered: Rome".to_owned(), false)
    );
    let events = run.events().await;
    assert_complete(&events);
    assert_eq!(
        kinds(&events)[3..8],
        [
            "turn.completed",
            "tool.started",
            "input.requested",
            "input.answered",
            "tool.completed"
        ]
    );
    let (requested, given) = (
        find(&events, "input.requested"),
        find(&events, "input.answered"),
    );
    assert_eq!(requested["question"], "Which city?");
    assert_eq!(requested["input_id"], question["id"]);
    assert_eq!(
        (&given["outcome"], &given["answer"]),
        (&json!("answered"), &json!("Rome"))
    );
    assert_eq!(run["wait"], json!(null));
    // The first answer wins.
    let again = answer(&app, &question, json!({"answer": "Oslo"})).await;
    again.problem(409);
    assert_eq!(again.json()["code"], "nothing_waits");
    assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
}

#[tokio::test]
async fn an_answer_that_does_not_fit_the_schema_is_refused_and_the_question_waits_on() {
    let app = curious("").spawn().await;
    app.provider
        .will("curious", [asks_for_trip(), says("done")]);
    let (id, question) = waiting(&app, "curious").await;
    assert_eq!(question["schema"]["required"], json!(["city"]));
    for wrong in [
        json!({"answer": "Berlin"}),
        json!({"answer": {"city": "Rome"}}),
        json!({"answer": {"city": "Paris", "nights": 0}}),
        json!({}),
        json!({"answer": null}),
        json!({"answer": {"city": "Paris"}, "decline": "no"}),
        json!({"answer": {"city": "Paris", "note": "x".repeat(20_000)}}),
        json!({"decline": "x".repeat(1001)}),
        json!({"answers": 1}),
    ] {
        let refused = answer(&app, &question, wrong.clone()).await;
        assert_eq!(refused.status, 422, "{wrong}: {}", refused.text);
    }
    assert_eq!(app.find(&id).await.status(), "waiting");
    let right = json!({"answer": {"city": "Paris", "nights": 2}});
    assert_eq!(answer(&app, &question, right).await.status, 202);
    let run = app.find(&id).await.wait_for_end().await;
    let (text, is_error) = result(&run).await;
    let json = text.strip_prefix("A person answered: ").expect("its mark");
    let given: Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(
        (given, is_error),
        (json!({"city": "Paris", "nights": 2}), false)
    );
}

#[tokio::test]
async fn a_person_may_decline() {
    let app = curious("").spawn().await;
    app.provider.will(
        "curious",
        [asks(json!({"question": "Your PIN?"})), says("done")],
    );
    let (id, question) = waiting(&app, "curious").await;
    let declined = answer(&app, &question, json!({"decline": "that is secret"})).await;
    assert_eq!(declined.status, 202, "{}", declined.text);
    let run = app.find(&id).await.wait_for_end().await;
    let declined = "A person declined to answer: that is secret".to_owned();
    assert_eq!(result(&run).await, (declined, true));
    let events = run.events().await;
    let given = find(&events, "input.answered");
    assert_eq!(
        (&given["outcome"], &given["reason"]),
        (&json!("declined"), &json!("that is secret"))
    );
}

#[tokio::test]
async fn without_an_answer_in_time_the_default_counts() {
    for (default, arguments, expected) in [
        (
            "",
            json!({"question": "Which?"}),
            Err("No person answered within 1s"),
        ),
        (
            "ask_default = \"the first\"\n",
            json!({"question": "Which?"}),
            Ok("No person answered within 1s. The default answer: the first"),
        ),
        (
            "ask_default = \"3\"\n",
            json!({"question": "How many?", "schema": {"type": "integer"}}),
            Ok("No person answered within 1s. The default answer: 3"),
        ),
        (
            "ask_default = \"the first\"\n",
            json!({"question": "How many?", "schema": {"type": "integer"}}),
            Err("No person answered within 1s"),
        ),
    ] {
        let app = curious(&format!("ask_timeout = 1\n{default}"))
            .spawn()
            .await;
        app.provider
            .will("curious", [asks(arguments), says("done")]);
        let run = app.run("curious", "go").await;
        let run = run.wait_for_end().await;
        let (text, is_error) = result(&run).await;
        let expected = match expected {
            Ok(text) => (text, false),
            Err(text) => (text, true),
        };
        assert_eq!((text.as_str(), is_error), expected);
        let events = run.events().await;
        assert_eq!(find(&events, "input.answered")["outcome"], "timed_out");
        assert!(find(&events, "input.requested")["deadline"].is_string());
    }
}

#[tokio::test]
async fn of_many_answers_at_once_one_counts() {
    let app = curious("").spawn().await;
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("done")],
    );
    let (id, question) = waiting(&app, "curious").await;
    let mut clients = JoinSet::new();
    for number in 0..8 {
        let request = app.request(Method::POST, &path_of(&question));
        clients.spawn(send(request.json(&json!({"answer": format!("{number}")}))));
    }
    let answers = clients.join_all().await;
    let of = |status: u16| answers.iter().filter(|it| it.status == status).count();
    assert_eq!((of(202), of(409)), (1, 7));
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(count(&run.events().await, "input.answered"), 1);
}

#[tokio::test]
async fn an_answer_with_an_idempotency_key_is_given_once() {
    let app = curious("").spawn().await;
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("done")],
    );
    let (id, question) = waiting(&app, "curious").await;
    let post = |text: &str| {
        let request = app.request(Method::POST, &path_of(&question));
        send(
            request
                .header("idempotency-key", "k")
                .json(&json!({"answer": text})),
        )
    };
    assert_eq!(post("a").await.status, 202);
    app.find(&id).await.wait_for_end().await;
    assert_eq!(post("a").await.status, 202);
    post("b").await.problem(422);
}

#[tokio::test]
async fn a_question_outlives_its_daemon_and_needs_no_permit() {
    for agent in ["curious", "planner"] {
        let mut app = curious("").config("[runs]\nmax_running = 1").spawn().await;
        app.provider
            .will("planner", [delegates([("curious", "ask")]), says("done")]);
        app.provider.will(
            "curious",
            [asks(json!({"question": "Which?"})), says("done")],
        );
        let (id, question) = waiting(&app, agent).await;
        app.crash_and_restart().await;
        assert_eq!(app.find(&id).await.status(), "waiting");
        assert_eq!(questions(&app, 1).await, std::slice::from_ref(&question));
        // Another run gets the only permit meanwhile.
        app.provider.will("solo", [says("done")]);
        assert_eq!(
            app.run("solo", "go").await.wait_for_end().await.output(),
            "done"
        );
        let answered = answer(&app, &question, json!({"answer": "this"})).await;
        assert_eq!(answered.status, 202, "{}", answered.text);
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        let events = run.events().await;
        assert_complete(&events);
        find(&events, "input.requested");
        find(&events, "input.answered");
        assert_eq!(
            count(&events, "tool.completed"),
            if agent == "planner" { 2 } else { 1 }
        );
    }
}

#[tokio::test]
async fn an_answer_survives_a_crash_right_after_it() {
    let mut app = curious("").config("[runs]\nmax_running = 1").spawn().await;
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("done")],
    );
    let (id, question) = waiting(&app, "curious").await;
    // It is answered, but cannot continue before it has a permit again.
    app.provider
        .will("solo", [says("x").after_gate(&Gate::closed())]);
    let other = app.start("solo", "go").await.id().to_owned();
    app.provider.wait_for_request("solo", 1).await;
    assert_eq!(
        answer(&app, &question, json!({"answer": "this"}))
            .await
            .status,
        202
    );
    app.provider.will("solo", [says("done")]);
    app.crash_and_restart().await;
    answer(&app, &question, json!({"answer": "that"}))
        .await
        .problem(409);
    app.find(&other).await.wait_for_end().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(result(&run).await.0, "A person answered: this");
}

#[tokio::test]
async fn the_time_of_a_run_stands_still_while_it_asks() {
    let mut app = curious("").agent("other", "timeout = 20").spawn().await;
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("done")],
    );
    let body = json!({"input": "go", "timeout": 20});
    let id = app
        .start_with("curious", body.clone())
        .await
        .id()
        .to_owned();
    let question = questions(&app, 1).await.remove(0);
    app.provider
        .will("other", [says("late").after_gate(&Gate::closed())]);
    assert_eq!(app.run_with("other", body).await.failure().0, "timeout");
    app.crash_and_restart().await;
    assert_eq!(
        answer(&app, &question, json!({"answer": "this"}))
            .await
            .status,
        202
    );
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_childs_question_shows_at_its_root() {
    let app = curious("").spawn().await;
    app.provider
        .will("planner", [delegates([("curious", "ask")]), says("done")]);
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("answered")],
    );
    let (id, question) = waiting(&app, "planner").await;
    let root = app.find(&id).await;
    assert_eq!(root["waiting_for"], "input");
    assert_eq!(root["pending_inputs"], json!([question]));
    let (root_id, agent) = (&question["root_id"], &question["agent"]);
    assert_eq!((root_id, agent), (&json!(id), &json!("curious")));
    assert_ne!(question["run_id"], json!(id));
    let of_tree = app.get(&format!("/inputs?root={id}")).await.json();
    assert_eq!(of_tree["data"], json!([question]));
    let answered = answer(&app, &question, json!({"answer": "this"})).await;
    assert_eq!(answered.status, 202, "{}", answered.text);
    assert_eq!(root.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_webhook_gets_the_question_without_its_text() {
    let receiver = WebhookReceiver::start().await;
    let hook = webhook(&receiver.url("/"));
    let settings = format!("{ASKS}{hook}\nevents = [\"input.requested\"]");
    let app = daemon().agent("curious", &settings).spawn().await;
    app.provider
        .will("curious", [asks(json!({"question": "Which?"}))]);
    let (id, _) = waiting(&app, "curious").await;
    let message = receiver.wait_for_messages(1).await.remove(0).json();
    assert_eq!(message["type"], "input.requested");
    assert_eq!(message["data"]["id"], id);
    assert!(!message.to_string().contains("Which?"), "{message}");
}

#[tokio::test]
async fn a_question_and_an_approval_wait_side_by_side() {
    let settings = "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]\n";
    let app = curious(settings).file("work/here", "").spawn().await;
    let both = calls([
        ("ask_person", json!({"question": "Which?"})),
        ("write_file", json!({"path": "a", "content": "b"})),
    ]);
    app.provider.will("curious", [both, says("done")]);
    let id = app.start("curious", "go").await.id().to_owned();
    let question = questions(&app, 1).await.remove(0);
    let is_waiting = |got: &ApiResponse| got.json()["pending_approvals"][0].is_object();
    let run = app
        .get_until(&format!("/runs/{id}"), is_waiting)
        .await
        .json();
    assert_eq!(run["waiting_for"], "approval");
    assert_eq!(run["pending_inputs"], json!([question]));
    let call = run["pending_approvals"][0]["tool_call_id"]
        .as_str()
        .expect("an id");
    // Neither is answered as the other.
    let path = format!("/runs/{id}/inputs/{call}");
    app.post(&path, &json!({"answer": "yes"}))
        .await
        .problem(409);
    let asks = question["id"].as_str().expect("an id");
    let path = format!("/runs/{id}/approvals/{asks}");
    app.post(&path, &json!({"decision": "approve"}))
        .await
        .problem(409);
    assert_eq!(
        answer(&app, &question, json!({"answer": "this"}))
            .await
            .status,
        202
    );
    let path = format!("/runs/{id}/approvals/{call}");
    assert_eq!(
        app.post(&path, &json!({"decision": "approve"}))
            .await
            .status,
        202
    );
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_cancel_ends_the_wait_for_an_answer() {
    let app = curious("").spawn().await;
    app.provider
        .will("curious", [asks(json!({"question": "Which?"}))]);
    let (id, question) = waiting(&app, "curious").await;
    let run = app.find(&id).await.cancel("no more").await;
    assert_eq!(run.wait_for_end().await.status(), "cancelled");
    answer(&app, &question, json!({"answer": "this"}))
        .await
        .problem(409);
    assert_eq!(questions(&app, 0).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_question_that_cannot_be_asked_is_an_error_for_the_model() {
    let app = curious("").spawn().await;
    for (arguments, why) in [
        (json!({"question": " "}), "question is empty"),
        (json!({"question": "x".repeat(5000)}), "do not fit"),
        (
            json!({"question": "ä".repeat(3000)}),
            "more than 4096 bytes",
        ),
        (
            json!({"question": "?", "schema": {"type": "strange"}}),
            "schema cannot be used",
        ),
        (
            json!({"question": "?", "schema": {"type": "string", "description": "x".repeat(9000)}}),
            "more than 8192 bytes",
        ),
        (
            json!({"question": "?", "options": ["x".repeat(300)]}),
            "at most 200 bytes",
        ),
        (json!({"text": "?"}), "do not fit"),
    ] {
        app.provider
            .will("curious", [asks(arguments), says("done")]);
        let run = app.run("curious", "go").await.wait_for_end().await;
        let (text, is_error) = result(&run).await;
        assert!(is_error && text.contains(why), "{text}");
        assert_eq!(count(&run.events().await, "input.requested"), 0);
    }
}

#[tokio::test]
async fn only_keys_that_see_the_run_answer_and_the_answer_names_the_key() {
    let settings = "scopes = [\"run\", \"read\"]";
    let admin = "scopes = [\"admin\"]";
    let app = curious("")
        .config(&(key("ada", settings) + &key("bob", settings) + &key("eve", admin)))
        .spawn()
        .await;
    let by = |name: &str, method: Method, path: &str| app.request(method, path).bearer_auth(name);
    app.provider.will(
        "curious",
        [asks(json!({"question": "Which?"})), says("done")],
    );
    let start = by("ada", Method::POST, "/agents/curious/runs").json(&json!({"input": "go"}));
    let id = send(start).await.json()["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let waited = send(by("ada", Method::GET, &format!("/runs/{id}?wait=180")))
        .await
        .json();
    let question = waited["pending_inputs"][0].clone();
    for (name, many) in [("ada", 1), ("bob", 0), ("eve", 1)] {
        let listed = send(by(name, Method::GET, "/inputs")).await.json();
        assert_eq!(
            listed["data"].as_array().map(Vec::len),
            Some(many),
            "{name}"
        );
    }
    let path = path_of(&question);
    for (name, status) in [("bob", 404), ("ada", 202), ("eve", 409)] {
        let post = by(name, Method::POST, &path).json(&json!({"answer": "this"}));
        let answered = send(post).await;
        assert_eq!(answered.status, status, "{name}: {}", answered.text);
    }
    let waited = send(by("ada", Method::GET, &format!("/runs/{id}?wait=180"))).await;
    assert_eq!(waited.json()["status"], "completed", "{}", waited.text);
    let events = send(by("ada", Method::GET, &format!("/runs/{id}/events")))
        .await
        .text;
    assert!(events.contains("\"by\":\"ada\""), "{events}");
}
