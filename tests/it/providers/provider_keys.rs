//! `X-Provider-Key`: a client's own keys serve the tree of one request, if its agents allow it, and are stored nowhere.

use std::fs;
use std::path::Path;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::database::Database;
use crate::support::events::count;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::postgres;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::support::provider::recorded_request::Wire;
use crate::support::run::Run;

const OWN: &str = "sk-of-a-person-4711";
const OTHER: &str = "sk-of-somebody-else";
const ALLOWED: &str = "allow_provider_keys = true";

/// A daemon with a provider without a key.
fn setup() -> Setup {
    TestApp::setup()
        .config("[providers.bare]\nkind = \"anthropic\"\nbase_url = \"{provider}\"")
        .agent("own", &format!("model = \"bare/own\"\n{ALLOWED}"))
        .agent("closed", "")
}

async fn post(app: &TestApp, agent: &str, keys: &[&str], body: Value) -> ApiResponse {
    post_to(app, &format!("/agents/{agent}/runs"), keys, body).await
}

async fn post_to(app: &TestApp, path: &str, keys: &[&str], body: Value) -> ApiResponse {
    let request = app.request(Method::POST, path).json(&body);
    let with_key = |request: reqwest::RequestBuilder, key: &&str| {
        request.header("X-Provider-Key", (*key).to_owned())
    };
    send(keys.iter().fold(request, with_key)).await
}

async fn start<'a>(app: &'a TestApp, agent: &str, keys: &[&str]) -> Run<'a> {
    let got = post(app, agent, keys, json!({"input": "go"})).await;
    assert_eq!(got.status, 202, "{}", got.text);
    Run::new(app, got.json())
}

fn bare(key: &str) -> String {
    format!("bare={key}")
}

/// Checks that no key is in the log, in the daemon's files or in the responses about the run.
async fn is_nowhere(app: &TestApp, run: &Run<'_>, keys: &[&str]) {
    let run = run.reload().await;
    let events = run.events().await;
    let seen = format!(
        "{run:?} {events:?} {} {}",
        run.messages().await,
        run.tree().await
    );
    let mut places = vec![seen.into_bytes(), app.daemon.log().into_bytes()];
    match app.database() {
        Database::Sqlite(_) => files(&app.path("data"), &mut places),
        Database::Postgres(url) => places.extend(postgres::contents(&url)),
    }
    assert!(places.len() > 3, "nothing of the store was found");
    for key in keys {
        let holds = |place: &Vec<u8>| place.windows(key.len()).any(|at| at == key.as_bytes());
        assert!(!places.iter().any(holds), "{key} was kept");
    }
}

fn files(directory: &Path, contents: &mut Vec<Vec<u8>>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files(&path, contents),
            false => contents.push(fs::read(&path).expect("a file")),
        }
    }
}

#[tokio::test]
async fn a_requests_key_replaces_the_operators_on_every_wire() {
    let setup = Wire::ALL.iter().fold(setup(), |setup, wire| {
        let name = wire.name();
        setup.agent(name, &format!("model = \"{name}/{name}\"\n{ALLOWED}"))
    });
    let app = setup.spawn().await;
    for wire in Wire::ALL {
        let name = wire.name();
        app.provider.always(name, |_| says("done"));
        let run = start(&app, name, &[&format!("{name}={OWN}")]).await;
        assert_eq!(run.wait_for_end().await.output(), "done");
        let seen = app.provider.wait_for_request(name, 1).await;
        assert_eq!(seen.api_key(), Some(OWN));
        assert!(
            !format!("{:?}", seen.headers).contains("key-of-"),
            "{seen:?}"
        );
        // A request without the header has the operator's again.
        app.run(name, "go").await;
        let again = app.provider.wait_for_request(name, 2).await;
        let operators = format!("key-of-{name}");
        let wanted = (wire != Wire::Ollama).then_some(operators.as_str());
        assert_eq!(again.api_key(), wanted);
        is_nowhere(&app, &run, &[OWN]).await;
    }
}

#[tokio::test]
async fn a_provider_without_a_key_serves_requests_that_bring_one() {
    let app = setup().spawn().await;
    app.provider.always("own", |_| says("done"));
    let refused = post(&app, "own", &[], json!({})).await;
    assert!(refused.problem(422).contains("BARE_API_KEY"));
    // A key for another provider does not help.
    let refused = post(&app, "own", &[&format!("openai={OWN}")], json!({})).await;
    assert!(refused.problem(422).contains("BARE_API_KEY"));
    let run = start(&app, "own", &[&bare(OWN), &format!("openai={OTHER}")]).await;
    assert_eq!(run.wait_for_end().await.output(), "done");
    assert_eq!(
        app.provider.wait_for_request("own", 1).await.api_key(),
        Some(OWN)
    );
    is_nowhere(&app, &run, &[OWN, OTHER]).await;
    let shown = app.get("/agents/own").await.json();
    assert_eq!(shown["allow_provider_keys"], true);
}

