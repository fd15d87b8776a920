//! Runs over HTTP: creating, waiting, reading, listing, overriding, trying dry, deleting.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, hangs, says};

#[tokio::test]
async fn a_run_is_accepted_and_found_at_its_location() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);

    let got = app.post("/agents/solo/runs", &json!({"input": "go"})).await;

    assert_eq!(got.status, 202, "{}", got.text);
    let accepted = got.json();
    let id = accepted["id"].as_str().expect("an id");
    assert_eq!(got.location(), format!("/runs/{id}"));
    assert!(!got.header("x-request-id").is_empty());
    assert!(["queued", "running"].contains(&accepted["status"].as_str().expect("a status")));
    app.provider.wait_for_concurrency("solo", 1).await;
    assert_eq!(app.find(id).await.status(), "running");
    gate.open();
    assert_eq!(app.find(id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn the_run_object_has_exactly_these_keys() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);

    let run = app
        .run_with("solo", json!({"input": "go", "labels": {"team": "blue"}}))
        .await;

    let record = app.get(&format!("/runs/{}", run.id())).await.json();
    let keys = |value: &Value| -> BTreeSet<String> {
        value
            .as_object()
            .expect("an object")
            .keys()
            .cloned()
            .collect()
    };
    let expected = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    let run_keys: BTreeSet<String> = expected(
        "id agent agent_version variant status parent_id root_id depth tool_call_id input content partial_content structured \
         model stop_reason turns input_tokens output_tokens tool_calls duration_ms tree error cancel_reason label \
         completion_status labels attempt created_at started_at finished_at last_event links waiting_for wait suspended session \
         pending_approvals pending_inputs warnings forked_from scores",
    );
    assert_eq!(keys(&record), run_keys);
    let tree_keys: BTreeSet<String> = expected(
        "runs input_tokens output_tokens cache_read_tokens cache_write_tokens model_calls tool_calls cost_usd complete",
    );
    assert_eq!(keys(&record["tree"]), tree_keys);
    assert_eq!(
        record["links"],
        json!({
            "self": format!("/runs/{}", run.id()),
            "events": format!("/runs/{}/events", run.id()),
            "cancel": format!("/runs/{}/cancel", run.id()),
            "tree": format!("/runs/{}/tree", run.id()),
        })
    );
    assert_eq!(record["labels"], json!({"team": "blue"}));
    assert_eq!(record["attempt"], 1);
    assert_eq!(record["input"], "go");
    assert!(
        record["agent_version"]
            .as_str()
            .expect("a version")
            .starts_with("sha256:")
    );
    for key in ["created_at", "started_at", "finished_at"] {
        assert!(
            record[key].as_str().expect("a time").ends_with('Z'),
            "{record}"
        );
    }
}

#[tokio::test]
async fn a_client_can_wait_in_three_ways() {
    let app = TestApp::setup()
        .agent("solo", "")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.provider.always("slow", |_| hangs());
    let post = |path: &str| {
        app.request(Method::POST, path)
            .json(&json!({"input": "go"}))
    };

    let by_seconds = send(post("/agents/solo/runs?wait=180")).await;
    let by_duration = send(post("/agents/solo/runs?wait=30s")).await;
    let by_header = send(post("/agents/solo/runs").header("prefer", "wait=30")).await;
    for got in [by_seconds, by_duration, by_header] {
        assert_eq!(got.status, 200, "{}", got.text);
        assert_eq!(got.json()["content"], "done");
    }

    let in_vain = send(post("/agents/slow/runs?wait=1")).await;
    assert_eq!(in_vain.status, 202, "{}", in_vain.text);
    assert_eq!(in_vain.json()["status"], "running");
    let id = in_vain.json()["id"].as_str().expect("an id").to_owned();
    let again = app.get(&format!("/runs/{id}?wait=1")).await;
    assert_eq!(
        (again.status, &again.json()["status"]),
        (202, &json!("running"))
    );
    app.post("/agents/solo/runs?wait=soon", &json!({}))
        .await
        .problem(400);
}

