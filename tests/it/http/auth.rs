//! Keys: authentication, scopes, and runs that a key cannot see.

use axed::config::key_hash::KeyHash;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, says};
use crate::support::within_timeout;

/// Every route that asks for a key, with the scope that it names.
const ROUTES: [(Method, &str, &str); 46] = [
    (Method::GET, "/agents", "read"),
    (Method::GET, "/metrics", "metrics"),
    (Method::GET, "/agents/solo", "read"),
    (Method::POST, "/agents/solo/runs", "run"),
    (Method::POST, "/agents/solo/dry-run", "run"),
    (Method::GET, "/agents/solo/memory", "read"),
    (Method::POST, "/agents/solo/gc", "admin"),
    (Method::GET, "/agents/solo/versions", "read"),
    (Method::POST, "/agents/solo/rollout", "admin"),
    (Method::POST, "/agents/solo/promote", "admin"),
    (Method::GET, "/runs", "read"),
    (Method::GET, "/runs/RUN", "read"),
    (Method::DELETE, "/runs/RUN", "admin"),
    (Method::GET, "/runs/RUN/events", "read"),
    (Method::POST, "/runs/RUN/events/ticket", "read"),
    (Method::GET, "/runs/RUN/tree", "read"),
    (Method::GET, "/runs/RUN/children", "read"),
    (Method::GET, "/runs/RUN/messages", "read"),
    (Method::POST, "/runs/RUN/messages", "run"),
    (Method::POST, "/runs/RUN/pause", "run"),
    (Method::POST, "/runs/RUN/resume", "run"),
    (Method::GET, "/runs/RUN/turns", "read"),
    (Method::GET, "/runs/RUN/turns/1", "read"),
    (Method::GET, "/runs/RUN/deliveries", "admin"),
    (Method::POST, "/runs/RUN/deliveries/NONE/resend", "admin"),
    (Method::POST, "/runs/RUN/cancel", "cancel"),
    (Method::POST, "/runs/RUN/fork", "run"),
    (Method::GET, "/runs/RUN/diff/RUN", "read"),
    (Method::POST, "/runs/RUN/approvals/NONE", "run"),
    (Method::POST, "/runs/RUN/inputs/NONE", "run"),
    (Method::POST, "/runs/RUN/calls/NONE", "run"),
    (Method::POST, "/events", "run"),
    (Method::POST, "/agents/solo/runs:batch", "run"),
    (Method::GET, "/batches", "read"),
    (Method::GET, "/batches/NONE", "read"),
    (Method::GET, "/batches/NONE/results", "read"),
    (Method::POST, "/batches/NONE/cancel", "cancel"),
    (Method::GET, "/runs/RUN/scores", "read"),
    (Method::POST, "/runs/RUN/scores", "run"),
    (Method::DELETE, "/runs/RUN/scores/NONE", "run"),
    (Method::POST, "/runs/RUN/feedback-links", "run"),
    (Method::GET, "/scores", "read"),
    (Method::GET, "/schedules", "read"),
    (Method::POST, "/schedules/solo/NONE/trigger", "run"),
    (Method::POST, "/schedules/solo/NONE/pause", "run"),
    (Method::POST, "/schedules/solo/NONE/resume", "run"),
];
/// An id that no run has.
const NO_RUN: &str = "run_00000000-0000-7000-8000-000000000000";

/// A key's section; the key itself is [`text_of`] its name.
fn key(name: &str, rest: &str) -> String {
    let sha256 = KeyHash::digest(text_of(name).as_bytes());
    format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\n{rest}\n")
}

fn text_of(name: &str) -> String {
    format!("very-secret-key-of-{name}")
}

/// A daemon with keys, a planner that asks a reader, and an agent alone.
fn with_keys(keys: &[(&str, &str)]) -> Setup {
    let sections: String = keys.iter().map(|(name, rest)| key(name, rest)).collect();
    TestApp::setup()
        .config(&sections)
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("solo", "")
}

