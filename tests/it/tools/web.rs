//! `url_fetch` and `web_search` from outside, against a web of our own on this machine.

use std::convert::Infallible;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axed::config::key_hash::KeyHash;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use flate2::write::GzEncoder;
use futures_util::stream;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp, send};
use crate::support::attachments::PNG;
use crate::support::hanging_server::HangingServer;
use crate::support::http_server::serve;
use crate::support::provider::answer::{calls, hangs, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::tools::call_results::call_results;

const PAGE: &str = "<html><head><title>Home</title><script>no()</script></head><body><h1>Hello</h1>\
                    <p>See <a href='/more'>more</a>.</p></body></html>";

type Seen = Arc<Mutex<Vec<(Uri, HeaderMap)>>>;

/// A web server with a page for each hazard. Goes away with the story.
pub struct Web {
    address: SocketAddr,
    seen: Seen,
    _server: JoinSet<()>,
}

impl Web {
    /// On a free port.
    pub async fn start() -> Self {
        let seen = Seen::default();
        let routes = Router::new().fallback(answer).with_state(Arc::clone(&seen));
        let (address, server) = serve(routes).await;
        Self {
            address,
            seen,
            _server: server,
        }
    }

    /// The address of a page.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The request's path and headers.
    pub fn seen(&self) -> Vec<(Uri, HeaderMap)> {
        self.seen.lock().expect("a lock").clone()
    }
}

async fn answer(State(seen): State<Seen>, uri: Uri, headers: HeaderMap) -> Response {
    seen.lock().expect("a lock").push((uri.clone(), headers));
    let typed = |kind: &'static str, body: Body| ([("content-type", kind)], body).into_response();
    let moved = |to: &str| (StatusCode::FOUND, [("location", to)]).into_response();
    match uri.path() {
        "/page" => typed("text/html; charset=utf-8", PAGE.into()),
        "/latin" => typed("text/plain; charset=iso-8859-1", Bytes::from_static(b"caf\xe9").into()),
        "/json" => typed("application/json", "{\"a\":  1}".into()),
        "/image" => typed("image/png", vec![0u8; 1234].into()),
        "/picture" => typed("image/png", PNG.into()),
        "/nul" => typed("text/plain", vec![0u8; 10].into()),
        "/missing" => (StatusCode::NOT_FOUND, [("content-type", "text/html")], "<p>No such <b>page</b>").into_response(),
        "/picture-of-an-error" => (StatusCode::BAD_GATEWAY, [("content-type", "image/png")], "x").into_response(),
        "/moved" => moved("/page"),
        "/round" => moved("/round"),
        "/to" => moved(uri.query().expect("a target")),
        "/endless" => {
            let chunk = || async { Some((Ok::<_, Infallible>(Bytes::from(vec![b'x'; 1 << 16])), ())) };
            typed("text/plain", Body::from_stream(stream::unfold((), move |()| chunk())))
        }
        "/drip" => {
            let drops = stream::unfold((), |()| async {
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                Some((Ok::<_, Infallible>(Bytes::from_static(b"x")), ()))
            });
            typed("text/plain", Body::from_stream(drops))
        }
        "/bomb" | "/packed" => {
            let plain = match uri.path() {
                "/bomb" => vec![b'x'; 64 << 20],
                _ => b"packed text".to_vec(),
            };
            let mut packer = GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packer.write_all(&plain).expect("pack");
            let body = packer.finish().expect("packed");
            ([("content-type", "text/plain"), ("content-encoding", "gzip")], body).into_response()
        }
        "/head" => ([("x-huge", "y".repeat(1 << 20))], "body").into_response(),
        "/deep" => typed("text/html", "<div><ul><li><b>".repeat(200_000).into()),
        "/search" => {
            let result = |at: usize| {
                json!({"title": format!("Title {at}"), "url": format!("https://example.com/{at}"), "content": "Some\n words."})
            };
            let results: Vec<Value> = (1..=30).map(result).collect();
            axum::Json(json!({"query": "q", "results": results})).into_response()
        }
        "/brave" => axum::Json(json!({"type": "search", "web": {"results": [
            {"title": "A &amp; B", "url": "https://example.com/b", "description": "the <strong>term</strong>"}
        ]}}))
        .into_response(),
        "/none" => axum::Json(json!({"results": []})).into_response(),
        "/odd" => axum::Json(json!({"results": "hush-value"})).into_response(),
        "/broken" => (StatusCode::UNAUTHORIZED, "your key hush-key is wrong").into_response(),
        _ => StatusCode::NO_CONTENT.into_response(),
    }
}

/// An agent that may fetch, on a daemon that lets it reach this machine by its address.
fn worker(agent: &str) -> Setup {
    TestApp::setup()
        .agent(
            "worker",
            &format!("tools = [\"url_fetch\", \"web_search\"]\n{agent}"),
        )
        .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
}

fn fetch(url: &str) -> (&'static str, Value) {
    ("url_fetch", json!({"url": url}))
}

/// The results that the model gets of these fetches.
async fn fetched(app: &TestApp, urls: &[String]) -> Vec<String> {
    let sent: Vec<_> = urls.iter().map(|url| fetch(url)).collect();
    call_results(app, &sent).await
}

#[tokio::test]
async fn a_model_reads_the_web() {
    let web = Web::start().await;
    let app = worker("").spawn().await;
    let paths = ["/page", "/latin", "/json", "/packed", "/moved", "/empty"];
    let reported = fetched(&app, &paths.map(|path| web.url(path))).await;
    let page = format!("Home\n\n# Hello\n\nSee [more]({}).", web.url("/more"));
    assert_eq!(
        reported,
        [
            page.clone(),
            "café".to_owned(),
            "{\"a\":  1}".to_owned(),
            "packed text".to_owned(),
            format!("(redirected to {})\n\n{page}", web.url("/page")),
            "(the page holds no text)".to_owned(),
        ]
    );
    for (_, headers) in web.seen() {
        for name in ["cookie", "authorization", "referer"] {
            assert!(!headers.contains_key(name), "{headers:?}");
        }
    }
}

#[tokio::test]
async fn binary_and_unsuccessful_responses_are_errors() {
    let web = Web::start().await;
    let app = worker("").spawn().await;
    let paths = ["/image", "/nul", "/missing", "/picture-of-an-error"];
    let reported = fetched(&app, &paths.map(|path| web.url(path))).await;
    assert_eq!(
        reported,
        [
            format!(
                "error: {} is image/png (1234 bytes), and only text is read",
                web.url("/image")
            ),
            format!(
                "error: {} is not text, although its type says so (10 bytes)",
                web.url("/nul")
            ),
            format!(
                "error: {} answered 404 Not Found:\n\nNo such **page**",
                web.url("/missing")
            ),
            format!(
                "error: {} answered 502 Bad Gateway",
                web.url("/picture-of-an-error")
            ),
        ]
    );
    let wrong = [
        "ftp://example.com/".to_owned(),
        "file:///etc/passwd".to_owned(),
        "example.com".to_owned(),
        format!("http://me:hush@{}/page", web.address),
        "http://127.0.0.1:1/".to_owned(),
    ];
    for (url, reported) in wrong.iter().zip(fetched(&app, &wrong).await) {
        assert!(reported.starts_with("error: "), "{url}: {reported}");
        assert!(
            !reported.contains("hush") && !reported.contains("root:"),
            "{url}: {reported}"
        );
    }
    assert_eq!(web.seen().len(), 4);
}

#[tokio::test]
async fn no_spelling_reaches_this_machine() {
    let web = Web::start().await;
    let app = TestApp::setup()
        .agent("worker", "tools = [\"url_fetch\"]\nallowed_hosts = [\"localhost\", \"127.0.0.1\", \"::1\", \"*.localhost\", \"::ffff:127.0.0.1\", \"0.0.0.0\", \"169.254.169.254\"]")
        .spawn()
        .await;
    let port = web.address.port();
    let urls = [
        "localhost",
        "LOCALHOST",
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "169.254.169.254",
    ]
    .map(|host| format!("http://{host}:{port}/page"));
    for (url, reported) in urls.iter().zip(fetched(&app, &urls).await) {
        assert!(reported.starts_with("error: "), "{url}: {reported}");
        assert!(
            reported.contains("[tools.url_fetch] allow_hosts"),
            "{url}: {reported}"
        );
    }
    assert!(web.seen().is_empty());
}

#[tokio::test]
async fn redirects_are_checked_like_addresses() {
    let web = Web::start().await;
    let app = worker("").spawn().await;
    let port = web.address.port();
    let targets = [
        format!("http://localhost:{port}/page"),
        format!("http://[::ffff:127.0.0.1]:{port}/page"),
        "http://169.254.169.254/latest/meta-data/".to_owned(),
        "http://10.0.0.1/".to_owned(),
        "http://10.0.0.1/?key=hush".to_owned(),
        "https://me:hush@example.com/".to_owned(),
        "file:///etc/passwd".to_owned(),
        "http://".to_owned(),
    ];
    let urls = targets.map(|to| web.url(&format!("/to?{to}")));
    for (url, reported) in urls.iter().zip(fetched(&app, &urls).await) {
        assert!(reported.starts_with("error: "), "{url}: {reported}");
        assert!(
            !reported.contains("hush") && !reported.contains("Hello"),
            "{url}: {reported}"
        );
    }
    assert!(web.seen().iter().all(|(uri, _)| uri.path() == "/to"));

    let reported = fetched(&app, &[web.url("/round")]).await;
    assert_eq!(reported, ["error: It redirects more than 5 times"]);
    let rounds = web
        .seen()
        .into_iter()
        .filter(|(uri, _)| uri.path() == "/round");
    assert_eq!(rounds.count(), 6);
}

#[tokio::test]
async fn an_endless_body_is_cut_off() {
    let web = Web::start().await;
    let app = TestApp::setup()
        .agent("worker", "tools = [\"url_fetch\"]")
        .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
        .config("[tools]\nmax_result = \"16 KiB\"")
        .spawn()
        .await;
    let paths = ["/endless", "/bomb", "/deep", "/head"];
    let reported = fetched(&app, &paths.map(|path| web.url(path))).await;
    for text in &reported[..2] {
        assert!(
            text.starts_with("xxx") && text.len() < 16 << 10,
            "{}",
            text.len()
        );
        assert!(
            text.contains("url_fetch cannot get the rest"),
            "{}",
            &text[text.len() - 200..]
        );
    }
    assert!(
        !reported[2].starts_with("error: ") && reported[2].len() < 16 << 10,
        "{}",
        reported[2]
    );
    assert!(
        reported[3].starts_with("error: No answer from 127.0.0.1"),
        "{}",
        reported[3]
    );

    // Only for the drip: on a busy machine a second is too short for a whole response.
    let app = TestApp::setup()
        .agent("worker", "tools = [\"url_fetch\"]")
        .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]\ntimeout = 1")
        .spawn()
        .await;
    let reported = fetched(&app, &[web.url("/drip")]).await;
    assert_eq!(
        reported,
        ["error: No complete response arrived within 1 seconds"]
    );
}