#[tokio::test]
async fn waits_are_limited_by_the_server() {
    let app = TestApp::setup()
        .server("max_wait = 1")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider.will("slow", [hangs()]);

    let got = app.post("/agents/slow/runs?wait=40", &json!({})).await;

    assert_eq!(got.status, 202, "{}", got.text);
}

#[tokio::test]
async fn disconnecting_does_not_stop_the_run() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").after_gate(&gate)]);
    let request = app
        .request(Method::POST, "/agents/solo/runs?wait=180")
        .json(&json!({}));

    tokio::select! {
        _ = request.send() => panic!("the run cannot have ended"),
        () = app.provider.wait_for_concurrency("solo", 1) => {}
    }
    gate.open();

    // A request is sent while the start of its turn is committed.
    let is_listed = |got: &ApiResponse| got.json()["data"][0]["id"].is_string();
    let page = app.get_until("/runs?agent=solo", is_listed).await.json();
    let id = page["data"][0]["id"].as_str().expect("a run").to_owned();
    assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
}

#[tokio::test]
async fn a_body_may_be_json_or_text_or_nothing() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let post = || app.request(Method::POST, "/agents/solo/runs?wait=180");

    let plain = post()
        .header("content-type", "text/plain")
        .body("a letter\n");
    assert_eq!(send(plain).await.status, 200);
    assert_eq!(send(post()).await.status, 200);
    assert_eq!(send(post().json(&json!({"input": "  "}))).await.status, 200);
    let both = json!({"input": "read", "context": "chapter one"});
    assert_eq!(send(post().json(&both)).await.status, 200);

    let default = "Execute the task described in your instructions.";
    let said: Vec<_> = app
        .provider
        .requests()
        .iter()
        .map(|seen| seen.user_messages()[0].clone())
        .collect();
    assert_eq!(said[0].trim_end(), "a letter");
    assert_eq!(
        said[1..],
        [default, default, "read\n\nContext:\nchapter one"]
    );
}

#[tokio::test]
async fn a_run_that_cannot_start_is_refused_at_once() {
    let app = TestApp::setup()
        .config("[providers.private]\nkind = \"anthropic\"\nbase_url = \"{provider}\"")
        .agent("solo", "")
        .file("agents/broken.toml", "name = \"broken\"\nmodle = \"a/b\"\n")
        .agent("nowhere", "model = \"nobody/knows\"")
        .agent("keyless", "model = \"private/model\"")
        .spawn()
        .await;
    let post =
        async |agent: &str, body: Value| app.post(&format!("/agents/{agent}/runs"), &body).await;

    let unknown = post("ghost", json!({})).await.problem(404);
    assert!(
        unknown.contains("agent config not found: ghost"),
        "{unknown}"
    );
    for (path, body) in [("runs", json!({})), ("dry-run", json!({}))] {
        let path = format!("/agents/slo/{path}");
        let unknown = app.post(&path, &body).await.problem(404);
        assert_eq!(
            unknown,
            "agent config not found: slo; did you mean \"solo\"?"
        );
    }
    let broken = post("broken", json!({})).await.problem(422);
    for part in ["broken", "modle", "model", "2"] {
        assert!(broken.contains(part), "{part} is missing in {broken}");
    }
    let provider = post("nowhere", json!({})).await.problem(422);
    assert!(
        provider.contains(
            "unsupported provider \"nobody\": supported providers are anthropic, openai, ollama"
        ),
        "{provider}"
    );
    let key = post("keyless", json!({})).await.problem(422);
    assert!(
        key.contains(
            "API key for provider \"private\" is not configured (set PRIVATE_API_KEY or add to config.toml); in config/axed.toml it is api_key in [providers.private]"
        ),
        "{key}"
    );
    let model = post("solo", json!({"model": "gpt"})).await.problem(422);
    assert!(
        model.contains("invalid model format \"gpt\": expected provider/model-name"),
        "{model}"
    );
    assert!(app.provider.requests().is_empty());
    assert_eq!(app.get("/runs").await.json()["data"], json!([]));
}

