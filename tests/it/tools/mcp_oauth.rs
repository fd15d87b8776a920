//! MCP servers that require OAuth: tokens for the client's own secret, their renewal, and metadata that must not be
//! used.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::oauth_server::{OauthServer, TOKEN};
use crate::support::provider::answer::{calls, says};
use crate::tools::mcp::result_of;

const SECRET: &str = "s3cret-of-the-client";

/// A daemon with the agent `a`, whose server `tickets` requires OAuth.
fn with_oauth(url: &str, more: &str) -> Setup {
    let agent = format!(
        "sub_agents = [\"b\"]\n[[mcp_servers]]\nname = \"tickets\"\ntransport = \"streamable-http\"\nurl = \"{url}\"\nopen_timeout = 120\n\
         [mcp_servers.oauth]\ngrant = \"client_credentials\"\nclient_id = \"axed:1\"\n\
         client_secret_env = \"STORY_SECRET\"\n{more}"
    );
    TestApp::setup()
        .agent("a", &agent)
        .environment("STORY_SECRET", SECRET)
}

/// The warnings of a run that cannot reach the server.
async fn warnings(app: &TestApp) -> String {
    app.provider.will("a", [says("done")]);
    let run = app.run("a", "go").await;
    let events = run.events().await;
    let warned = events.iter().filter(|it| it.kind() == "tools.warning");
    let warned: Vec<&str> = warned.filter_map(|it| it["message"].as_str()).collect();
    warned.join("\n")
}

fn assert_no_secret(app: &TestApp, text: &str) {
    let log = app.daemon.log();
    assert!(
        !text.contains("s3cret") && !log.contains("s3cret"),
        "{text}\n{log}"
    );
}

fn field(form: &BTreeMap<String, String>, name: &str) -> String {
    form.get(name).cloned().unwrap_or_default()
}

#[tokio::test]
async fn a_server_with_oauth_gets_a_token_for_the_clients_secret() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_oauth(&server.url(), "").spawn().await;
    let answer = result_of(&app, "tickets__find", json!({})).await;
    assert_eq!(answer, ("found".to_owned(), false));
    let requests = server.token_requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    assert_eq!(field(&requests[0], "grant_type"), "client_credentials");
    assert_eq!(field(&requests[0], "resource"), server.url());
    assert_eq!(field(&requests[0], "scope"), "tickets:read");
    // The id and the secret are encoded as forms are: axed%3A1:s3cret-of-the-client.
    assert_eq!(
        field(&requests[0], "authorization"),
        "Basic YXhlZCUzQTE6czNjcmV0LW9mLXRoZS1jbGllbnQ="
    );
    let answered = server.with(|it| it.answered.clone());
    let first = format!("{TOKEN}1");
    assert!(
        answered.iter().all(|(_, token)| *token == first),
        "{answered:?}"
    );
    let shown = app.get("/agents/a").await.json();
    let expected = json!({"grant": "client_credentials", "scopes": []});
    assert_eq!(shown["mcp_servers"][0]["oauth"], expected);
    assert_no_secret(&app, &shown.to_string());
}

#[tokio::test]
async fn the_file_may_name_the_token_endpoint_and_the_method() {
    let (server, _tasks) = OauthServer::start().await;
    let more = format!(
        "token_url = \"{}/token\"\nclient_auth = \"client_secret_post\"\nscopes = [\"a\", \"b\"]\n",
        server.base
    );
    server.with(|it| {
        it.instead.insert("server", (404, String::new()));
        it.instead.insert("resource", (404, String::new()));
    });
    let app = with_oauth(&server.url(), &more).spawn().await;
    let answer = result_of(&app, "tickets__find", json!({})).await;
    assert_eq!(answer, ("found".to_owned(), false));
    let requests = server.token_requests();
    assert_eq!(field(&requests[0], "client_secret"), SECRET);
    assert_eq!(field(&requests[0], "client_id"), "axed:1");
    assert_eq!(field(&requests[0], "scope"), "a b");
    assert!(!requests[0].contains_key("authorization"));
    assert_eq!(
        server.with(|it| it.refused),
        0,
        "the token is there before the first request"
    );
}

