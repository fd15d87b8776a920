//! MCP servers that require a login of the operator: `axed auth`, and what the daemon does with what it stores.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::cli::home::{Ended, ended};
use crate::support::app::{Setup, TestApp};
use crate::support::daemon::axed_command;
use crate::support::eventually;
use crate::support::gate::Gate;
use crate::support::oauth_server::{OauthServer, REFRESH_TOKEN, TOKEN};
use crate::support::provider::answer::{calls, says};
use crate::tools::mcp::result_of;

const KEY: &str = "5c1e0f0a5c1e0f0a5c1e0f0a5c1e0f0a5c1e0f0a5c1e0f0a5c1e0f0a5c1e0f0a";
const LOG_IN: &str = "the operator can log in with: axed auth login tickets";

/// A daemon with the agent `a`, whose server `tickets` requires a login.
pub fn with_login(url: &str, more: &str) -> Setup {
    let agent = format!(
        "sub_agents = [\"b\"]\n[[mcp_servers]]\nname = \"tickets\"\ntransport = \"streamable-http\"\nurl = \"{url}\"\nopen_timeout = 120\n\
         [mcp_servers.oauth]\ngrant = \"device_code\"\nclient_id = \"axed\"\n{more}"
    );
    TestApp::setup()
        .agent("a", &agent)
        .environment("AXED_LOGIN_KEY", KEY)
}

async fn axed(app: &TestApp, key: &str, arguments: &[&str]) -> Ended {
    let mut command = axed_command(&app.path("."), arguments);
    command.env("AXED_LOGIN_KEY", key);
    ended(command).await
}

async fn auth_with_key(app: &TestApp, key: &str, arguments: &[&str]) -> Ended {
    axed(app, key, &[&["auth"], arguments].concat()).await
}

pub async fn auth(app: &TestApp, arguments: &[&str]) -> Ended {
    auth_with_key(app, KEY, arguments).await
}

/// A daemon whose operator has logged in.
pub async fn logged_in(server: &OauthServer) -> TestApp {
    let app = with_login(&server.url(), "").spawn().await;
    auth(&app, &["login", "tickets"]).await.with(0);
    app
}

/// What the model learns of a call that cannot be made.
async fn unavailable(app: &TestApp) -> String {
    let (text, is_error) = result_of(app, "tickets__find", json!({})).await;
    assert!(is_error, "{text}");
    assert_no_secret(app, &text);
    text
}

pub async fn assert_found(app: &TestApp) {
    let answer = result_of(app, "tickets__find", json!({})).await;
    assert_eq!(answer, ("found".to_owned(), false), "{}", app.daemon.log());
}

pub fn assert_no_secret(app: &TestApp, text: &str) {
    let log = app.daemon.log();
    let is_secret = |text: &str| text.contains("s3cret") || text.contains(KEY);
    assert!(!is_secret(text) && !is_secret(&log), "{text}\n{log}");
}

/// The files with logins.
pub fn files(app: &TestApp) -> Vec<PathBuf> {
    let entries = fs::read_dir(app.path("data/logins"));
    let paths = entries.into_iter().flatten().flatten().map(|it| it.path());
    let is_login = |path: &PathBuf| path.extension().is_some_and(|it| it == "login");
    paths.filter(is_login).collect()
}

/// The value of a field in each request of a grant to the token endpoint.
fn sent(server: &OauthServer, grant: &str, name: &str) -> Vec<String> {
    let requests = server.token_requests().into_iter();
    let of_grant = requests.filter(|it| it["grant_type"] == grant);
    of_grant
        .map(|it| it.get(name).cloned().unwrap_or_default())
        .collect()
}

fn refreshes(server: &OauthServer) -> Vec<String> {
    sent(server, "refresh_token", "refresh_token")
}