/// Somebody with a key.
struct Client<'a> {
    app: &'a TestApp,
    key: String,
}

fn with_key<'a>(app: &'a TestApp, name: &str) -> Client<'a> {
    Client {
        app,
        key: text_of(name),
    }
}

impl Client<'_> {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.app.request(method, path).bearer_auth(&self.key)
    }

    async fn get(&self, path: &str) -> ApiResponse {
        send(self.request(Method::GET, path)).await
    }

    async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        send(self.request(Method::POST, path).json(body)).await
    }

    async fn delete(&self, path: &str) -> ApiResponse {
        send(self.request(Method::DELETE, path)).await
    }

    /// Runs an agent to its end; the run.
    async fn run(&self, agent: &str) -> Value {
        let path = format!("/agents/{agent}/runs?wait=180");
        let got = self.post(&path, &json!({"input": "go"})).await;
        assert_eq!(got.status, 200, "{}", got.text);
        got.json()
    }

    /// The ids that a list shows.
    async fn listed(&self, path: &str) -> Vec<String> {
        let got = self.get(path).await;
        assert_eq!(got.status, 200, "{}", got.text);
        ids(&got.json())
    }
}

fn ids(page: &Value) -> Vec<String> {
    let data = page["data"].as_array().expect("data");
    data.iter().map(id).collect()
}

fn id(run: &Value) -> String {
    run["id"].as_str().expect("an id").to_owned()
}

fn code(got: &ApiResponse) -> Value {
    got.json()["code"].clone()
}

#[tokio::test]
async fn without_a_key_only_public_routes_respond() {
    let app = with_keys(&[("ada", "scopes = [\"admin\"]")]).spawn().await;
    for (method, path, _) in ROUTES {
        let path = path.replace("RUN", NO_RUN);
        let request = || app.request(method.clone(), &path);
        for refused in [
            request(),
            request().bearer_auth("another"),
            request().bearer_auth(""),
            request().basic_auth("ada", Some(text_of("ada"))),
            request().header("authorization", text_of("ada")),
            request()
                .bearer_auth(text_of("ada"))
                .bearer_auth(text_of("ada")),
        ] {
            let got = send(refused).await;
            got.problem(401);
            assert_eq!(code(&got), "unauthorized", "{method} {path}");
            assert_eq!(got.header("www-authenticate"), "Bearer");
            assert!(!got.text.contains("very-secret"), "{}", got.text);
        }
    }
    for path in ["/livez", "/readyz", "/version", "/openapi.json"] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
    app.get("/nowhere").await.problem(404);
    send(app.request(Method::PUT, "/runs")).await.problem(405);
    let ada = with_key(&app, "ada");
    assert_eq!(ada.listed("/runs").await, [""; 0]);
}

#[tokio::test]
async fn every_route_requires_its_scope() {
    let scopes = ["run", "read", "cancel", "metrics", "admin"];
    let keys = scopes.map(|scope| (scope, format!("scopes = [\"{scope}\"]")));
    let keys: Vec<(&str, &str)> = keys.iter().map(|(n, rest)| (*n, rest.as_str())).collect();
    let app = with_keys(&keys).spawn().await;
    app.provider.will("solo", [says("a"), says("b")]);

    for (method, path, needed) in ROUTES {
        let path = path.replace("RUN", NO_RUN);
        for scope in scopes {
            let request = with_key(&app, scope).request(method.clone(), &path);
            let got = send(request).await;
            if scope == needed || scope == "admin" {
                let let_in = got.status != 401 && got.status != 403;
                assert!(let_in, "{scope}: {method} {path}: {}", got.text);
            } else {
                let reported = got.problem(403);
                assert_eq!(code(&got), "insufficient_scope");
                assert!(reported.contains(&format!("scope {needed}")), "{reported}");
            }
        }
    }
}

