//! The start: checks, addresses, and routes without a key.

use std::process::Output;

use reqwest::Method;
use serde_json::json;

use crate::support::app::{TestApp, send};
use crate::support::daemon::{Daemon, axed_command};
use crate::support::provider::answer::says;
use crate::support::within_timeout;

/// Runs `axed` in an empty directory with this configuration, to its end.
async fn refused(config: &str, arguments: &[&str]) -> (Output, String) {
    let home = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(home.path().join("agents")).expect("a directory");
    std::fs::write(home.path().join("axed.toml"), config).expect("a file");
    let mut all = vec![
        "serve",
        "--config",
        "axed.toml",
        "--agents",
        "agents",
        "--data",
        "data",
    ];
    all.extend(arguments);
    let output = within_timeout("axed's refusal", axed_command(home.path(), &all).output())
        .await
        .expect("run axed");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

#[tokio::test]
async fn a_url_of_the_database_that_says_nonsense_stops_the_start() {
    for (query, part) in [
        (
            "sslmode=bogus",
            "has an sslmode that is none of disable, prefer",
        ),
        (
            "sslrootcert=/missing.pem&sslmode=verify-full",
            "/missing.pem",
        ),
        ("foo=1", "foo"),
    ] {
        let url = "postgres://axed@localhost/x";
        for (key, config) in [
            ("data.url", format!("url = \"{url}?{query}\"")),
            (
                "data.listen_url",
                format!("url = \"{url}\"\nlisten_url = \"{url}?{query}\""),
            ),
        ] {
            let config = format!("[data]\n{config}\n");
            let (output, said) = refused(&config, &["--listen", "127.0.0.1:0"]).await;
            assert_eq!(output.status.code(), Some(2), "{config}: {said}");
            let line = config.matches('\n').count();
            let place = format!("axed.toml:{line}:1: ");
            for part in [&place, &format!("{key} "), part] {
                assert!(said.contains(part), "{part} in {said}");
            }
            assert!(!said.contains("panicked"), "{said}");
        }
    }
}

#[tokio::test]
async fn a_password_with_an_unescaped_at_sign_is_not_shown() {
    let config = "[data]\nurl = \"postgres://axed:first@second@localhost/x\"\n\
                  listen_url = \"postgres://axed:third@fourth@localhost/x\"\n";
    let (output, said) = refused(config, &["--listen", "127.0.0.1:0"]).await;
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("axed.toml:2:1: data.url has"), "{said}");
    assert!(said.contains("as %40"), "{said}");
    assert!(
        !said.contains("second") && !said.contains("fourth"),
        "{said}"
    );
    assert!(
        said.contains("axed.toml:3:1: data.listen_url"),
        "both: {said}"
    );
}

#[tokio::test]
async fn an_invalid_configuration_stops_the_start() {
    for (config, parts) in [
        (
            "[server]\nlissten = \"127.0.0.1:0\"\n",
            vec!["axed.toml", "2", "lissten", "listen"],
        ),
        (
            "[server]\nmax_wait = \"long\"\n",
            vec!["axed.toml", "2", "max_wait"],
        ),
        ("[server\n", vec!["axed.toml", "1"]),
        (
            "[data]\ndurability = \"hope\"\n",
            vec!["axed.toml", "2", "durability"],
        ),
    ] {
        let (output, said) = refused(config, &["--listen", "127.0.0.1:0"]).await;
        assert_eq!(output.status.code(), Some(2), "{config}: {said}");
        for part in parts {
            assert!(said.contains(part), "{part} is missing in {said}");
        }
        assert!(output.stdout.is_empty());
    }
}

#[tokio::test]
async fn without_keys_only_loopback_is_served() {
    let (output, said) = refused("", &["--listen", "0.0.0.0:0"]).await;
    assert_eq!(output.status.code(), Some(2), "{said}");
    for way in ["--insecure-no-auth", "axed keys new"] {
        assert!(said.contains(way), "{said}");
    }
    assert!(output.stdout.is_empty());

    let home = tempfile::tempdir().expect("a directory");
    let arguments = [
        "serve",
        "--agents",
        ".",
        "--data",
        "data",
        "--listen",
        "0.0.0.0:0",
        "--insecure-no-auth",
    ];
    let daemon = Daemon::start(axed_command(home.path(), &arguments)).await;
    let url = daemon.url.replace("0.0.0.0", "127.0.0.1");
    let got = send(reqwest::Client::new().get(format!("{url}/livez"))).await;
    assert_eq!(got.status, 200);
}