#[tokio::test]
async fn a_request_overrides_the_file() {
    let app = TestApp::setup()
        .agent("solo", "[params]\ntemperature = 0.9\ntop_p = 0.8")
        .spawn()
        .await;
    app.provider.will("other", [says("done")]);

    let run = app
        .run_with(
            "solo",
            json!({
                "model": "openai/other", "params": {"temperature": 0.0, "max_tokens": 5},
                "stream": true,
            }),
        )
        .await;

    assert_eq!(run.output(), "done");
    let sent = app.provider.wait_for_request("other", 1).await;
    assert_eq!(sent.body["temperature"], 0.0);
    assert_eq!(sent.body["top_p"], 0.8);
    assert_eq!(sent.body["max_tokens"], 5);
    assert!(sent.wants_stream());
}

#[tokio::test]
async fn a_child_streams_if_its_root_does() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);

    app.run_with("planner", json!({"stream": true})).await;

    assert!(
        app.provider
            .wait_for_request("reader", 1)
            .await
            .wants_stream()
    );
}

#[tokio::test]
async fn workdir_and_skill_stay_within_the_roots() {
    let app = TestApp::setup()
        .config("[tools]\nroots = [\"open\"]")
        .agent("solo", "files = [\"*.md\"]")
        .file("open/place/note.md", "a note")
        .file("closed/place/note.md", "a secret")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let path = |path: &str| app.path(path).to_str().expect("text").to_owned();

    let run = app
        .run_with("solo", json!({"workdir": path("open/place")}))
        .await;
    assert_eq!(run.output(), "done");
    assert!(
        app.provider
            .wait_for_request("solo", 1)
            .await
            .system()
            .contains("a note")
    );
    for closed in [
        "closed/place",
        "open/../closed/place",
        "open/place/../../closed",
    ] {
        let body = json!({"workdir": path(closed)});
        app.post("/agents/solo/runs", &body).await.problem(422);
    }
    let body = json!({"skill": path("closed/place/note.md")});
    app.post("/agents/solo/runs", &body).await.problem(422);
}

#[tokio::test]
async fn a_dry_run_shows_the_request_and_sends_nothing() {
    let app = TestApp::setup()
        .config("[providers.private]\nkind = \"anthropic\"\nbase_url = \"{provider}\"")
        .agent(
            "planner",
            "model = \"private/brain\"\nsystem_prompt = \"Plan.\"\nsub_agents = [\"reader\"]\ntimeout = 7\n\
             [sub_agents_config]\nparallel = false\ntimeout = 3",
        )
        .agent("reader", "")
        .spawn()
        .await;

    let got = app
        .post(
            "/agents/planner/dry-run",
            &json!({"input": "go", "context": "now"}),
        )
        .await;

    assert_eq!(got.status, 200, "{}", got.text);
    let dry = got.json();
    assert_eq!(dry["system_prompt"], "Plan.");
    assert_eq!(dry["message"], "go\n\nContext:\nnow");
    assert_eq!(dry["model"], "private/brain");
    assert_eq!(dry["tools"][0]["name"], "call_agent");
    assert_eq!(dry["sub_agents"]["max_depth"], 3);
    assert_eq!(dry["sub_agents"]["parallel"], false);
    assert_eq!(dry["sub_agents"]["timeout"], 3);
    assert_eq!(dry["limits"]["timeout"], 7);
    assert_eq!(dry["limits"]["max_turns"], 50);
    assert!(app.provider.requests().is_empty());
    assert_eq!(app.get("/runs").await.json()["data"], json!([]));
    app.post("/agents/ghost/dry-run", &json!({}))
        .await
        .problem(404);
}