#[tokio::test]
async fn agent_cards_are_for_keys_that_read_or_run() {
    let scopes = ["run", "read", "cancel", "metrics"];
    let keys = scopes.map(|scope| (scope, format!("scopes = [\"{scope}\"]")));
    let keys: Vec<(&str, &str)> = keys.iter().map(|(n, rest)| (*n, rest.as_str())).collect();
    let app = with_keys(&keys).spawn().await;
    for path in [
        "/.well-known/agent-card.json",
        "/a2a/solo/.well-known/agent-card.json",
        "/a2a/solo/extendedAgentCard",
    ] {
        for scope in scopes {
            let request = with_key(&app, scope).request(Method::GET, path);
            let got = send(request.header("a2a-version", "1.0")).await;
            let expected = match scope {
                "run" | "read" => 200,
                _ => 403,
            };
            assert_eq!(got.status, expected, "{scope}: {path}: {}", got.text);
            assert_eq!(got.text.contains("solo"), expected == 200, "{}", got.text);
        }
    }
}

#[tokio::test]
async fn agents_outside_a_keys_globs_are_hidden_from_it() {
    let app = with_keys(&[
        ("solist", "scopes = [\"admin\"]\nagents = [\"sol*\", \"x\"]"),
        ("ada", "scopes = [\"admin\"]\nagents = []"),
    ])
    .spawn()
    .await;
    app.provider.will("solo", [says("done")]);
    let (solist, ada) = (with_key(&app, "solist"), with_key(&app, "ada"));

    for (method, path, _) in &ROUTES[2..7] {
        let path = path.replace("solo", "reader");
        let got = send(solist.request(method.clone(), &path)).await;
        let reported = got.problem(404);
        assert_eq!(
            reported, "agent config not found: reader",
            "{method} {path}"
        );
        assert_eq!(code(&got), "agent_not_found");
    }
    let names = |got: ApiResponse| -> Vec<Value> {
        let data = got.json()["data"].as_array().expect("data").clone();
        data.into_iter()
            .map(|agent| agent["name"].clone())
            .collect()
    };
    assert_eq!(names(solist.get("/agents").await), ["solo"]);
    assert_eq!(
        names(ada.get("/agents").await),
        ["planner", "reader", "solo"]
    );
    assert_eq!(solist.get("/agents/solo").await.status, 200);
    solist.run("solo").await;
}

#[tokio::test]
async fn a_part_of_an_id_names_no_run_of_another_key() {
    let app = with_keys(&[
        ("ada", "scopes = [\"run\", \"read\"]"),
        ("ben", "scopes = [\"run\", \"read\"]"),
        ("readers", "scopes = [\"admin\"]\nagents = [\"reader\"]"),
    ])
    .spawn()
    .await;
    app.provider.will("solo", [says("hers"), says("his")]);
    let (ada, ben, readers) = (
        with_key(&app, "ada"),
        with_key(&app, "ben"),
        with_key(&app, "readers"),
    );
    let id = |run: Value| run["id"].as_str().expect("an id").to_owned();
    let (hers, his) = (id(ada.run("solo").await), id(ben.run("solo").await));
    let beginning = &hers[..9];
    assert_eq!(&his[..9], beginning);
    for (client, own, foreign) in [(&ada, &hers, &his), (&ben, &his, &hers)] {
        let got = client.get(&format!("/runs/{beginning}")).await;
        assert_eq!(got.json()["id"], **own);
        let reported = client
            .get(&format!("/runs/{}", &foreign[28..]))
            .await
            .problem(404);
        assert!(!reported.contains(&**foreign), "{reported}");
    }
    readers
        .get(&format!("/runs/{beginning}"))
        .await
        .problem(404);
}