#[tokio::test]
async fn an_operator_logs_in_and_the_running_daemon_uses_it() {
    let (server, _tasks) = OauthServer::start().await;
    server.with(|it| it.poll_errors.push_back("authorization_pending"));
    let app = with_login(&server.url(), "").spawn().await;
    assert!(unavailable(&app).await.ends_with(LOG_IN));
    let listed = auth(&app, &["list"]).await;
    assert!(listed.with(0).contains("tickets\tnone\t"), "{}", listed.out);
    let check = axed(&app, KEY, &["agents", "check"]).await;
    let expected = "MCP server tickets: nobody has logged in; use axed auth login tickets";
    assert!(check.with(0).contains(expected), "{}", check.out);
    let warnings = async || app.get("/agents/a").await.json()["warnings"].to_string();
    assert!(warnings().await.contains(expected));
    let system = app.get("/ui/system").await.text;
    assert!(
        system.contains("<code>axed auth login tickets</code>"),
        "{system}"
    );

    let login = auth(&app, &["login", "tickets"]).await;
    let base = &server.base;
    let expected = format!(
        "Open {base}/enter and enter the code WDJB-MJHT\nor open {base}/enter?user_code=WDJB-MJHT\n\
         Logged in to tickets at {base}/mcp: renewed by axed\nStored, encrypted, in data/logins/tickets-"
    );
    assert!(login.with(0).starts_with(&expected), "{}", login.out);
    assert!(
        login.out.ends_with(" (scopes: tickets:read)\n"),
        "{}",
        login.out
    );
    assert_no_secret(&app, &format!("{}{}", login.out, login.err));
    let begun = server.with(|it| it.device_requests.clone());
    assert_eq!(begun.len(), 1);
    assert_eq!(begun[0]["client_id"], "axed");
    assert_eq!(begun[0]["scope"], "tickets:read");
    assert_eq!(begun[0]["resource"], server.url());
    let grant = "urn:ietf:params:oauth:grant-type:device_code";
    assert_eq!(
        sent(&server, grant, "resource"),
        [server.url(), server.url()]
    );
    // The daemon takes it up at the next run, with the token that is in the file.
    assert_found(&app).await;
    assert_eq!(refreshes(&server), [""; 0]);

    // A run without a daemon has its own data directory, and the same logins.
    app.provider
        .will("a", [calls([("tickets__find", json!({}))]), says("done")]);
    let run = axed(&app, KEY, &["run", "a", "go"]).await;
    assert_eq!(run.with(0), "done\n");
    let last = app.provider.requests_for("a").pop().expect("a request");
    assert_eq!(last.tool_results(), ["found"]);

    let check = axed(&app, KEY, &["agents", "check"]).await;
    assert!(!check.with(0).contains("MCP server"), "{}", check.out);
    let system = app.get("/ui/system").await.text;
    assert!(system.contains("<td>renewed by axed</td>"), "{system}");
    assert_no_secret(&app, &system);
    let files = files(&app);
    assert_eq!(files.len(), 1, "{files:?}");
    let text = fs::read_to_string(&files[0]).expect("the login");
    assert!(!text.contains("s3cret"), "{text}");
    let mode = |path: &std::path::Path| fs::metadata(path).expect("a file").permissions().mode();
    assert_eq!(mode(&files[0]) & 0o777, 0o600);
    assert_eq!(mode(&app.path("data/logins")) & 0o777, 0o700);
    let listed = auth(&app, &["list", "-o", "json"]).await;
    let listed: Value = serde_json::from_str(listed.with(0)).expect("JSON");
    let row = &listed["data"][0];
    assert_eq!(row["agents"], json!(["a"]));
    assert_eq!(row["login"]["scopes"], json!(["tickets:read"]));
    assert_eq!(row["login"]["issuer"], json!(base));
    assert_eq!(row["login"]["renewable"], true);
    assert_no_secret(&app, &listed.to_string());
}