#[tokio::test]
async fn the_environment_ranks_between_flags_and_the_file() {
    let app = TestApp::setup()
        .server("default_timeout = 300")
        .environment("AXED_SERVER__DEFAULT_TIMEOUT", "500")
        .environment("AXED_SERVER__MAX_WAIT", "")
        .environment("ANTHROPIC_API_KEY", "from-the-environment")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);

    let dry = app.post("/agents/solo/dry-run", &json!({})).await.json();
    assert_eq!(dry["limits"]["timeout"], 500, "{dry}");
    app.run("solo", "go").await;
    let sent = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(sent.api_key(), Some("from-the-environment"));
}

#[tokio::test]
async fn health_needs_no_key_from_the_start() {
    let app = TestApp::spawn().await;
    assert_eq!(app.get("/livez").await.status, 200);
    let ready = app.get("/readyz").await;
    assert_eq!(ready.status, 200, "{}", ready.text);
    let version = app.get("/version").await;
    assert_eq!(version.status, 200);
    assert!(
        version.text.contains(env!("CARGO_PKG_VERSION")),
        "{}",
        version.text
    );
}

#[tokio::test]
async fn every_route_and_link_has_the_prefix() {
    let app = TestApp::setup()
        .prefix("/ai/axed")
        .agent("solo", "")
        .spawn()
        .await;
    app.provider.will("solo", [says("done")]);

    let got = app.post("/agents/solo/runs?wait=180", &json!({})).await;

    assert_eq!(got.status, 200, "{}", got.text);
    let run = got.json();
    let id = run["id"].as_str().expect("an id");
    assert_eq!(run["links"]["self"], format!("/ai/axed/runs/{id}"));
    assert_eq!(got.location(), format!("/ai/axed/runs/{id}"));
    assert_eq!(app.find(id).await.events().await.len(), 5);
    assert_eq!(app.get("/livez").await.status, 200);
    let bare = |path: &str| app.client.get(format!("{}{path}", app.daemon.url));
    for (path, status) in [
        ("/livez", 200),
        ("/readyz", 200),
        ("/agents", 404),
        ("/version", 404),
        ("/ai/agents", 404),
        ("/ai/axedx/agents", 404),
    ] {
        assert_eq!(send(bare(path)).await.status, status, "{path}");
    }
    send(bare(&format!("/runs/{id}"))).await.problem(404);
}

#[tokio::test]
async fn every_invalid_request_gets_a_problem() {
    let app = TestApp::setup()
        .server("max_body = 1000")
        .agent("solo", "")
        .spawn()
        .await;
    let post = |path: &str| app.request(Method::POST, path);
    let runs = "/agents/solo/runs";

    app.get("/nowhere").await.problem(404);
    app.get("/agents/ghost").await.problem(404);
    app.get("/runs/run_none").await.problem(404);
    let wrong = send(app.request(Method::PUT, "/runs")).await;
    wrong.problem(405);
    assert!(wrong.header("allow").contains("GET"), "{:?}", wrong.headers);
    let json = |body: &'static str| {
        post(runs)
            .header("content-type", "application/json")
            .body(body)
    };
    send(json("{\"input\": ")).await.problem(400);
    send(json("[1, 2]")).await.problem(422);
    send(json("{\"input\": 7}")).await.problem(422);
    let large = post(runs).json(&json!({"input": "x".repeat(2000)}));
    send(large).await.problem(413);
    let odd = post(runs)
        .header("content-type", "application/xml")
        .body("<go/>");
    send(odd).await.problem(415);
}

#[tokio::test]
async fn a_request_id_is_kept() {
    let app = TestApp::spawn().await;
    let request = app
        .request(Method::GET, "/agents")
        .header("x-request-id", "mine-1");
    assert_eq!(send(request).await.header("x-request-id"), "mine-1");
}