#[tokio::test]
async fn globs_hide_whole_trees_by_their_root_agent() {
    let app = with_keys(&[
        ("ada", "scopes = [\"admin\"]"),
        ("planners", "scopes = [\"admin\"]\nagents = [\"planner\"]"),
        ("readers", "scopes = [\"admin\"]\nagents = [\"reader\"]"),
    ])
    .spawn()
    .await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [says("read"), says("read")]);
    let ada = with_key(&app, "ada");
    let root = id(&ada.run("planner").await);
    let children = ada.listed(&format!("/runs/{root}/children")).await;
    let [child] = children.as_slice() else {
        panic!("{children:?}");
    };
    let other = id(&ada.run("reader").await);

    let planners = with_key(&app, "planners");
    for run in [&root, child] {
        assert_eq!(planners.get(&format!("/runs/{run}")).await.status, 200);
    }
    planners.get(&format!("/runs/{other}")).await.problem(404);
    assert_eq!(planners.listed("/runs").await, [root.as_str()]);
    assert_eq!(
        planners.listed("/runs?all=true").await,
        [child.clone(), root.clone()]
    );

    // The child's agent matches its globs, but the tree belongs to another key.
    let readers = with_key(&app, "readers");
    for run in [&root, child] {
        readers.get(&format!("/runs/{run}")).await.problem(404);
    }
    assert_eq!(readers.listed("/runs?all=true").await, [other.as_str()]);
    let page = readers.get("/runs?all=true&limit=1").await.json();
    assert_eq!(ids(&page), [other]);
}

#[tokio::test]
async fn a_key_sees_its_own_runs_and_an_admin_all() {
    let usual = "scopes = [\"run\", \"read\", \"cancel\"]";
    let mut app = with_keys(&[
        ("alice", usual),
        ("bob", usual),
        ("ada", "scopes = [\"admin\"]"),
    ])
    .spawn()
    .await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [says("read")]);
    app.provider.will("solo", [says("done")]);

    let root = id(&with_key(&app, "alice").run("planner").await);
    let bobs = id(&with_key(&app, "bob").run("solo").await);
    // The record has the owner.
    app.restart().await;
    let (alice, bob, ada) = (
        with_key(&app, "alice"),
        with_key(&app, "bob"),
        with_key(&app, "ada"),
    );

    let children = alice.listed(&format!("/runs/{root}/children")).await;
    assert_eq!(children.len(), 1);
    let tree = [&root, &children[0]];
    for run in tree {
        for below in ["", "/events", "/tree", "/children", "/messages"] {
            let path = format!("/runs/{run}{below}");
            assert_eq!(alice.get(&path).await.status, 200, "{path}");
            assert_eq!(ada.get(&path).await.status, 200, "{path}");
            let got = bob.get(&path).await;
            assert_eq!(got.problem(404), format!("there is no run {run:?}"));
            assert_eq!(code(&got), "run_not_found");
        }
        let stream = bob.request(Method::GET, &format!("/runs/{run}/events"));
        let stream = stream.header("accept", "text/event-stream");
        send(stream).await.problem(404);
        let cancel = format!("/runs/{run}/cancel");
        bob.post(&cancel, &json!({})).await.problem(404);
        assert_eq!(alice.post(&cancel, &json!({})).await.status, 200);
    }
    assert_eq!(alice.listed("/runs").await, [root.as_str()]);
    assert_eq!(alice.listed("/runs?all=true").await.len(), 2);
    assert_eq!(bob.listed("/runs?all=true").await, [bobs.as_str()]);
    assert_eq!(bob.listed("/runs?all=true&q=GO").await, [bobs.as_str()]);
    assert_eq!(bob.listed(&format!("/runs?q={root}")).await, [""; 0]);
    assert_eq!(
        ada.listed(&format!("/runs?q={root}")).await,
        [root.as_str()]
    );
    let of_alice = format!("/runs?root={root}");
    assert_eq!(bob.listed(&of_alice).await, [""; 0]);
    assert_eq!(ada.listed(&of_alice).await.len(), 2);
    assert_eq!(ada.listed("/runs").await, [bobs, root.clone()]);
    assert_eq!(ada.delete(&format!("/runs/{root}")).await.status, 204);
}