#[tokio::test]
async fn an_agent_and_its_children_reach_only_allowed_hosts() {
    let web = Web::start().await;
    let mut app = worker("allowed_hosts = [\"example.com\"]\nsub_agents = [\"heir\", \"own\"]\n[subagent]\nenabled = true")
        .agent("heir", "tools = [\"url_fetch\"]\nsub_agents = [\"grandheir\"]")
        .agent("grandheir", "tools = [\"url_fetch\"]")
        .agent("own", "tools = [\"url_fetch\"]\nallowed_hosts = [\"127.0.0.1\"]")
        .spawn()
        .await;
    let refusal = "127.0.0.1 is not one of the hosts that this agent may reach: example.com";
    let url = web.url("/page");
    assert_eq!(
        fetched(&app, std::slice::from_ref(&url)).await,
        [format!("error: {refusal}")]
    );

    // By itself the heir asks what it likes.
    app.provider
        .will("heir", [calls([fetch(&url)]), says("read")]);
    app.run("heir", "go").await;
    assert_eq!(last_result(&app, "heir"), (false, "Home".to_owned()));

    app.provider
        .will("grandheir", [calls([fetch(&url)]), says("deep")]);
    app.provider
        .will("heir", [calls([call("grandheir")]), says("heir")]);
    app.provider
        .will("own", [calls([fetch(&url)]), says("own")]);
    let both = [calls([call("heir")]), calls([call("own")]), says("done")];
    app.provider.will("worker", both);
    app.run("worker", "go").await;
    assert_eq!(last_result(&app, "grandheir"), (true, refusal.to_owned()));
    assert_eq!(last_result(&app, "own"), (false, "Home".to_owned()));

    // An unnamed child is its caller's copy.
    let look = json!({"label": "look", "task_prompt": "look at it"});
    app.provider.will(
        "worker",
        [calls([("subagent", look)]), calls([fetch(&url)])],
    );
    app.provider.will("worker", [says("looked"), says("done")]);
    let before = app.provider.requests_for("worker").len();
    app.run("worker", "go").await;
    let child = Arc::clone(&app.provider.requests_for("worker")[before + 2]);
    assert_eq!(child.tool_results(), [refusal]);

    // A child keeps its caller's hosts when another process resumes it.
    app.provider
        .will("worker", [calls([call("heir")]), says("done")]);
    app.provider.will("heir", [hangs()]);
    let before = app.provider.requests_for("heir").len();
    let id = app.start("worker", "go").await.id().to_owned();
    app.provider.wait_for_request("heir", before + 1).await;
    app.provider
        .will("heir", [calls([fetch(&url)]), says("heir")]);
    app.crash_and_restart().await;
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    assert_eq!(last_result(&app, "heir"), (true, refusal.to_owned()));
    assert_eq!(web.seen().len(), 2);
}

