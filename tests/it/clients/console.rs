//! The console without a browser: headers, escaping, and what a key sees. `tests/console.mjs` uses it in one.

use axed::config::key_hash::KeyHash;
use axed::domain::attachment::Digest;
use reqwest::Method;
use serde_json::json;

use crate::support::app::{ApiResponse, Setup, TestApp, send};
use crate::support::attachments::{PDF, PNG, base64, png_with_suffix};
use crate::support::provider::answer::{calls, delegates, says};

/// A page, requested with the key of this name.
async fn page_of(app: &TestApp, key: &str, path: &str) -> ApiResponse {
    let request = app.request(Method::GET, path);
    send(request.bearer_auth(format!("secret-of-{key}"))).await
}

fn with_keys(keys: &[(&str, &str)]) -> Setup {
    let sections = keys.iter().map(|(name, scopes)| {
        let sha256 = KeyHash::digest(format!("secret-of-{name}").as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = {scopes}\n")
    });
    TestApp::setup().config(&sections.collect::<String>())
}

/// Starts a run with the key of this name, and returns its id once it has ended.
async fn run_of(app: &TestApp, key: &str, agent: &str) -> String {
    let path = format!("/agents/{agent}/runs?wait=180");
    let request = app
        .request(Method::POST, &path)
        .json(&json!({"input": "go"}));
    let response = send(request.bearer_auth(format!("secret-of-{key}"))).await;
    assert_eq!(response.status, 200, "{}", response.text);
    response.json()["id"].as_str().expect("an id").to_owned()
}

#[tokio::test]
async fn pages_allow_no_inline_script_and_are_not_cached() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    for path in [
        "/ui/",
        "/ui/agents",
        "/ui/agents/solo",
        "/ui/agents/solo/chat",
        "/ui/approvals",
        "/ui/sessions",
        "/ui/evals",
        "/ui/compare",
        "/ui/usage",
        "/ui/system",
    ] {
        let page = app.get(path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
        let policy = page.header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
        assert!(
            !policy.contains("unsafe") && !policy.contains("http"),
            "{policy}"
        );
        assert_eq!(page.header("cache-control"), "private, no-store");
        assert!(!page.text.contains(" style=") && !page.text.contains("onclick"));
    }
    let missing = app.get("/ui/nowhere").await;
    assert_eq!(missing.status, 404);
    assert!(
        missing.text.contains("the console has no such page"),
        "{}",
        missing.text
    );
    assert_eq!(app.get("/ui/runs/run_x").await.status, 404);
    assert_eq!(app.get("/ui/?status=perhaps").await.status, 400);
}

#[tokio::test]
async fn the_root_leads_to_the_console_below_the_prefix() {
    let app = TestApp::setup().prefix("/axed").spawn().await;
    let page = app.get("/ui/").await;
    assert!(
        page.text.contains("href=\"/axed/ui/agents\""),
        "{}",
        page.text
    );
    assert!(page.text.contains("data-prefix=\"/axed\""));
    for root in ["", "/"] {
        let root = app.get(root).await;
        assert_eq!(root.status, 200, "{}", root.text);
        assert!(root.text.contains("<h1>Runs</h1>"), "{}", root.text);
    }
}

#[tokio::test]
async fn assets_are_kept_by_browsers_until_they_change() {
    let app = TestApp::spawn().await;
    let page = app.get("/ui/").await;
    let start = page.text.find("/ui/assets/").expect("an asset");
    let address = page.text[start..].split('"').next().expect("an address");
    let directory = address.rsplit_once('/').expect("a directory").0;
    for name in [
        "console.css",
        "run.css",
        "console.js",
        "live.js",
        "icon.svg",
    ] {
        let path = format!("{directory}/{name}");
        let asset = app.get(&path).await;
        assert_eq!(asset.status, 200, "{path}");
        assert_eq!(
            asset.header("cache-control"),
            "public, max-age=31536000, immutable"
        );
        let tag = asset.header("etag").to_owned();
        let again = app
            .request(Method::GET, &path)
            .header("if-none-match", &tag);
        assert_eq!(send(again).await.status, 304);
        let zipped = app
            .request(Method::GET, &path)
            .header("accept-encoding", "gzip");
        assert_eq!(send(zipped).await.header("content-encoding"), "gzip");
    }
    let old = app.get("/ui/assets/0123456789abcdef/console.css").await;
    assert_eq!(old.status, 404);
}

#[tokio::test]
async fn texts_of_models_and_clients_are_text() {
    const MARKUP: &str = "<script>alert(1)</script><img src=x onerror=alert(1)>";
    let app = TestApp::setup().agent("planner", "sub_agents = [\"reader\"]");
    let app = app.agent("reader", "").spawn().await;
    let answer = says(format!("\"'{MARKUP}"));
    app.provider
        .will("planner", [delegates([("reader", MARKUP)]), answer]);
    app.provider.will("reader", [says(MARKUP)]);
    let run = app
        .run_with(
            "planner",
            json!({"input": MARKUP, "labels": {"team": MARKUP}}),
        )
        .await;
    let id = run.id();
    for path in [
        "/ui/".to_owned(),
        format!("/ui/runs/{id}"),
        format!("/ui/runs/{id}?turn=1"),
        format!("/ui/runs/{id}?view=events"),
        format!("/ui/compare?a={id}&b={id}"),
        "/ui/?label=team%3D%22%3E%3Cscript%3E&session=%22%3E%3Cscript%3E".to_owned(),
    ] {
        let page = app.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        assert!(
            !page.text.contains("<script>") && !page.text.contains("<img"),
            "{path}"
        );
    }
    let page = app.get(&format!("/ui/runs/{id}")).await;
    assert!(page.text.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
}

#[tokio::test]
async fn a_person_sees_what_they_approve() {
    let hidden = |text: &str| {
        let is_hidden =
            |c: char| matches!(c, '\u{200b}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        text.contains(is_hidden)
    };
    let setup = TestApp::setup().agent(
        "careful",
        "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]",
    );
    let app = setup.file("work/here.txt", "here").spawn().await;
    let arguments =
        |content: String| json!({"path": "a\u{202e}txt.exe\u{200b}", "content": content});
    let answer = says("see \u{2067}here\u{2069}");
    app.provider.will(
        "careful",
        [
            calls([("write_file", arguments("b".to_owned()))]),
            answer,
            calls([("write_file", arguments("\u{202e}b".repeat(2_000)))]),
        ],
    );
    let run = app.start("careful", "go").await.id().to_owned();
    let path = format!("/ui/runs/{run}");
    let waits = |page: &ApiResponse| page.text.contains("Approve");
    app.get_until(&path, waits).await;
    for path in [&*path, "/ui/approvals"] {
        let page = app.get(path).await.text;
        assert!(page.contains("a\\u202etxt.exe\\u200b&quot;,\n"), "{page}");
        assert!(!hidden(&page), "{path}");
    }
    let pending = app.get("/approvals").await.json();
    let call = &pending["data"][0];
    assert_eq!(call["arguments"]["path"], "a\u{202e}txt.exe\u{200b}");
    let call = call["tool_call_id"].as_str().expect("an id");
    let decision = json!({"decision": "approve"});
    app.post(&format!("/runs/{run}/approvals/{call}"), &decision)
        .await;
    let ended = app.find(&run).await.wait_for_end().await;
    assert_eq!(ended.output(), "see \u{2067}here\u{2069}");
    let page = app.get(&path).await.text;
    assert!(page.contains("see \u{fffd}here\u{fffd}"), "{page}");
    assert!(!hidden(&page));

    let long = app.start("careful", "go").await.id().to_owned();
    let path = format!("/ui/runs/{long}");
    let page = app.get_until(&path, waits).await.text;
    assert!(page.contains("\\u202etxt.exe") && !hidden(&page));
    // The page has all of them, as a change of the file and as arguments, and sends their hash with the decision.
    assert_eq!(page.matches("\\u202eb").count(), 4_000);
    let pending = app.get("/approvals").await.json();
    let call = &pending["data"][0];
    assert_eq!(call["truncated"], true);
    let hash = call["arguments_hash"].as_str().expect("a hash");
    let field = format!("name=\"arguments_hash\" value=\"{hash}\"");
    assert!(page.contains(&field), "{page}");
}

#[tokio::test]
async fn a_step_has_an_address() {
    let app = TestApp::setup().agent("planner", "sub_agents = [\"reader\"]");
    let app = app.agent("reader", "").spawn().await;
    app.provider
        .will("planner", [delegates([("reader", "read")]), says("done")]);
    app.provider.will("reader", [says("read it")]);
    let run = app.run("planner", "go").await;
    let turn = app.get(&format!("/ui/runs/{}?turn=1", run.id())).await.text;
    let call = turn.find("?call=").map(|at| &turn[at..]).expect("a call");
    let call = call.split('"').next().expect("an address");
    let page = app.get(&format!("/ui/runs/{}{call}", run.id())).await;
    assert!(page.text.contains("Open the child run"), "{}", page.text);
    let turn = app.get(&format!("/ui/runs/{}?turn=2", run.id())).await;
    assert!(turn.text.contains("New since turn 1") && turn.text.contains("Fork here"));
    let raw = format!("/ui/runs/{}?turn=2&show=raw", run.id());
    assert!(app.get(&raw).await.text.contains("Request as sent"));
    assert_eq!(
        app.get(&format!("/ui/runs/{}?turn=9", run.id()))
            .await
            .status,
        404
    );
    assert_eq!(
        app.get(&format!("/ui/runs/{}?call=x", run.id()))
            .await
            .status,
        404
    );
}

#[tokio::test]
async fn runs_of_other_keys_do_not_exist() {
    let keys = [("ann", r#"["read", "run"]"#), ("bob", r#"["read", "run"]"#)];
    let app = with_keys(&keys).agent("solo", "").spawn().await;
    app.provider.will("solo", [says("secret answer")]);
    let run = run_of(&app, "ann", "solo").await;
    let own = page_of(&app, "ann", &format!("/ui/runs/{run}")).await;
    assert_eq!(own.status, 200);
    assert!(own.text.contains("secret answer"));
    for path in [
        format!("/ui/runs/{run}"),
        format!("/ui/runs/{run}?turn=1"),
        format!("/ui/compare?a={run}&b={run}"),
    ] {
        assert_eq!(page_of(&app, "bob", &path).await.status, 404, "{path}");
    }
    let list = page_of(&app, "bob", "/ui/").await;
    assert!(!list.text.contains(&run) && list.text.contains("No runs yet"));
}

#[tokio::test]
async fn evaluations_are_shown_to_their_key() {
    const MARKUP: &str = "<script>alert(1)</script>";
    const SCORER: &str =
        "[[scorers]]\nname = \"fine\"\nkind = \"assert\"\nexpect = {contains = \"good\"}\n";
    let keys = [("ann", r#"["read", "run"]"#), ("bob", r#"["read"]"#)];
    let app = with_keys(&keys).agent("solo", SCORER).agent("old", "");
    let app = app.spawn().await;
    app.provider.always("solo", |_| says("good"));
    app.provider.always("old", |_| says("bad"));
    let body = json!({
        "agent": "solo", "against": "old", "gates": ["fine.mean >= 2"],
        "cases": [{"id": MARKUP, "input": "a"}, {"id": "b", "input": "b"}],
    });
    let request = app.request(Method::POST, "/evals");
    let request = request.bearer_auth("secret-of-ann").json(&body);
    let accepted = send(request).await;
    assert_eq!(accepted.status, 202, "{}", accepted.text);
    let accepted = accepted.json();
    let id = accepted["id"].as_str().expect("an id");
    page_of(&app, "ann", &format!("/evals/{id}?wait=180")).await;

    let path = format!("/ui/evals/{id}");
    let page = page_of(&app, "ann", &path).await;
    assert_eq!(page.status, 200, "{}", page.text);
    for part in [
        "status completed",
        "status fell",
        "interval better",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "#difference",
    ] {
        assert!(page.text.contains(part), "{part} is not in {}", page.text);
    }
    assert!(!page.text.contains("<script>") && !page.text.contains(" style="));
    let list = page_of(&app, "ann", "/ui/evals?agent=solo").await.text;
    assert!(
        list.contains(&path) && list.contains("status fell"),
        "{list}"
    );
    let agent = page_of(&app, "ann", "/ui/agents/solo").await.text;
    assert!(agent.contains(&path) && agent.contains("evaluate-title"));

    assert_eq!(page_of(&app, "bob", &path).await.status, 404);
    let list = page_of(&app, "bob", "/ui/evals").await.text;
    assert!(
        !list.contains(id) && list.contains("No evaluations"),
        "{list}"
    );
    let agent = page_of(&app, "bob", "/ui/agents/solo").await.text;
    assert!(!agent.contains(id) && !agent.contains("evaluate-title"));
}

#[tokio::test]
async fn pictures_of_a_run_are_shown_to_its_key() {
    let keys = [("ann", r#"["read", "run"]"#), ("bob", r#"["read", "run"]"#)];
    let app = with_keys(&keys).agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("a grey pixel"), says("a copy")]);
    let start = |key: &str, data: &[u8]| {
        let input = json!([
            {"type": "text", "text": "What is this?"},
            {"type": "image", "media_type": "image/png", "data": base64(data), "name": "pixel.png"},
            {"type": "file", "media_type": "application/pdf", "data": base64(PDF), "name": "a.pdf"},
        ]);
        let request = app.request(Method::POST, "/agents/solo/runs?wait=180");
        let request = request.bearer_auth(format!("secret-of-{key}"));
        send(request.json(&json!({"input": input, "session": "talk"})))
    };
    let run = start("ann", PNG).await.json();
    let run = run["id"].as_str().expect("an id");
    start("bob", &png_with_suffix("copy")).await;

    let chat = page_of(&app, "ann", "/ui/agents/solo/chat?session=talk").await;
    let picture = format!("/ui/runs/{run}/pictures/{}", Digest::compute(PNG));
    assert!(chat.text.contains(&picture), "{}", chat.text);
    assert!(chat.text.contains("pixel.png") && chat.text.contains("a.pdf"));
    let shown = page_of(&app, "ann", &picture).await;
    assert_eq!(shown.status, 200, "{}", shown.text);
    assert_eq!(shown.text, String::from_utf8_lossy(PNG));
    for (name, value) in [
        ("content-type", "image/png"),
        ("x-content-type-options", "nosniff"),
        ("content-security-policy", "default-src 'none'; sandbox"),
        ("cache-control", "private, max-age=3600"),
        ("vary", "authorization"),
    ] {
        assert_eq!(shown.header(name), value, "{name}");
    }

    page_of(&app, "bob", &picture).await.problem(404);
    app.get(&picture).await.problem(401);
    for other in [
        Digest::compute(PDF).to_string(),
        Digest::compute(&png_with_suffix("copy")).to_string(),
        "pixel.png".to_owned(),
    ] {
        let path = format!("/ui/runs/{run}/pictures/{other}");
        page_of(&app, "ann", &path).await.problem(404);
    }
}

#[tokio::test]
async fn a_page_without_a_key_is_the_form_for_one() {
    let keys = [("ann", r#"["read"]"#), ("meter", r#"["metrics"]"#)];
    let app = with_keys(&keys).agent("solo", "").spawn().await;
    let page = app.get("/ui/agents").await;
    assert_eq!(page.status, 200);
    assert!(page.text.contains("data-sign-in") && !page.text.contains("solo"));
    assert!(page.header("set-cookie").is_empty());
    assert_eq!(page_of(&app, "nobody", "/ui/agents").await.status, 401);
    let refused = page_of(&app, "meter", "/ui/agents").await;
    assert_eq!(refused.status, 403);
    // The form for another key, and the button that forgets this one.
    for part in [
        "does not have the scope read",
        "data-sign-in",
        "data-sign-out",
    ] {
        assert!(
            refused.text.contains(part),
            "{part} is not in {}",
            refused.text
        );
    }
    let start = page.text.find("/ui/assets/").expect("an asset");
    let address = page.text[start..].split('"').next().expect("an address");
    assert_eq!(app.get(address).await.status, 200);
}

#[tokio::test]
async fn a_key_without_scopes_sees_no_buttons() {
    const ALL: &str = r#"["read", "run", "cancel"]"#;
    let setup = with_keys(&[("ann", ALL)]).agent("solo", "");
    let mut app = setup
        .agent(
            "scribe",
            "tools = [\"write_file\"]\napprove = [\"write_file\"]",
        )
        .spawn()
        .await;
    let write = json!({"path": "a", "content": "b"});
    app.provider
        .will("scribe", [calls([("write_file", write)])]);
    let start = app.request(Method::POST, "/agents/scribe/runs?wait=180");
    let start = start
        .bearer_auth("secret-of-ann")
        .json(&json!({"input": "go"}));
    let run = send(start).await.json();
    let path = format!("/ui/runs/{}", run["id"].as_str().expect("an id"));
    let buttons = ["Approve", "Deny", ">Cancel<", "Steer"];
    let page = page_of(&app, "ann", &path).await.text;
    assert!(buttons.iter().all(|button| page.contains(button)), "{page}");

    let file = app.path("config/axed.toml");
    let config = std::fs::read_to_string(file).expect("a configuration");
    app.write("config/axed.toml", &config.replace(ALL, r#"["read"]"#));
    app.restart().await;
    let page = page_of(&app, "ann", &path).await.text;
    assert!(page.contains("write_file"), "{page}");
    assert!(
        buttons.iter().all(|button| !page.contains(button)),
        "{page}"
    );
    let agent = page_of(&app, "ann", "/ui/agents/solo").await.text;
    assert!(agent.contains("Definition") && !agent.contains("Start a run"));
    let chat = page_of(&app, "ann", "/ui/agents/solo/chat").await;
    assert_eq!(chat.status, 403);
}

#[tokio::test]
async fn the_configuration_turns_the_console_off() {
    let app = TestApp::setup()
        .config("[clients]\nconsole = false")
        .spawn()
        .await;
    for path in ["/", "/ui/", "/ui/agents"] {
        let problem = app.get(path).await.problem(404);
        let expected = format!("there is no route \"{path}\"");
        assert!(problem.starts_with(&expected), "{problem}");
    }
}