#[tokio::test]
async fn header_errors_do_not_quote_the_key() {
    let app = setup().spawn().await;
    let not_allowed = post(&app, "closed", &[&bare(OWN)], json!({})).await;
    let twice = [bare(OWN), bare(OWN)];
    let cases = [
        (not_allowed, 422, "allow_provider_keys"),
        (
            post(&app, "own", &["sk-of-a-person-4711"], json!({})).await,
            400,
            "<provider>=<key>",
        ),
        (
            post(&app, "own", &["bare="], json!({})).await,
            400,
            "<provider>=<key>",
        ),
        (
            post(&app, "own", &[&twice[0], &twice[1]], json!({})).await,
            400,
            "two keys",
        ),
        (
            post(&app, "own", &["sk-of-a-person-4711=bare"], json!({})).await,
            422,
            "openai",
        ),
    ];
    for (got, status, term) in cases {
        let why = got.problem(status);
        assert!(
            why.contains("X-Provider-Key") && why.contains(term),
            "{why}"
        );
        assert!(!got.text.contains(OWN), "{}", got.text);
    }
    assert!(!app.daemon.log().contains(OWN));
    let dry = post_to(&app, "/agents/own/dry-run", &[&bare(OWN)], json!({})).await;
    assert_eq!(dry.status, 200, "{}", dry.text);
    assert!(!dry.text.contains(OWN), "{}", dry.text);
    assert!(app.provider.requests().is_empty());
}

#[tokio::test]
async fn a_key_is_refused_where_it_is_not_used() {
    let schedule = "[[schedules]]\nname = \"nightly\"\ncron = \"0 3 * * *\"\ninput = \"go\"";
    let app = setup()
        .agent("timed", schedule)
        .agent("free", "")
        .spawn()
        .await;
    app.provider.always("free", |_| says("done"));
    let source = app.run("free", "go").await.id().to_owned();
    for path in [
        "/agents/own/runs:batch",
        "/schedules/timed/nightly/trigger",
        "/agents/closed/dry-run",
        &format!("/runs/{source}/fork"),
    ] {
        let refused = post_to(&app, path, &[&bare(OWN)], json!({})).await;
        assert!(refused.problem(422).contains("X-Provider-Key"), "{path}");
        assert_eq!(refused.json()["code"], "provider_key_refused", "{path}");
        assert!(!refused.text.contains(OWN), "{path}");
    }
    assert_eq!(app.provider.requests().len(), 1);
}

#[tokio::test]
async fn an_error_that_repeats_the_key_is_redacted() {
    let app = setup().spawn().await;
    app.provider
        .always("own", |_| fails(401, format!("no such key: {OWN}")));
    let run = start(&app, "own", &[&bare(OWN)]).await.wait_for_end().await;
    let (code, message) = run.failure();
    assert_eq!(code, "provider_auth");
    assert!(message.contains("no such key: [redacted]"), "{message}");
    is_nowhere(&app, &run, &[OWN]).await;
}

#[tokio::test]
async fn children_use_the_key_if_their_files_allow_it() {
    let app = setup()
        .agent("planner", &format!("model = \"anthropic/planner\"\nsub_agents = [\"open\", \"shut\"]\nfallback_models = [\"bare/fallback\"]\n{ALLOWED}\n[subagent]\nenabled = true\nmodel = \"bare/unnamed\"\n[retry]\nmax_retries = 0"))
        .agent("open", &format!("model = \"bare/open\"\n{ALLOWED}"))
        .agent("shut", "")
        .spawn()
        .await;
    app.provider.always("planner", |_| fails(529, "busy"));
    app.provider.always("fallback", |seen| match seen.turn() {
        1 => delegates([("open", "x"), ("shut", "y")]),
        2 => calls([("subagent", json!({"label": "l", "task_prompt": "z"}))]),
        _ => says("planned"),
    });
    for model in ["open", "shut", "unnamed"] {
        app.provider.always(model, |_| says("done"));
    }
    let keys = [format!("bare={OWN}"), format!("anthropic={OTHER}")];
    let run = start(&app, "planner", &[&keys[0], &keys[1]]).await;
    let run = run.wait_for_end().await;
    assert_eq!(run.output(), "planned");
    let key = |model: &str| {
        app.provider.requests_for(model)[0]
            .api_key()
            .map(str::to_owned)
    };
    assert_eq!(key("planner").as_deref(), Some(OTHER));
    assert_eq!(key("fallback").as_deref(), Some(OWN));
    assert_eq!(key("open").as_deref(), Some(OWN));
    assert_eq!(key("unnamed").as_deref(), Some(OWN));
    assert_eq!(key("shut").as_deref(), Some("key-of-anthropic"));
    is_nowhere(&app, &run, &[OWN, OTHER]).await;
}