fn ids(page: &ApiResponse) -> Vec<String> {
    assert_eq!(page.status, 200, "{}", page.text);
    page.json()["data"]
        .as_array()
        .expect("data")
        .iter()
        .map(|run| run["id"].as_str().expect("an id").to_owned())
        .collect()
}

#[tokio::test]
async fn runs_are_listed_newest_first_page_by_page() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let mut expected = Vec::new();
    for _ in 0..7 {
        expected.insert(0, app.run("solo", "go").await.id().to_owned());
    }

    let mut found = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = app.get(&format!("/runs?limit=3{cursor}")).await;
        found.extend(ids(&page));
        match page.json()["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }

    assert_eq!(found, expected);
    assert_eq!(ids(&app.get("/runs").await), expected);
    app.get("/runs?cursor=nonsense").await.problem(400);
    app.get("/runs?limit=201").await.problem(400);
}

#[tokio::test]
async fn a_page_of_large_runs_ends_early() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let large = "x".repeat(3 << 20);
    let mut expected = Vec::new();
    for _ in 0..4 {
        expected.insert(0, app.run("solo", &large).await.id().to_owned());
    }

    let first = app.get("/runs?full=true").await;
    assert_eq!(ids(&first), expected[..3]);
    let first = first.json();
    let cursor = first["next_cursor"].as_str().expect("a next page");
    let second = app.get(&format!("/runs?full=true&cursor={cursor}")).await;
    assert_eq!(ids(&second), expected[3..]);
    assert_eq!(second.json()["next_cursor"], Value::Null);
}

#[tokio::test]
async fn lists_are_filtered() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("bad", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.always("reader", |_| says("read"));
    let planner = app
        .run_with("planner", json!({"labels": {"team": "blue", "a.b": "x y"}}))
        .await;
    let reader = app
        .run_with("reader", json!({"labels": {"team": "red"}}))
        .await;
    let bad = app.run("bad", "go").await;
    let child = planner.children().await[0].id().to_owned();
    let list = async |query: &str| ids(&app.get(&format!("/runs?{query}")).await);
    let (planner, reader, bad) = (planner.id(), reader.id(), bad.id());

    assert_eq!(list("").await, [bad, reader, planner]);
    assert_eq!(list("all=true").await, [bad, reader, &child, planner]);
    assert_eq!(list("agent=reader").await, [reader]);
    assert_eq!(list("agent=reader&all=true").await, [reader, &child]);
    assert_eq!(list("status=failed").await, [bad]);
    assert_eq!(list("status=completed").await, [reader, planner]);
    assert_eq!(list("label.team=blue").await, [planner]);
    assert_eq!(list("label.team=blue&label.a.b=x%20y").await, [planner]);
    assert_eq!(list("label.team=blue&agent=reader").await, [""; 0]);
    let whole = app.find(planner).await;
    let since = whole["created_at"].as_str().expect("a time");
    assert_eq!(
        list(&format!("since={since}")).await,
        [bad, reader, planner]
    );
    assert_eq!(list("since=2999-01-01T00:00:00Z").await, [""; 0]);
    assert_eq!(list("until=2001-01-01T00:00:00Z").await, [""; 0]);
    // Times beyond those that a timestamp can be.
    let everything = [bad, reader, planner];
    for end in ["23:59:59Z", "23:59:59.999+00:00", "00:00:00-23:59"] {
        let end = format!("9999-12-31T{end}");
        assert_eq!(list(&format!("until={end}")).await, everything, "{end}");
        assert_eq!(list(&format!("since={end}")).await, [""; 0], "{end}");
    }
    assert_eq!(list("since=-009999-01-01T00:00:00Z").await, everything);
    assert_eq!(list("until=-009999-01-01T00:00:00Z").await, [""; 0]);
    app.get("/runs?status=odd").await.problem(400);
    app.get("/runs?colour=red").await.problem(400);
}

