//! Requests through proxies: whose headers are read, and what a client cannot claim.

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::provider::answer::says;

/// The stories' own requests come from loopback, so that is the proxy.
const TRUSTED: &str = "trusted_proxies = [\"127.0.0.0/8\"]";
const LOG: &str = "[telemetry]\nlog = \"axed=debug\"\nlog_format = \"json\"";

fn setup() -> Setup {
    TestApp::setup().agent("solo", "").config(LOG)
}

fn through_proxy(request: RequestBuilder) -> RequestBuilder {
    request
        .header("x-forwarded-for", "6.6.6.6, 192.0.2.7")
        .header("x-forwarded-proto", "https")
        .header("x-forwarded-host", "agents.example")
        .header("x-forwarded-prefix", "/gw")
}

/// The fields of the access log's line about a request with this id.
async fn access_log(app: &TestApp, request_id: &str) -> Value {
    let wanted = format!("\"request.id\":\"{request_id}\"");
    app.daemon.wait_for_log(&wanted).await;
    let log = app.daemon.log();
    let line = log.lines().find(|line| line.contains(&wanted));
    serde_json::from_str(line.expect("a line")).expect("JSON")
}

async fn logged(app: &TestApp, request: RequestBuilder, id: &str) -> Value {
    send(request.header("x-request-id", id)).await;
    access_log(app, id).await
}

fn links(response: &ApiResponse) -> Vec<String> {
    let links = response.json()["links"].clone();
    let links = links.as_object().expect("links").values();
    links
        .map(|link| link.as_str().expect("a path").to_owned())
        .collect()
}

#[tokio::test]
async fn links_and_location_begin_with_the_prefix_that_a_trusted_proxy_removes() {
    let app = setup().server(TRUSTED).prefix("/axed").spawn().await;
    app.provider.will("solo", [says("one"), says("two")]);
    let create = || {
        app.request(Method::POST, "/agents/solo/runs?wait=180")
            .json(&json!({"input": "go"}))
    };
    let run = send(through_proxy(create())).await;
    assert_eq!(run.status, 200, "{}", run.text);
    let id = run.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(run.location(), format!("/gw/axed/runs/{id}"));
    let get = |path: String| send(through_proxy(app.request(Method::GET, &path)));
    for body in [
        run.clone(),
        get(format!("/runs/{id}")).await,
        send(through_proxy(
            app.request(Method::POST, &format!("/runs/{id}/cancel")),
        ))
        .await,
    ] {
        for link in links(&body) {
            assert!(link.starts_with(run.location()), "{link}");
        }
    }
    let page = get("/runs".to_owned()).await.json();
    assert_eq!(page["data"][0]["links"]["self"], run.location());
    let document = get("/openapi.json".to_owned()).await.json();
    assert_eq!(document["servers"][0]["url"], "/gw/axed");

    // The same without a proxy.
    let run = send(create()).await;
    assert!(
        run.location().starts_with("/axed/runs/"),
        "{:?}",
        run.headers
    );
    let document = app.get("/openapi.json").await.json();
    assert_eq!(document["servers"][0]["url"], "/axed");
}

#[tokio::test]
async fn the_access_log_names_the_client_behind_a_trusted_proxy() {
    let app = setup().server(TRUSTED).spawn().await;
    let get = || app.request(Method::GET, "/agents");
    let line = logged(&app, through_proxy(get()), "by-x").await;
    assert_eq!(line["client.address"], "192.0.2.7");
    assert_eq!(line["url.scheme"], "https");
    assert_eq!(line["server.address"], "agents.example");

    let standard = get().header(
        "forwarded",
        "for=6.6.6.6, for=\"[2001:db8::7]:4711\";proto=https;host=agents.example",
    );
    let line = logged(&app, standard, "by-rfc-7239").await;
    assert_eq!(line["client.address"], "2001:db8::7");
    assert_eq!(line["url.scheme"], "https");

    // A client that knows the proxy adds the header that the proxy does not write.
    let contradiction = through_proxy(get()).header("forwarded", "for=6.6.6.6");
    let line = logged(&app, contradiction, "contradiction").await;
    assert_eq!(line["client.address"], "127.0.0.1");
    let malformed = get().header("x-forwarded-for", "6.6.6.6, what?");
    let line = logged(&app, malformed, "malformed").await;
    assert_eq!(line["client.address"], "127.0.0.1");
}

#[tokio::test]
async fn headers_of_a_stranger_are_ignored() {
    for server in ["", "trusted_proxies = [\"10.0.0.0/8\", \"192.0.2.1\"]"] {
        let app = setup().server(server).spawn().await;
        app.provider.will("solo", [says("done")]);
        let forged = through_proxy(app.request(Method::GET, "/agents"));
        let forged = forged.header("forwarded", "for=192.0.2.7;proto=https");
        let line = logged(&app, forged, "forged").await;
        assert_eq!(line["client.address"], "127.0.0.1", "{server}");
        assert!(
            line["url.scheme"].is_null() && line["server.address"].is_null(),
            "{line}"
        );
        let run = through_proxy(app.request(Method::POST, "/agents/solo/runs?wait=180"));
        let run = send(run).await;
        assert!(run.location().starts_with("/runs/"), "{:?}", run.headers);
        assert!(links(&run).iter().all(|link| link.starts_with("/runs/")));
    }
}

#[tokio::test]
async fn a_page_of_the_proxys_host_may_post_if_the_proxy_is_trusted() {
    let trusting = setup().server(TRUSTED).spawn().await;
    let other = setup().spawn().await;
    for (app, expected) in [(&trusting, 202), (&other, 403)] {
        app.provider.will("solo", [says("done")]);
        let page = through_proxy(app.request(Method::POST, "/agents/solo/runs"));
        let page = page.header("origin", "https://agents.example");
        assert_eq!(send(page).await.status, expected);
    }
    // A page that was rebound to this machine can send any header but the host.
    let port = trusting.daemon.url.rsplit(':').next().expect("a port");
    let rebound = through_proxy(trusting.request(Method::GET, "/runs"))
        .header("host", format!("evil.example:{port}"))
        .header("x-forwarded-host", "localhost");
    send(rebound).await.problem(403);
}
