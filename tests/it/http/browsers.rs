//! Web pages: which origins may use the API (CORS), and tickets for a browser's `EventSource`.

use axed::config::key_hash::KeyHash;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::daemon::{AXED, axed_command};
use crate::support::database::Database;
use crate::support::events::{Event, Events};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

const APP: &str = "https://app.example";
const CORS: &str = "cors = { origins = [\"https://APP.example:443/\", \"http://localhost:3000\"] }";

/// A daemon with the keys of ada and bob.
fn setup() -> Setup {
    let key = |name: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"run\", \"read\"]")
    };
    TestApp::setup()
        .agent("solo", "")
        .config(&key("ada"))
        .config(&key("bob"))
}

fn preflight(app: &TestApp, origin: &str) -> RequestBuilder {
    app.request(Method::OPTIONS, "/agents/solo/runs")
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header(
            "access-control-request-headers",
            "authorization,content-type,idempotency-key",
        )
}

fn post(app: &TestApp, origin: &str) -> RequestBuilder {
    app.request(Method::POST, "/agents/solo/runs?wait=180")
        .header("origin", origin)
        .header("sec-fetch-site", "cross-site")
        .json(&json!({"input": "go"}))
}

fn allowed_origin(response: &ApiResponse) -> &str {
    response.header("access-control-allow-origin")
}

#[tokio::test]
async fn a_page_of_a_configured_origin_uses_the_api() {
    let app = setup().server(CORS).spawn().await;
    app.provider.will("solo", [says("one"), says("two")]);
    for origin in [APP, "http://localhost:3000"] {
        // A preflight has no key.
        let allowed = send(preflight(&app, origin)).await;
        assert_eq!((allowed.status, allowed_origin(&allowed)), (200, origin));
        assert_eq!(allowed.header("access-control-allow-methods"), "POST");
        let headers = allowed.header("access-control-allow-headers");
        assert!(headers.contains("authorization"), "{headers}");
        assert!(
            allowed
                .header("access-control-allow-credentials")
                .is_empty()
        );

        let run = send(post(&app, origin).bearer_auth("ada")).await;
        assert_eq!(
            (run.status, allowed_origin(&run)),
            (200, origin),
            "{}",
            run.text
        );
        let exposed = run.header("access-control-expose-headers");
        for name in [
            "location",
            "retry-after",
            "x-request-id",
            "idempotency-replayed",
            "etag",
            "x-run-id",
            "x-should-retry",
            "mcp-session-id",
        ] {
            assert!(exposed.contains(name), "{name} is not in {exposed}");
        }
        let mut vary = run.headers.get_all("vary").iter();
        let is_by_origin = vary.any(|value| value.to_str().is_ok_and(|it| it.contains("origin")));
        assert!(is_by_origin, "{:?}", run.headers);
        let refused = send(post(&app, origin)).await;
        refused.problem(401);
        assert_eq!(allowed_origin(&refused), origin);
    }
}

#[tokio::test]
async fn pages_of_other_origins_are_refused_with_and_without_cors() {
    let configured = setup().server(CORS).spawn().await;
    let plain = setup().spawn().await;
    for (app, preflight_status) in [(&configured, 200), (&plain, 405)] {
        for origin in [
            "https://evil.example",
            "http://app.example",
            "https://app.example.evil",
            "null",
        ] {
            let refused = send(preflight(app, origin)).await;
            assert_eq!(
                (refused.status, allowed_origin(&refused)),
                (preflight_status, "")
            );
            let refused = send(post(app, origin).bearer_auth("ada")).await;
            refused.problem(403);
            assert_eq!(refused.json()["code"], "cross_site");
            let read = app.request(Method::GET, "/agents").header("origin", origin);
            let read = send(read.bearer_auth("ada")).await;
            assert_eq!((read.status, allowed_origin(&read)), (200, ""));
        }
    }
    let same_host = plain.get("/livez").await;
    assert!(
        same_host.header("vary").is_empty(),
        "{:?}",
        same_host.headers
    );
}

#[tokio::test]
async fn every_origin_needs_keys_and_no_credentials() {
    let any = setup().server("cors = { origins = [\"*\"] }").spawn().await;
    any.provider.will("solo", [says("done")]);
    let run = send(post(&any, "https://any.example").bearer_auth("ada")).await;
    assert_eq!((run.status, allowed_origin(&run)), (200, "*"));

    let named = format!("cors = {{ origins = [\"{APP}\"], credentials = true }}");
    let named = setup().server(&named).spawn().await;
    let allowed = send(preflight(&named, APP)).await;
    assert_eq!(allowed.header("access-control-allow-credentials"), "true");

    let home = tempfile::tempdir().expect("a directory");
    std::fs::write(
        home.path().join("axed.toml"),
        "[server.cors]\norigins = [\"*\"]",
    )
    .expect("a file");
    let mut command = axed_command(
        home.path(),
        &["serve", "--config", "axed.toml", "--listen", "127.0.0.1:0"],
    );
    let ended = within_timeout("the refusal", command.output())
        .await
        .expect(AXED);
    let error = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{error}");
    assert!(
        error.contains("server.cors.origins") && error.contains("no keys"),
        "{error}"
    );
}