#[tokio::test]
async fn a_conversation_can_be_read() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]).with_text("Hm."), says("done")],
    );
    app.provider.will("reader", [says("read")]);

    let run = app.run("planner", "go").await;

    let text = run.messages().await.to_string();
    let at = |part: &str| {
        text.find(part)
            .unwrap_or_else(|| panic!("{part} is missing in {text}"))
    };
    let order = [
        at("\"go\""),
        at("\"Hm.\""),
        at("call_agent"),
        at("\"read\""),
        at("\"done\""),
    ];
    assert!(order.is_sorted(), "{text}");
}

#[tokio::test]
async fn a_terminal_root_can_be_deleted_with_its_tree() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .agent("slow", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read")]);
    app.provider.will("slow", [hangs()]);
    let run = app.run("planner", "go").await;
    let child = run.children().await[0].id().to_owned();
    let slow = app.start("slow", "go").await;

    app.delete(&format!("/runs/{}", slow.id()))
        .await
        .problem(409);
    app.delete(&format!("/runs/{child}")).await.problem(409);
    assert_eq!(app.delete(&format!("/runs/{}", run.id())).await.status, 204);

    for gone in [run.id(), &child] {
        for path in ["", "/events", "/tree", "/children", "/messages"] {
            app.get(&format!("/runs/{gone}{path}")).await.problem(404);
        }
        app.delete(&format!("/runs/{gone}")).await.problem(404);
    }
    assert_eq!(ids(&app.get("/runs?all=true").await), [slow.id()]);
}

#[tokio::test]
async fn an_unknown_field_is_refused() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let unknown = app.post("/agents/solo/runs", &json!({"inptu": "go"})).await;
    let detail = unknown.problem(422);
    assert!(detail.contains("inptu"), "{detail}");
    assert!(unknown.json()["errors"].is_array(), "{}", unknown.text);
    assert!(app.provider.requests().is_empty());
}

#[tokio::test]
async fn a_part_of_an_id_names_a_run_wherever_an_id_does() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [says("read"), says("read")]);
    let (run, other) = (
        app.run("planner", "go").await,
        app.run("reader", "go").await,
    );
    let child = run.children().await[0].id().to_owned();
    let (end, other_end, child_end) = (&run.id()[28..], &other.id()[28..], &child[28..]);

    for (path, whole) in [
        (format!("/runs/{end}"), format!("/runs/{}", run.id())),
        (
            format!("/runs/{end}/tree"),
            format!("/runs/{}/tree", run.id()),
        ),
        (
            format!("/runs/{child_end}/messages"),
            format!("/runs/{child}/messages"),
        ),
        (
            format!("/runs?root={end}"),
            format!("/runs?root={}", run.id()),
        ),
        (
            format!("/runs/{end}/diff/{other_end}"),
            format!("/runs/{}/diff/{}", run.id(), other.id()),
        ),
    ] {
        assert_eq!(
            app.get(&path).await.json(),
            app.get(&whole).await.json(),
            "{path}"
        );
    }
    let body = json!({"at": {"run": child_end, "turn": 1}});
    app.provider.will("reader", [says("again")]);
    app.provider.will("planner", [says("done again")]);
    let forked = app
        .post(&format!("/runs/{end}/fork?wait=180"), &body)
        .await
        .json();
    assert_eq!(forked["forked_from"]["run"], run.id(), "{forked}");

    let (beginning, unknown) = (&run.id()[..8], "00000000");
    for path in [
        format!("/runs/{beginning}"),
        format!("/runs?root={beginning}"),
    ] {
        let reported = app.get(&path).await.problem(400);
        for id in [run.id(), other.id(), &child] {
            assert!(reported.contains(id), "{path}: {reported}");
        }
    }
    for path in [
        format!("/runs/{unknown}"),
        format!("/approvals?root={unknown}"),
    ] {
        app.get(&path).await.problem(404);
    }
    // What a program sends instead of an id by mistake.
    app.get("/runs/1").await.problem(404);
}