#[tokio::test]
async fn fifty_runs_share_one_renewal() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_oauth(&server.url(), "").spawn().await;
    app.provider.always("a", |request| match request.turn() {
        1 => calls([("tickets__find", json!({}))]),
        _ => says("done"),
    });
    let all = async || {
        let runs = (0..50).map(|_| app.run("a", "go"));
        for run in join_all(runs).await {
            assert_eq!(run.output(), "done");
        }
    };
    all().await;
    assert_eq!(server.token_requests().len(), 1);
    server.with(|it| it.valid.clear());
    all().await;
    assert_eq!(server.token_requests().len(), 2);
    for request in app.provider.requests_for("a") {
        let results = request.tool_results();
        assert!(results.iter().all(|it| it == "found"), "{results:?}");
    }
    assert_no_secret(&app, "");
}

#[tokio::test]
async fn a_token_that_expires_is_renewed_before_a_request() {
    let (server, _tasks) = OauthServer::start().await;
    server.with(|it| it.lifetime = Some(0));
    let app = with_oauth(&server.url(), "").spawn().await;
    for _ in 0..2 {
        let answer = result_of(&app, "tickets__find", json!({})).await;
        assert_eq!(answer, ("found".to_owned(), false));
    }
    // Only the first request shows where tokens come from; each one has its own token.
    assert_eq!(server.with(|it| it.refused), 1);
    let answered = server.with(|it| it.answered.clone());
    let mut tokens: Vec<String> = answered.into_iter().map(|(_, token)| token).collect();
    let requests = tokens.len();
    tokens.sort();
    tokens.dedup();
    assert_eq!(tokens.len(), requests);
}

#[tokio::test]
async fn a_call_that_needs_more_scopes_requests_them() {
    let (server, _tasks) = OauthServer::start().await;
    server.with(|it| it.call_scope = Some("tickets:write".to_owned()));
    let app = with_oauth(&server.url(), "").spawn().await;
    for _ in 0..2 {
        let answer = result_of(&app, "tickets__find", json!({})).await;
        assert_eq!(answer, ("found".to_owned(), false));
    }
    let scopes: Vec<String> = server
        .token_requests()
        .iter()
        .map(|it| field(it, "scope"))
        .collect();
    assert_eq!(scopes, ["tickets:read", "tickets:read tickets:write"]);
    // The authorization server grants less than requested: the call fails, and does not repeat for ever.
    server.with(|it| {
        it.valid.clear();
        let token = format!("{TOKEN}less");
        it.valid
            .insert(token.clone(), ["tickets:read".to_owned()].into());
        let body = json!({"access_token": token, "token_type": "bearer", "scope": "tickets:read"});
        it.instead.insert("token", (200, body.to_string()));
    });
    let (why, is_error) = result_of(&app, "tickets__find", json!({})).await;
    assert!(is_error, "{why}");
    assert!(
        why.contains("the server demands \"tickets:write\""),
        "{why}"
    );
    assert_no_secret(&app, &why);
}