#[tokio::test]
async fn a_key_cancels_only_its_own_runs() {
    let app = with_keys(&[
        ("alice", "scopes = [\"run\", \"read\", \"cancel\"]"),
        ("bob", "scopes = [\"cancel\"]"),
    ])
    .spawn()
    .await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let alice = with_key(&app, "alice");
    let run = alice.post("/agents/solo/runs", &json!({})).await.json();
    app.provider.wait_for_concurrency("solo", 1).await;

    let cancel = format!("/runs/{}/cancel?wait=180", id(&run));
    let bob = with_key(&app, "bob");
    bob.post(&cancel, &json!({})).await.problem(404);
    let now = alice.get(&format!("/runs/{}", id(&run))).await.json();
    assert_eq!(now["status"], "running");
    let ended = alice.post(&cancel, &json!({})).await;
    assert_eq!(ended.json()["status"], "cancelled", "{}", ended.text);
}

#[tokio::test]
async fn with_keys_any_address_is_served_and_the_flag_has_no_effect() {
    for flag in [None, Some("--insecure-no-auth")] {
        let mut setup = with_keys(&[("ada", "scopes = [\"admin\"]")])
            .argument("--listen")
            .argument("0.0.0.0:0");
        if let Some(flag) = flag {
            setup = setup.argument(flag);
        }
        let app = setup.spawn().await;
        let url = app.daemon.url.replace("0.0.0.0", "127.0.0.1");
        let agents = app.client.get(format!("{url}/agents"));
        let with_key = agents.try_clone().expect("a request");
        send(agents).await.problem(401);
        let got = send(with_key.bearer_auth(text_of("ada"))).await;
        assert_eq!(got.status, 200, "{}", got.text);
    }
}

#[tokio::test]
async fn a_key_can_come_from_the_environment() {
    let sha256 = KeyHash::digest(text_of("ci").as_bytes()).to_string();
    let app = TestApp::setup()
        .prefix("/ai")
        .environment("AXED_AUTH__KEYS__CI__SHA256", &sha256)
        .environment("AXED_AUTH__KEYS__CI__SCOPES", "read,run")
        .spawn()
        .await;
    app.get("/agents").await.problem(401);
    assert_eq!(with_key(&app, "ci").get("/agents").await.status, 200);
    let bare = app.client.get(format!("{}/agents", app.daemon.url));
    send(bare).await.problem(404);
}

#[tokio::test]
async fn keys_are_never_logged() {
    let app = with_keys(&[("ada", "scopes = [\"admin\"]")])
        .environment("AXED_TELEMETRY__LOG", "trace")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);
    let ada = with_key(&app, "ada");
    ada.run("solo").await;
    let run = with_key(&app, "nobody").get("/runs").await;
    run.problem(401);
    app.daemon.wait_for_log("/runs answered 401").await;
    let log = app.daemon.log();
    assert!(!log.contains("very-secret"), "{log}");
}