#[tokio::test]
async fn keys_of_concurrent_runs_do_not_mix() {
    let app = setup().spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("own", move |seen| {
        says(seen.api_key().unwrap_or_default()).after_gate(&door)
    });
    let mut runs = Vec::new();
    for number in 0..12 {
        let key = format!("sk-number-{number}-of-many");
        runs.push((start(&app, "own", &[&bare(&key)]).await, key));
    }
    app.provider.wait_for_concurrency("own", runs.len()).await;
    gate.open();
    for (run, key) in runs {
        assert_eq!(run.wait_for_end().await.output(), key);
    }
}

/// A provider that is sent one request at a time.
fn one_slot() -> Setup {
    TestApp::setup()
        .config(
            "[providers.bare]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\nmax_concurrent = 1",
        )
        .agent("own", &format!("model = \"bare/own\"\n{ALLOWED}"))
}

#[tokio::test]
async fn all_keys_share_a_providers_request_slots() {
    let app = one_slot().spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .always("own", move |_| says("done").after_gate(&door));
    let first = start(&app, "own", &[&bare(OWN)]).await;
    let second = start(&app, "own", &[&bare(OTHER)]).await;
    app.provider.wait_for_concurrency("own", 1).await;
    gate.open();
    for run in [first, second] {
        assert_eq!(run.wait_for_end().await.output(), "done");
    }
    assert_eq!(app.provider.max_concurrency("own"), 1);
}

#[tokio::test]
async fn a_request_that_was_never_sent_costs_nothing() {
    let app = one_slot().spawn().await;
    app.provider.always("own", |_| hangs());
    let first = start(&app, "own", &[&bare(OWN)]).await;
    app.provider.wait_for_concurrency("own", 1).await;
    let second = start(&app, "own", &[&bare(OTHER)]).await;
    eventually("its turn", async || {
        (count(&second.events().await, "turn.started") == 1).then_some(())
    })
    .await;
    let second = second.cancel("no more").await;
    assert_eq!(second["tree"]["complete"], true, "{second:?}");
    let first = first.cancel("no more").await;
    assert_eq!(first["tree"]["complete"], false, "{first:?}");
}

#[tokio::test]
async fn a_queued_run_keeps_its_key_also_in_its_sessions_queue() {
    let app = setup().config("[runs]\nmax_running = 1").spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider.always("own", move |seen| {
        says(seen.api_key().unwrap_or_default()).after_gate(&door)
    });
    let mut runs = Vec::new();
    for (key, session) in [
        (OWN, Some("talk")),
        (OTHER, Some("talk")),
        ("sk-third-in-line", None),
    ] {
        let got = post(&app, "own", &[&bare(key)], json!({"session": session})).await;
        assert_eq!(got.status, 202, "{}", got.text);
        runs.push((Run::new(&app, got.json()), key));
    }
    assert_eq!(runs[1].0.reload().await.status(), "queued");
    gate.open();
    for (run, key) in &runs {
        assert_eq!(run.wait_for_end().await.output(), *key);
    }
}

#[tokio::test]
async fn an_idempotent_request_ignores_the_provider_key() {
    let app = setup().spawn().await;
    app.provider.always("own", |_| says("done"));
    let again = |key: &'static str| {
        app.request(Method::POST, "/agents/own/runs?wait=180")
            .header("Idempotency-Key", "once")
            .header("X-Provider-Key", bare(key))
            .json(&json!({"input": "go"}))
    };
    let first = send(again(OWN)).await;
    let second = send(again(OTHER)).await;
    assert_eq!((first.status, second.status), (200, 200), "{}", second.text);
    assert_eq!(first.json()["id"], second.json()["id"]);
    assert_eq!(second.header("idempotency-replayed"), "true");
    assert_eq!(app.provider.requests_for("own").len(), 1);
}