#[tokio::test]
async fn fifty_runs_share_a_refresh_and_each_refresh_token_is_used_once() {
    let (server, _tasks) = OauthServer::start().await;
    let mut app = logged_in(&server).await;
    app.provider.always("a", |request| match request.turn() {
        1 => calls([("tickets__find", json!({}))]),
        _ => says("done"),
    });
    let all = async |app: &TestApp| {
        let runs = (0..50).map(|_| app.run("a", "go"));
        for run in join_all(runs).await {
            assert_eq!(run.output(), "done");
        }
        for request in app.provider.requests_for("a") {
            let results = request.tool_results();
            assert!(results.iter().all(|it| it == "found"), "{results:?}");
        }
    };
    all(&app).await;
    assert_eq!(refreshes(&server), [""; 0]);
    server.with(|it| it.valid.clear());
    all(&app).await;
    assert_eq!(refreshes(&server), [format!("{REFRESH_TOKEN}1")]);
    assert_eq!(sent(&server, "refresh_token", "resource"), [server.url()]);
    // Another daemon finds the new refresh token.
    app.restart().await;
    server.with(|it| it.valid.clear());
    all(&app).await;
    let expected = [1, 2].map(|number| format!("{REFRESH_TOKEN}{number}"));
    assert_eq!(refreshes(&server), expected);
    assert_no_secret(&app, "");
}

#[tokio::test]
async fn a_token_is_refreshed_before_it_expires() {
    let (server, _tasks) = OauthServer::start().await;
    server.with(|it| it.lifetime = Some(0));
    let app = logged_in(&server).await;
    assert_found(&app).await;
    let refused = server.with(|it| it.refused);
    assert_eq!(
        refused, 1,
        "only the question of axed auth login where tokens come from"
    );
    let used = refreshes(&server);
    let expected = (1..=used.len()).map(|number| format!("{REFRESH_TOKEN}{number}"));
    assert_eq!(used, expected.collect::<Vec<_>>());
}

#[tokio::test]
async fn a_refused_refresh_is_not_repeated_until_the_operator_logs_in() {
    let (server, _tasks) = OauthServer::start().await;
    let app = logged_in(&server).await;
    server.with(|it| {
        it.valid.clear();
        it.refresh_tokens.clear();
    });
    let why = unavailable(&app).await;
    let expected = format!(
        "its login has ended: {}/token refused: invalid_grant: as the story says; {LOG_IN}",
        server.base
    );
    assert!(why.ends_with(&expected), "{why}");
    let again = unavailable(&app).await;
    assert!(again.ends_with(&expected), "{again}");
    assert_eq!(refreshes(&server).len(), 1);
    auth(&app, &["login", "tickets"]).await.with(0);
    assert_found(&app).await;
    // A server that refuses every token is not sent tokens for ever.
    let body = json!({"access_token": format!("{TOKEN}unknown"), "token_type": "Bearer"});
    server.with(|it| {
        it.valid.clear();
        it.instead.insert("token", (200, body.to_string()));
    });
    let why = unavailable(&app).await;
    let expected = format!("it refuses the access token of its login; {LOG_IN}");
    assert!(why.ends_with(&expected), "{why}");
    // One for the list of tools, one for the call.
    assert_eq!(refreshes(&server).len(), 3);
}