#[tokio::test]
async fn metadata_that_must_not_be_used_is_named() {
    let metadata = |base: &str, change: Value| {
        let mut metadata = json!({"issuer": base, "token_endpoint": format!("{base}/token")});
        for (key, value) in change.as_object().expect("an object") {
            metadata[key] = value.clone();
        }
        (200, metadata.to_string())
    };
    let resource = |url: &str| (200, json!({"resource": url}).to_string());
    let huge = format!("{{\"issuer\": \"{}\"}}", "x".repeat(1 << 20));
    type Change<'a> = Box<dyn Fn(&str) -> (&'static str, (u16, String)) + 'a>;
    let cases: Vec<(Change<'_>, &str)> = vec![
        (
            Box::new(|base| {
                (
                    "server",
                    metadata(base, json!({"issuer": "https://honest.example"})),
                )
            }),
            "is of another issuer: https://honest.example instead of http://127.0.0.1:",
        ),
        (
            Box::new(|base| {
                (
                    "server",
                    metadata(base, json!({"token_endpoint": "http://10.0.0.1/token"})),
                )
            }),
            "is refused: 10.0.0.1 must be reached by https",
        ),
        (
            Box::new(|base| {
                (
                    "server",
                    metadata(base, json!({"token_endpoint": "https://169.254.169.254/"})),
                )
            }),
            "is refused: 169.254.169.254 is at 169.254.169.254, which is not a public address",
        ),
        (
            Box::new(|_| ("server", (200, huge.clone()))),
            "answered with more than 262144 bytes",
        ),
        (
            Box::new(|_| ("server", (404, String::new()))),
            "has no metadata; set oauth.token_url",
        ),
        (
            Box::new(|_| ("resource", resource("https://other.example/mcp"))),
            "is for another resource: https://other.example/mcp",
        ),
        (
            Box::new(|base| ("resource", resource(&format!("{base}/mcp-of-others")))),
            "is for another resource: ",
        ),
        (
            Box::new(|_| ("resource", (200, "<html>".to_owned()))),
            "answered with something else than the metadata",
        ),
    ];
    for (change, expected) in cases {
        let (server, _tasks) = OauthServer::start().await;
        let (path, answer) = change(&server.base);
        server.with(|it| it.instead.insert(path, answer));
        let app = with_oauth(&server.url(), "").spawn().await;
        let why = warnings(&app).await;
        assert!(
            why.contains(expected) && why.contains("MCP server \"tickets\""),
            "{why}"
        );
        assert!(server.token_requests().is_empty(), "{why}");
        assert_no_secret(&app, &why);
    }
}

/// A server that names the authorization server of an attacker would otherwise get the client's secret.
#[tokio::test]
async fn the_secret_goes_only_to_the_authorization_server_of_the_file() {
    let (server, _tasks) = OauthServer::start().await;
    let elsewhere = "https://attacker.example".to_owned();
    server.with(|it| it.authorization_servers = Some(vec![elsewhere]));
    let app = with_oauth(&server.url(), "").spawn().await;
    let why = warnings(&app).await;
    let expected = "it names the authorization server https://attacker.example, which is on another host; if the \
                    client is registered there, set oauth.issuer in the agent's file";
    assert!(why.contains(expected), "{why}");
    let issuer = format!("issuer = \"{}\"\n", server.base);
    let app = with_oauth(&server.url(), &issuer).spawn().await;
    let why = warnings(&app).await;
    let expected = format!(
        "it is not a resource of oauth.issuer {}: it names https://attacker.example",
        server.base
    );
    assert!(why.contains(&expected), "{why}");
    assert!(server.token_requests().is_empty());
    // An issuer in the file needs no metadata of the resource.
    server.with(|it| it.instead.insert("resource", (404, String::new())));
    let app = with_oauth(&server.url(), &issuer).spawn().await;
    let answer = result_of(&app, "tickets__find", json!({})).await;
    assert_eq!(answer, ("found".to_owned(), false));
}

#[tokio::test]
async fn a_refused_client_is_explained_without_its_secret() {
    let answers = [
        (
            400,
            format!(
                "{{\"error\": \"invalid_client\", \"error_description\": \"{SECRET} is wrong\"}}"
            ),
            "/token refused: invalid_client: *** is wrong",
        ),
        // It shows the header of the request.
        (
            400,
            "{\"error\": \"invalid_client\", \"error_description\": \"not \
             Basic YXhlZCUzQTE6czNjcmV0LW9mLXRoZS1jbGllbnQ=\"}"
                .to_owned(),
            "/token refused: invalid_client: not Basic ***",
        ),
        (500, "oops".to_owned(), "/token answered with HTTP 500"),
        (307, String::new(), "/token answered with HTTP 307"),
        (
            200,
            "{\"access_token\": \"x\"}".to_owned(),
            "/token answered with something else than a token",
        ),
        (
            200,
            "{\"access_token\": \"a b\", \"token_type\": \"bearer\"}".to_owned(),
            "/token answered with a token that no header can hold",
        ),
        (
            200,
            "{\"access_token\": \"ab\", \"token_type\": \"mac\"}".to_owned(),
            "/token answered with a token that is no bearer token",
        ),
    ];
    for (status, body, expected) in answers {
        let (server, _tasks) = OauthServer::start().await;
        server.with(|it| it.instead.insert("token", (status, body)));
        let app = with_oauth(&server.url(), "").spawn().await;
        let why = warnings(&app).await;
        assert!(why.contains(expected), "{why}");
        assert!(why.contains("it issues no access token: http://"), "{why}");
        assert_no_secret(&app, &why);
    }
}