/// A run of ada's that waits at the gate.
async fn held_run(app: &TestApp, gate: &Gate) -> String {
    app.provider
        .will("solo", [says("one two three").pausing_at(gate)]);
    let run = app
        .request(Method::POST, "/agents/solo/runs")
        .json(&json!({"input": "go"}));
    let run = send(run.bearer_auth("ada")).await;
    assert_eq!(run.status, 202, "{}", run.text);
    run.json()["id"].as_str().expect("an id").to_owned()
}

async fn issue(app: &TestApp, run: &str, key: &str) -> ApiResponse {
    let path = format!("/runs/{run}/events/ticket");
    send(app.request(Method::POST, &path).bearer_auth(key)).await
}

/// What an `EventSource` sends.
fn event_source(app: &TestApp, run: &str, query: &str) -> RequestBuilder {
    app.request(Method::GET, &format!("/runs/{run}/events?{query}"))
        .header("accept", "text/event-stream")
}

async fn assert_refused(request: RequestBuilder, ticket: &str) {
    let refused = send(request).await;
    refused.problem(401);
    assert_eq!(refused.json()["code"], "invalid_ticket");
    assert!(!refused.text.contains(ticket), "{}", refused.text);
}

#[tokio::test]
async fn a_ticket_opens_the_events_of_its_run_and_nothing_else() {
    let mut app = setup().config("[telemetry]\nlog = \"trace\"").spawn().await;
    let gate = Gate::closed();
    let run = held_run(&app, &gate).await;
    let issued = issue(&app, &run, "ada").await;
    assert_eq!(issued.status, 201, "{}", issued.text);
    assert_eq!(issued.header("cache-control"), "no-store");
    let ticket = issued.json()["ticket"]
        .as_str()
        .expect("a ticket")
        .to_owned();
    let expires: jiff::Timestamp =
        serde_json::from_value(issued.json()["expires_at"].clone()).expect("a time");
    assert!(expires > jiff::Timestamp::now());
    let query = format!("scope=self&ticket={ticket}&after=0");

    let opened = within_timeout("a head", event_source(&app, &run, &query).send()).await;
    let mut events = Events::new(opened.expect("a head"));
    events.until("turn.started").await;
    gate.open();
    let rest: Vec<Event> = events.rest().await;
    assert_eq!(rest.last().map(Event::kind), Some("run.completed"));
    let page = app.request(Method::GET, &format!("/runs/{run}/events?ticket={ticket}"));
    let page = send(page).await;
    assert_eq!(page.status, 200);
    assert_eq!(page.header("cache-control"), "no-store");

    let other = held_run(&app, &Gate::closed()).await;
    assert_refused(event_source(&app, &other, &query), &ticket).await;
    assert_refused(
        event_source(&app, &run, &format!("ticket={ticket}x")),
        &ticket,
    )
    .await;
    assert_refused(event_source(&app, &run, "ticket="), &ticket).await;
    let twice = format!("ticket={ticket}&%74icket={ticket}");
    send(event_source(&app, &run, &twice)).await.problem(400);
    for (path, status) in [("", 401), ("/messages", 401), ("/tree", 401)] {
        let path = format!("/runs/{run}{path}?ticket={ticket}");
        send(app.request(Method::GET, &path)).await.problem(status);
    }
    issue(&app, &run, "bob").await.problem(404);
    // A key in the header counts, not the ticket.
    send(event_source(&app, &run, &query).bearer_auth("bob"))
        .await
        .problem(404);

    app.daemon.wait_for_log("/events answered 200").await;
    let log = app.daemon.log();
    assert!(!log.contains(&ticket), "{log}");
    app.crash_and_restart().await;
    match app.database() {
        Database::Sqlite(_) => {
            assert_refused(event_source(&app, &run, &query), &ticket).await;
        }
        Database::Postgres(_) => {
            let opened = send(event_source(&app, &run, &query)).await;
            assert_eq!(opened.status, 200, "{}", opened.text);
        }
    }
    assert!(
        !app.daemon.log().contains(&ticket),
        "the log has the ticket"
    );
}

#[tokio::test]
async fn without_keys_a_ticket_is_issued_and_checked_too() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);
    let run = app.run("solo", "go").await;
    let issued = app
        .post(&format!("/runs/{}/events/ticket", run.id()), &Value::Null)
        .await;
    assert_eq!(issued.status, 201, "{}", issued.text);
    let query = format!(
        "ticket={}",
        issued.json()["ticket"].as_str().expect("a ticket")
    );
    assert_eq!(send(event_source(&app, run.id(), &query)).await.status, 200);
    assert_refused(event_source(&app, run.id(), "ticket=wrong"), "wrong-ticket").await;
    let cut = &query[..query.len() - 1];
    assert_refused(event_source(&app, run.id(), cut), cut).await;
    let none = app
        .post(
            "/runs/run_00000000-0000-7000-8000-000000000000/events/ticket",
            &Value::Null,
        )
        .await;
    none.problem(404);
}