#[tokio::test]
async fn a_new_key_and_its_lines_fit() {
    let home = tempfile::tempdir().expect("a directory");
    let made = async |name: &str| {
        let output = within_timeout(
            "a key",
            axed_command(home.path(), &["keys", "new", name]).output(),
        );
        let output = output.await.expect("run axed");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let (one, other) = (made("ci.one").await, made("other").await);
    let key = one.lines().next().expect("a key");
    assert!(key.starts_with("axed_") && key.len() == 69, "{key}");
    assert_ne!(Some(key), other.lines().next());
    assert!(one.lines().skip(1).all(|line| !line.contains(key)), "{one}");

    // All but the key's own line is configuration.
    let lines = |text: &str| text.split_once('\n').expect("lines").1.to_owned();
    let config = format!("{}{}", lines(&one), lines(&other));
    std::fs::write(home.path().join("axed.toml"), config).expect("a file");
    let arguments = ["serve", "--config", "axed.toml", "--agents", "."];
    let daemon = Daemon::start(axed_command(
        home.path(),
        &[&arguments[..], &["--listen", "127.0.0.1:0"]].concat(),
    ))
    .await;
    let agents = reqwest::Client::new().get(format!("{}/agents", daemon.url));
    let got = send(agents.bearer_auth(key)).await;
    assert_eq!(got.status, 200, "{}", got.text);

    let bad = axed_command(home.path(), &["keys", "new", "two words"]);
    let output = within_timeout("a refusal", { bad }.output())
        .await
        .expect("run axed");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[tokio::test]
async fn commands_send_the_configured_key() {
    let app = with_keys(&[
        ("ada", "scopes = [\"admin\"]"),
        ("reader", "scopes = [\"read\"]"),
    ])
    .agent("notes", "[memory]\nenabled = true")
    .spawn()
    .await;
    app.provider
        .will("solo", [says("first"), says("second"), says("in process")]);
    let server = app.daemon.url.as_str();
    let called = async |arguments: &[&str], variable: Option<&str>| {
        let mut command = axed_command(&app.path(""), arguments);
        if let Some(key) = variable {
            command.env("AXED_KEY", key);
        }
        let output = within_timeout("the command's end", command.output()).await;
        let output = output.expect("run axed");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (said, reported) = (text(&output.stdout), text(&output.stderr));
        assert!(!reported.contains("very-secret"), "{reported}");
        (output.status.code(), said.trim().to_owned(), reported)
    };
    let (ada, reader) = (text_of("ada"), text_of("reader"));
    let run = ["run", "solo", "hi", "--server", server];
    let with_flag = [&run[..], &["--key", &ada]].concat();

    assert_eq!(called(&with_flag, None).await.1, "first");
    assert_eq!(called(&run, Some(&ada)).await.1, "second");
    let (code, _, reported) = called(&run, None).await;
    assert_eq!(code, Some(3), "{reported}");
    assert!(reported.contains("Authorization"), "{reported}");
    let (code, _, reported) = called(&run, Some(&reader)).await;
    assert_eq!(code, Some(3), "{reported}");
    assert!(reported.contains("scope run"), "{reported}");
    let (code, _, reported) = called(&run, Some("very-secret\u{7}")).await;
    assert_eq!(code, Some(2), "{reported}");
    let gc = ["gc", "--all", "--server", server];
    assert_eq!(called(&gc, Some(&ada)).await.0, Some(0));
    assert_eq!(called(&gc, Some(&reader)).await.0, Some(3));
    let health = ["health", "--server", server];
    eventually("axed health", async || {
        (called(&health, None).await.0 == Some(0)).then_some(())
    })
    .await;

    // In process no key is needed, whatever keys are configured.
    let (_, said, reported) = called(&["run", "solo", "hi"], None).await;
    assert_eq!(said, "in process", "{reported}");
}

#[tokio::test]
async fn an_idempotency_key_belongs_to_its_client_key() {
    let rest = "scopes = [\"run\"]";
    let app = with_keys(&[("ann", rest), ("bob", rest)]).spawn().await;
    app.provider.always("solo", |_| says("done"));
    let post = async |name: &str, input: &str| {
        let client = with_key(&app, name);
        let request = client.request(Method::POST, "/agents/solo/runs?wait=180");
        let request = request.header("idempotency-key", "k");
        send(request.json(&json!({"input": input}))).await
    };

    let anns = post("ann", "go").await;
    let bobs = post("bob", "stop").await;
    let again = post("ann", "go").await;

    assert_eq!((anns.status, bobs.status), (200, 200), "{}", bobs.text);
    assert_ne!(id(&anns.json()), id(&bobs.json()));
    assert_eq!(again.json(), anns.json());
    assert_eq!(again.header("idempotency-replayed"), "true");
    post("bob", "go").await.problem(422);
}

#[tokio::test]
async fn a_run_is_changed_by_keys_that_may_use_its_own_agent() {
    let scopes = "scopes = [\"run\", \"read\", \"cancel\", \"approve\"]\n";
    let planners = format!("{scopes}agents = [\"planner\"]");
    let both = format!("{scopes}agents = [\"planner\", \"careful\"]");
    let tools = "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]";
    for (rest, is_allowed) in [(planners, false), (both, true)] {
        let app = TestApp::setup()
            .config(&key("ada", &rest))
            .agent("planner", "sub_agents = [\"careful\"]")
            .agent("careful", tools)
            .file("work/here.txt", "here")
            .spawn()
            .await;
        let write = calls([("write_file", json!({"path": "a", "content": "b"}))]);
        app.provider
            .will("planner", [delegates([("careful", "write")]), says("done")]);
        app.provider.will("careful", [write]);
        let ada = with_key(&app, "ada");
        let path = "/agents/planner/runs?wait=180";
        let root = ada.post(path, &json!({"input": "go"})).await.json();
        let pending = &root["pending_approvals"][0];
        let child = pending["run_id"].as_str().expect("a child");
        let call = pending["tool_call_id"].as_str().expect("a call");
        assert_eq!(ada.get(&format!("/runs/{child}")).await.status, 200);
        let listed = ada.get("/approvals").await.json();
        let expected = usize::from(is_allowed);
        assert_eq!(listed["data"].as_array().map(Vec::len), Some(expected));
        let root = root["id"].as_str().expect("an id");
        for (path, body) in [
            (
                format!("/runs/{child}/messages"),
                json!({"content": "faster"}),
            ),
            (format!("/runs/{child}/pause"), json!({})),
            (format!("/runs/{child}/resume"), json!({})),
            (format!("/runs/{child}/fork"), json!({})),
            (format!("/runs/{root}/fork"), json!({"at": {"run": child}})),
            (
                format!("/runs/{child}/approvals/{call}"),
                json!({"decision": "deny"}),
            ),
            (format!("/runs/{child}/cancel"), json!({})),
        ] {
            let changed = ada.post(&path, &body).await;
            match is_allowed {
                true => assert!(changed.status < 300, "{path}: {}", changed.text),
                false => {
                    changed.problem(404);
                    assert_eq!(code(&changed), "run_not_found", "{path}");
                }
            }
        }
        // Its own run is still its own.
        let steered = ada
            .post(
                &format!("/runs/{root}/messages"),
                &json!({"content": "faster"}),
            )
            .await;
        assert!(matches!(steered.status, 202 | 409), "{}", steered.text);
    }
}

#[tokio::test]
async fn other_arguments_need_the_scope_approve() {
    let setup = TestApp::setup()
        .config(&key("ann", "scopes = [\"run\", \"read\"]"))
        .config(&key("bob", "scopes = [\"run\", \"read\", \"approve\"]"))
        .config(&key("root", "scopes = [\"admin\"]"))
        .agent(
            "careful",
            "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]",
        )
        .file("work/here.txt", "here");
    let app = setup.spawn().await;
    let write = || calls([("write_file", json!({"path": "a", "content": "b"}))]);
    for (name, as_asked, edited) in [("ann", 202, 403), ("bob", 202, 202), ("root", 202, 202)] {
        let client = with_key(&app, name);
        for (arguments, status) in [
            (None, as_asked),
            (Some(json!({"path": "c", "content": "d"})), edited),
        ] {
            app.provider.will("careful", [write(), says("done")]);
            let path = "/agents/careful/runs?wait=180";
            let run = client.post(path, &json!({"input": "go"})).await.json();
            let (id, pending) = (id(&run), &run["pending_approvals"][0]);
            let call = pending["tool_call_id"].as_str().expect("a call");
            let path = format!("/runs/{id}/approvals/{call}");
            let mut body = json!({"decision": "approve"});
            if let Some(arguments) = &arguments {
                body["arguments"] = arguments.clone();
            }
            let decided = client.post(&path, &body).await;
            assert_eq!(decided.status, status, "{name}: {}", decided.text);
            if status == 403 {
                assert_eq!(code(&decided), "insufficient_scope");
                let approved = client.post(&path, &json!({"decision": "approve"})).await;
                assert_eq!(approved.status, 202, "it still waits: {}", approved.text);
            }
            let run = client.get(&format!("/runs/{id}?wait=180")).await.json();
            assert_eq!(run["content"], "done");
        }
    }
}