fn call(agent: &str) -> (&'static str, Value) {
    ("call_agent", json!({"agent": agent, "task": "look"}))
}

/// Whether the last result that a model got is an error, and its first line.
fn last_result(app: &TestApp, model: &str) -> (bool, String) {
    let seen = app.provider.requests_for(model);
    let seen = seen.last().expect("a request");
    let text = seen.tool_results().pop().expect("a result");
    let is_error = seen.tool_result_errors().pop().expect("a result");
    (is_error, text.lines().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn allowed_hosts_are_checked_and_shown() {
    let app = TestApp::setup()
        .agent(
            "worker",
            "allowed_hosts = [\"*.Example.com\", \"Bücher.example\"]",
        )
        .agent("wrong", "allowed_hosts = [\"https://example.com\"]")
        .spawn()
        .await;
    let worker = app.get("/agents/worker").await.json();
    let hosts = json!(["*.example.com", "xn--bcher-kva.example"]);
    assert_eq!(worker["allowed_hosts"], hosts);
    let wrong = app.get("/agents/wrong").await.json();
    let error = wrong["error"].as_str().expect("an error");
    assert!(
        error.contains("allowed_hosts has \"https://example.com\", which is no host"),
        "{error}"
    );
}

fn searcher(config: &str) -> Setup {
    TestApp::setup()
        .agent("worker", "tools = [\"web_search\"]")
        .config(&format!("[tools.web_search]\n{config}"))
}

fn query(words: &str) -> (&'static str, Value) {
    ("web_search", json!({"query": words}))
}

#[tokio::test]
async fn a_model_searches_the_web() {
    let web = Web::start().await;
    // The service is the operator's choice: no list lets it be reached.
    let app = searcher(&format!("url = \"{}\"", web.url("/search?language=en")))
        .spawn()
        .await;
    let found = call_results(&app, &[query("rust & axum")]).await;
    let lines: Vec<&str> = found[0].lines().collect();
    assert_eq!(
        lines[..3],
        ["1. Title 1", "   https://example.com/1", "   Some words."]
    );
    assert_eq!(lines.len(), 30);
    let (uri, headers) = &web.seen()[0];
    assert_eq!(uri.query(), Some("language=en&q=rust+%26+axum&format=json"));
    assert!(!headers.contains_key("authorization"));
    let wrong = call_results(&app, &[query(""), ("web_search", json!({}))]).await;
    assert!(
        wrong
            .iter()
            .all(|it| it.starts_with("error: The arguments of web_search")),
        "{wrong:?}"
    );

    let brave = searcher(&format!(
        "kind = \"brave\"\nurl = \"{}\"\napi_key_env = \"SEARCH_KEY\"",
        web.url("/brave")
    ));
    let app = brave.environment("SEARCH_KEY", "hush-key").spawn().await;
    let found = call_results(&app, &[query("term")]).await;
    assert_eq!(
        found,
        ["1. A & B\n   https://example.com/b\n   the **term**\n"]
    );
    let (_, headers) = &web.seen()[1];
    assert_eq!(headers["x-subscription-token"], "hush-key");
}

#[tokio::test]
async fn a_failed_search_is_explained_without_secrets() {
    let web = Web::start().await;
    for (path, words) in [
        ("/none", "Nothing was found for \"x\"."),
        (
            "/odd",
            "error: The search service's answer is not what it should be",
        ),
        (
            "/broken",
            "error: The search service answered 401 Unauthorized",
        ),
        (
            "/to?http://127.0.0.1:1/",
            "error: The search service answered 302 Found",
        ),
    ] {
        let url = web.url(path);
        let app = searcher(&format!("url = \"{url}\"\napi_key_env = \"SEARCH_KEY\""))
            .environment("SEARCH_KEY", "hush-key")
            .spawn()
            .await;
        let reported = call_results(&app, &[query("x")]).await;
        assert!(reported[0].starts_with(words), "{reported:?}");
        assert!(
            !reported[0].contains("hush") && !app.daemon.log().contains("hush"),
            "{reported:?}"
        );
        let (_, headers) = web.seen().pop().expect("a request");
        assert_eq!(headers["authorization"], "Bearer hush-key");
    }
    let app = searcher("url = \"http://127.0.0.1:1/?token=hush\"")
        .spawn()
        .await;
    let lost = call_results(&app, &[query("x")]).await;
    assert!(
        lost[0].starts_with("error: No answer from the search service"),
        "{lost:?}"
    );
    assert!(!lost[0].contains("hush"), "{lost:?}");
    let app = searcher(&format!(
        "url = \"{}\"\napi_key_env = \"UNSET_KEY\"",
        web.url("/search")
    ))
    .spawn()
    .await;
    let unset = call_results(&app, &[query("x")]).await;
    assert!(unset[0].contains("UNSET_KEY"), "{unset:?}");
}

#[tokio::test]
async fn without_a_service_no_search_is_offered() {
    let app = worker("").spawn().await;
    let reported = call_results(&app, &[query("x")]).await;
    assert_eq!(reported, ["error: Unknown tool: \"web_search\""]);
    assert_eq!(app.provider.requests()[0].tool_names(), ["url_fetch"]);
}

#[tokio::test]
async fn one_keys_hanging_fetches_leave_other_keys_their_share() {
    let (hanging, page) = (HangingServer::start().await, WebhookReceiver::start().await);
    let key = |name: &str| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = [\"admin\"]\n")
    };
    let app = TestApp::setup()
        .config(&format!(
            "[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]\n{}{}",
            key("ada"),
            key("bob")
        ))
        .agent("solo", "tools = [\"url_fetch\"]")
        .spawn()
        .await;
    let fetch = |url: &str| ("url_fetch", json!({ "url": url }));
    let url = hanging.url("127.0.0.1");
    app.provider
        .will("solo", [calls((0..80).map(|_| fetch(&url)))]);
    let start = async |key: &str, path: &str| {
        let request = app.request(Method::POST, path).bearer_auth(key);
        send(request.json(&json!({}))).await
    };
    start("ada", "/agents/solo/runs").await;
    // Half of 64, and half of the other half.
    hanging.wait_for_connections(48).await;

    app.provider
        .will("solo", [calls([fetch(&page.url("/"))]), says("done")]);
    let run = start("bob", "/agents/solo/runs?wait=40").await;

    assert_eq!(run.json()["content"], "done", "{}", run.text);
    assert_eq!(page.messages().len(), 1);
    assert!(
        hanging.open_connections() <= 48,
        "{}",
        hanging.open_connections()
    );
}