#[tokio::test]
async fn a_run_that_needs_the_key_fails_after_a_restart() {
    let mut app = setup()
        .agent(
            "mixed",
            &format!("sub_agents = [\"closed\"]\napprove = [\"call_agent\"]\n{ALLOWED}"),
        )
        .spawn()
        .await;
    app.provider.will("own", [hangs()]);
    app.provider.will("mixed", [delegates([("closed", "x")])]);
    app.provider.always("mixed", |_| says("done"));
    app.provider.always("closed", |_| says("done"));
    let own = start(&app, "own", &[&bare(OWN)]).await.id().to_owned();
    let needs = start(&app, "mixed", &[&format!("anthropic={OTHER}")]).await;
    let needs = needs.id().to_owned();
    app.provider.wait_for_concurrency("own", 1).await;
    app.get_until(&format!("/runs/{needs}"), |got| {
        got.json()["status"] == "waiting"
    })
    .await;

    app.crash_and_restart().await;

    let run = app.find(&own).await.wait_for_end().await;
    let (code, message) = run.failure();
    assert_eq!(code, "provider_auth");
    assert!(
        message.contains("\"bare\"") && message.contains("restart"),
        "{message}"
    );
    assert_eq!(app.provider.requests_for("own").len(), 1);
    is_nowhere(&app, &run, &[OWN, OTHER]).await;

    // The child never had the person's key, and ends as usual; its caller needs it again.
    let waiting = app.find(&needs).await;
    let events = waiting.events().await;
    let requested = events.iter().find(|it| it.kind() == "approval.requested");
    let call = requested
        .and_then(|it| it["tool_call_id"].as_str())
        .expect("a call");
    let path = format!("/runs/{needs}/approvals/{call}");
    let decided = app.post(&path, &json!({"decision": "approve"})).await;
    assert_eq!(decided.status, 202, "{}", decided.text);
    let run = waiting.wait_for_end().await;
    assert_eq!(run.failure().0, "provider_auth");
    assert_eq!(run.children().await[0].output(), "done");
    assert_eq!(
        app.provider.requests_for("closed")[0].api_key(),
        Some("key-of-anthropic")
    );
    let sent = app.provider.requests_for("mixed");
    assert!(
        sent.iter().all(|seen| seen.api_key() == Some(OTHER)),
        "the operator's key was used"
    );
}

#[tokio::test]
async fn a_run_that_does_not_need_the_key_resumes_after_a_restart() {
    let mut app = TestApp::setup().agent("solo", ALLOWED).spawn().await;
    app.provider.will("solo", [hangs(), says("done")]);
    let id = start(&app, "solo", &[&format!("openai={OWN}")])
        .await
        .id()
        .to_owned();
    app.provider.wait_for_concurrency("solo", 1).await;
    app.crash_and_restart().await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    let keys: Vec<_> = app
        .provider
        .requests_for("solo")
        .iter()
        .map(|seen| seen.api_key().map(str::to_owned))
        .collect();
    assert_eq!(keys, vec![Some("key-of-anthropic".to_owned()); 2]);
}

#[tokio::test]
async fn a_suspended_tree_keeps_the_key() {
    let app = setup().spawn().await;
    let gate = Gate::closed();
    let door = gate.clone();
    app.provider
        .will("own", [calls([("nothing", json!({}))]).after_gate(&door)]);
    app.provider.always("own", |_| says("done"));
    let run = start(&app, "own", &[&bare(OWN)]).await;
    app.provider.wait_for_concurrency("own", 1).await;
    let db = app.database();
    db.refuse_entries("1 = 1");
    gate.open();
    app.daemon
        .wait_for_log("is suspended until the store works")
        .await;
    db.accept_entries();
    assert_eq!(run.wait_for_end().await.output(), "done");
    let seen = app.provider.requests_for("own");
    assert!(
        seen.len() > 1 && seen.iter().all(|seen| seen.api_key() == Some(OWN)),
        "{seen:?}"
    );
    is_nowhere(&app, &run, &[OWN]).await;
}

#[tokio::test]
async fn a_batch_uses_the_key_and_fails_without_it() {
    let mut app = TestApp::setup()
        .config(
            "[providers.bare]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\nservices = [\"batch\"]\nbatch_poll = 0.02",
        )
        .agent("own", &format!("model = \"bare/own\"\nservice = \"batch\"\n{ALLOWED}"))
        .spawn()
        .await;
    app.provider
        .always("own", |_| says("never").after_gate(&Gate::closed()));
    let id = start(&app, "own", &[&bare(OWN)]).await.id().to_owned();
    let path = format!("/runs/{id}");
    app.get_until(&path, |got| got.json()["status"] == "waiting")
        .await;
    assert_eq!(
        app.provider.wait_for_request("own", 1).await.api_key(),
        Some(OWN)
    );
    app.crash_and_restart().await;
    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.failure().0, "provider_auth");
    assert_eq!(
        run["tree"]["complete"], false,
        "nobody knows what the batch cost"
    );
    assert_eq!(app.provider.requests_for("own").len(), 1);
    is_nowhere(&app, &run, &[OWN]).await;
}