#[tokio::test]
async fn a_token_that_the_server_refuses_is_renewed_once() {
    let (server, _tasks) = OauthServer::start().await;
    let body = json!({"access_token": format!("{TOKEN}unknown"), "token_type": "Bearer"});
    server.with(|it| it.instead.insert("token", (200, body.to_string())));
    let issuer = format!("issuer = \"{}\"\n", server.base);
    let app = with_oauth(&server.url(), &issuer).spawn().await;
    let why = warnings(&app).await;
    assert!(why.contains("HTTP 401: no such token: ***"), "{why}");
    assert_eq!(server.token_requests().len(), 2);
    assert_no_secret(&app, &why);
}

#[tokio::test]
async fn an_invalid_oauth_table_is_named() {
    let head = "[[mcp_servers]]\nname = \"s\"\n";
    let http = format!("{head}transport = \"streamable-http\"\nurl = \"https://mcp.example/\"\n");
    let oauth = |more: &str| format!("{http}[mcp_servers.oauth]\n{more}");
    let full = "grant = \"client_credentials\"\nclient_id = \"x\"\nclient_secret_env = \"A\"\n";
    let cases = [
        (
            oauth("client_id = \"x\""),
            "oauth.grant is required: \"client_credentials\" or \"device_code\"",
        ),
        (
            oauth("grant = \"password\"\nclient_id = \"x\""),
            "oauth.grant must be one of: client_credentials, device_code",
        ),
        (
            oauth("grant = \"client_credentials\""),
            "oauth.client_id is required",
        ),
        (
            oauth("grant = \"client_credentials\"\nclient_id = \"x\""),
            "oauth.client_secret_env is required where grant is client_credentials",
        ),
        (
            oauth(
                "grant = \"client_credentials\"\nclient_id = \"x\"\nclient_secret_env = \"s3cret-s3cret\"",
            ),
            "oauth.client_secret_env must be the name of an environment variable",
        ),
        (
            oauth(&format!(
                "{full}device_authorization_url = \"https://a.example/\""
            )),
            "oauth.device_authorization_url is only for grant = \"device_code\", beside token_url",
        ),
        (
            oauth("grant = \"device_code\"\nclient_id = \"x\"\ntoken_url = \"https://a.example/\""),
            "oauth.device_authorization_url is required beside token_url",
        ),
        (
            oauth(&format!("{full}scopes = [\"a b\"]")),
            "oauth.scopes has \"a b\", which is no scope",
        ),
        (
            oauth(&format!("{full}issuer = \"https://a.example/?x=1\"")),
            "oauth.issuer must hold no query",
        ),
        (
            oauth(&format!("{full}token_ulr = \"https://a.example/\"")),
            "did you mean \"mcp_servers[0].oauth.token_url\"?",
        ),
        (
            format!("{http}headers = {{ authorization = \"x\" }}\n[mcp_servers.oauth]\n{full}"),
            "headers.authorization cannot be set beside oauth",
        ),
        (
            format!("{head}transport = \"stdio\"\ncommand = \"x\"\n[mcp_servers.oauth]\n{full}"),
            "mcp_servers[0].oauth is only for transport = \"streamable-http\"",
        ),
    ];
    let mut setup = TestApp::setup();
    for (at, (toml, _)) in cases.iter().enumerate() {
        setup = setup.agent(&format!("a{at}"), toml);
    }
    let app = setup.agent("unset", &oauth(full)).spawn().await;
    for (at, (toml, why)) in cases.iter().enumerate() {
        let agent = app.get(&format!("/agents/a{at}")).await.json();
        let error = agent["error"].as_str().unwrap_or_default();
        assert!(error.contains(why), "{toml}\n{agent}");
        assert!(!error.contains("s3cret"), "{error}");
    }
    let warnings = app.get("/agents/unset").await.json()["warnings"].to_string();
    let expected = "MCP server s: the environment variable A with the client's secret is not set";
    assert!(warnings.contains(expected), "{warnings}");
}