#[tokio::test]
async fn an_authorization_server_that_fails_ends_no_login() {
    let (server, _tasks) = OauthServer::start().await;
    let app = logged_in(&server).await;
    server.with(|it| {
        it.valid.clear();
        it.instead.insert("token", (503, "oops".to_owned()));
    });
    let why = unavailable(&app).await;
    assert!(why.ends_with("/token answered with HTTP 503"), "{why}");
    server.with(|it| it.instead.clear());
    eventually("the next attempt", async || {
        let (text, _) = result_of(&app, "tickets__find", json!({})).await;
        (text == "found").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_daemon_that_is_killed_during_a_refresh_keeps_the_login() {
    let (server, _tasks) = OauthServer::start().await;
    let mut app = logged_in(&server).await;
    let gate = Gate::closed();
    server.with(|it| {
        it.valid.clear();
        it.keeps_used = true;
        it.refresh_gate = Some(gate.clone());
    });
    app.provider
        .will("a", [calls([("tickets__find", json!({}))]), says("done")]);
    let run = app.start("a", "go").await.id().to_owned();
    eventually("the refresh", async || {
        (!refreshes(&server).is_empty()).then_some(())
    })
    .await;
    app.daemon.kill().await;
    gate.open();
    app.restart_after_end().await;
    app.find(&run).await.wait_for_end().await;
    assert_found(&app).await;
    let used = refreshes(&server);
    assert!(
        used.iter().all(|it| *it == format!("{REFRESH_TOKEN}1")),
        "{used:?}"
    );
}

#[tokio::test]
async fn a_logout_revokes_the_tokens_and_the_daemon_stops_using_them() {
    let (server, _tasks) = OauthServer::start().await;
    let app = logged_in(&server).await;
    assert_found(&app).await;
    let logout = auth(&app, &["logout", "tickets"]).await;
    assert_eq!(
        logout.with(0),
        "Logged out of tickets: the tokens are revoked\n"
    );
    let expected = [
        (format!("{REFRESH_TOKEN}1"), "refresh_token".to_owned()),
        (format!("{TOKEN}1"), "access_token".to_owned()),
    ];
    assert_eq!(server.with(|it| it.revoked.clone()), expected);
    assert!(files(&app).is_empty());
    assert!(
        unavailable(&app)
            .await
            .ends_with(&format!("it needs a login; {LOG_IN}"))
    );
    let again = auth(&app, &["logout", "tickets"]).await;
    assert_eq!(again.with(0), "There is no login at tickets\n");

    // Without a way to revoke it, the daemon forgets a token nevertheless.
    server.with(|it| it.never_revokes = true);
    auth(&app, &["login", "tickets"]).await.with(0);
    assert_found(&app).await;
    let logout = auth(&app, &["logout", "tickets"]).await;
    let expected = "Deleted the login at tickets; its tokens stay valid until they expire\n";
    assert_eq!(logout.with(0), expected);
    assert!(unavailable(&app).await.ends_with(LOG_IN));

    // A login stays if its tokens cannot be revoked now.
    server.with(|it| {
        it.never_revokes = false;
        it.instead.insert("revoke", (503, String::new()));
    });
    auth(&app, &["login", "tickets"]).await.with(0);
    let logout = auth(&app, &["logout", "tickets"]).await;
    assert_eq!(logout.code, 1, "{}", logout.err);
    let expected = "/revoke answered with HTTP 503; --force deletes the login nevertheless\n";
    assert!(logout.err.ends_with(expected), "{}", logout.err);
    assert_found(&app).await;
    auth(&app, &["logout", "tickets", "--force"]).await.with(0);
    assert!(files(&app).is_empty());
}

#[tokio::test]
async fn a_login_is_bound_to_its_key_and_its_file() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_login(&server.url(), "").spawn().await;
    for (key, why) in [
        (
            " ",
            "the environment variable AXED_LOGIN_KEY with the key that encrypts logins is not set",
        ),
        (
            "abc",
            "the key in AXED_LOGIN_KEY must be 64 hexadecimal digits",
        ),
    ] {
        let login = auth_with_key(&app, key, &["login", "tickets"]).await;
        assert_eq!(login.code, 2, "{}", login.err);
        assert!(login.err.contains(why), "{}", login.err);
    }
    assert!(server.with(|it| it.device_requests.is_empty()));

    let other_key = KEY.replace('5', "6");
    auth_with_key(&app, &other_key, &["login", "tickets"])
        .await
        .with(0);
    let file = files(&app).remove(0);
    let expected = format!(
        "the login in {} was encrypted with another key than that in AXED_LOGIN_KEY",
        file.strip_prefix(app.path(".")).unwrap_or(&file).display()
    );
    let expected = expected.rsplit('/').next().unwrap_or_default();
    let why = unavailable(&app).await;
    assert!(why.contains(expected) && why.ends_with(LOG_IN), "{why}");
    let listed = auth(&app, &["list"]).await;
    assert!(listed.with(0).contains(expected), "{}", listed.out);

    auth(&app, &["login", "tickets"]).await.with(0);
    assert_found(&app).await;
    let text = fs::read_to_string(&file).expect("the login");
    let (header, sealed) = text.split_once('\n').expect("two lines");
    let flipped = sealed.replacen(
        &sealed[40..41],
        if &sealed[40..41] == "A" { "B" } else { "A" },
        1,
    );
    let elsewhere = header.replace(&server.base, "https://attacker.example");
    for damaged in [
        String::new(),
        header.to_owned(),
        format!("{header}\n"),
        format!("{header}\n{flipped}"),
        format!("{elsewhere}\n{sealed}"),
        format!("{header}\n{}", &sealed[..sealed.len() / 2]),
    ] {
        fs::write(&file, &damaged).expect("damage the login");
        let why = unavailable(&app).await;
        assert!(
            why.contains(" is damaged; ") && why.ends_with(LOG_IN),
            "{why}\n{damaged}"
        );
    }
    let logout = auth(&app, &["logout", "tickets"]).await;
    assert_eq!(logout.code, 1, "{}", logout.err);
    auth(&app, &["login", "tickets"]).await.with(0);
    assert_found(&app).await;
}

#[tokio::test]
async fn a_login_holds_for_the_agents_that_define_the_server_alike() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_login(&server.url(), "").spawn().await;
    let writer = format!(
        "[[mcp_servers]]\nname = \"tickets\"\ntransport = \"streamable-http\"\nurl = \"{}\"\n\
         [mcp_servers.oauth]\ngrant = \"device_code\"\nclient_id = \"axed\"\nscopes = [\"tickets:write\"]\n",
        server.url()
    );
    app.write_agent("writer", &writer);
    let login = auth(&app, &["login", "tickets"]).await;
    assert_eq!(login.code, 2, "{}", login.err);
    assert!(
        login.err.contains("choose one with --agent"),
        "{}",
        login.err
    );
    auth(&app, &["login", "tickets", "--agent", "a"])
        .await
        .with(0);
    auth(&app, &["login", "tickets", "--agent", "writer"])
        .await
        .with(0);
    let scopes = server.with(|it| {
        it.device_requests
            .iter()
            .map(|it| it["scope"].clone())
            .collect::<Vec<_>>()
    });
    assert_eq!(scopes, ["tickets:read", "tickets:write"]);
    assert_eq!(files(&app).len(), 2);

    // A login gets no more scopes than the operator has confirmed.
    server.with(|it| it.call_scope = Some("tickets:write".to_owned()));
    let why = unavailable(&app).await;
    let expected = format!(
        "its login has the scopes \"tickets:read\", and the server demands \"tickets:write\"; {LOG_IN}"
    );
    assert!(why.ends_with(&expected), "{why}");
    assert_eq!(refreshes(&server), [""; 0]);

    // The login of an agent that is gone can be deleted.
    fs::remove_file(app.path("agents/writer.toml")).expect("delete the agent");
    let listed = auth(&app, &["list"]).await;
    assert!(listed.with(0).contains("/mcp\t-\n"), "{}", listed.out);
    auth(&app, &["logout", "tickets"]).await.with(0);
    fs::remove_file(app.path("agents/a.toml")).expect("delete the agent");
    let logout = auth(&app, &["logout", "tickets"]).await;
    assert_eq!(logout.code, 2, "{}", logout.err);
    auth(&app, &["logout", "tickets", "--force"]).await.with(0);
    assert!(files(&app).is_empty());
}
