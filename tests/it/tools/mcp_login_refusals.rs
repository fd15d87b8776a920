//! Logins that do not succeed: the operator denies them, the code expires, the authorization server is hostile.

use serde_json::{Value, json};

use crate::support::oauth_server::OauthServer;
use crate::tools::mcp_logins::{
    assert_found, assert_no_secret, auth, files, logged_in, with_login,
};

#[tokio::test]
async fn a_login_that_the_operator_does_not_confirm_is_not_stored() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_login(&server.url(), "").spawn().await;
    for (errors, why) in [
        (
            vec!["access_denied"],
            "axed: access was denied in the browser\n",
        ),
        (
            vec!["authorization_pending", "expired_token"],
            "axed: the code has expired before it was entered; log in again\n",
        ),
        (
            vec!["invalid_client"],
            "/token refused: invalid_client: as the story says\n",
        ),
    ] {
        server.with(|it| it.poll_errors = errors.into());
        let login = auth(&app, &["login", "tickets"]).await;
        assert_eq!(login.code, 1, "{}", login.err);
        assert!(login.err.ends_with(why), "{}", login.err);
    }
    let short = json!({
        "device_code": "s3cret-device-code", "user_code": "A", "verification_uri": format!("{}/", server.base),
        "expires_in": 0.01, "interval": 1
    });
    server.with(|it| it.instead.insert("device", (200, short.to_string())));
    let login = auth(&app, &["login", "tickets"]).await;
    assert!(login.err.contains("the code has expired"), "{}", login.err);
    assert!(files(&app).is_empty());
    let unknown = auth(&app, &["login", "ticket"]).await;
    assert_eq!(unknown.code, 2);
    assert!(
        unknown.err.contains("did you mean \"tickets\"?"),
        "{}",
        unknown.err
    );
}

/// The wait is that of RFC 8628, section 3.5.
#[tokio::test]
async fn polls_slow_down_when_the_server_demands_it() {
    let (server, _tasks) = OauthServer::start().await;
    server.with(|it| it.poll_errors.push_back("slow_down"));
    let app = logged_in(&server).await;
    assert_found(&app).await;
}

#[tokio::test]
async fn answers_of_a_hostile_authorization_server_are_harmless() {
    let (server, _tasks) = OauthServer::start().await;
    let app = with_login(&server.url(), "").spawn().await;
    for (path, answer, why) in hostile_answers(&server.base) {
        server.with(|it| it.instead.insert(path, answer));
        let login = auth(&app, &["login", "tickets"]).await;
        assert_eq!(login.code, 1, "{}", login.err);
        assert!(login.err.contains(why), "{why}: {}", login.err);
        assert!(!login.err.contains('\u{1b}'), "{}", login.err);
        assert_no_secret(&app, &login.err);
        server.with(|it| it.instead.clear());
    }
    let answer = device(
        &server.base,
        json!({"user_code": "A\u{1b}[2J\nLogged in\u{202e}"}),
    );
    server.with(|it| it.instead.insert("device", answer));
    let login = auth(&app, &["login", "tickets"]).await;
    let first = login.with(0).lines().next().unwrap_or_default();
    let expected = "and enter the code A\u{fffd}[2J Logged in\u{fffd}";
    assert!(first.ends_with(expected), "{first:?}");
}

/// The answer of the device authorization endpoint with these changes.
fn device(base: &str, change: Value) -> (u16, String) {
    let mut answer = json!({
        "device_code": "s3cret-device-code", "user_code": "A", "verification_uri": format!("{base}/"),
        "expires_in": 600, "interval": 0
    });
    for (key, value) in change.as_object().expect("an object") {
        answer[key] = value.clone();
    }
    (200, answer.to_string())
}

/// Answers by path, and why they are refused.
fn hostile_answers(base: &str) -> Vec<(&'static str, (u16, String), &'static str)> {
    let device = |change: Value, why| ("device", device(base, change), why);
    let metadata = |endpoint: Value, why| {
        let token = format!("{base}/token");
        let metadata = json!({"issuer": base, "token_endpoint": token, "device_authorization_endpoint": endpoint});
        ("server", (200, metadata.to_string()), why)
    };
    let error = json!({"error": "a\u{1b}[2J", "error_description": "b\u{9b}"});
    let other = json!({"resource": "https://other.example/mcp"});
    let long = "x".repeat(1 << 20);
    vec![
        device(
            json!({"user_code": long}),
            "answered with more than 262144 bytes",
        ),
        device(
            json!({"interval": 1e9}),
            "answered with interval = 1000000000.0",
        ),
        device(json!({"expires_in": -1}), "answered with expires_in = -1"),
        device(
            json!({"verification_uri": "http://10.0.0.1/"}),
            "10.0.0.1 must be reached by https",
        ),
        device(
            json!({"verification_uri": "file:///etc/passwd"}),
            "a verification_uri that is refused",
        ),
        (
            "device",
            (307, String::new()),
            "/device answered with HTTP 307",
        ),
        (
            "device",
            (400, error.to_string()),
            "/device refused: a [2J: b",
        ),
        metadata(
            json!("https://169.254.169.254/"),
            "which is not a public address",
        ),
        metadata(
            Value::Null,
            "the device_authorization_endpoint of http://127.0.0.1:",
        ),
        (
            "resource",
            (200, other.to_string()),
            "is for another resource: https://other.example/mcp",
        ),
    ]
}
