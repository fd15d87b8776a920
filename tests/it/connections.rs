//! Connections before their first request: which host they name.

use reqwest::{Client, StatusCode};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::TestApp;
use crate::support::soon;

/// A connection on which these bytes were sent.
async fn sent(app: &TestApp, bytes: &str) -> TcpStream {
    let address = app.daemon.url.strip_prefix("http://").expect("a URL");
    let mut stream = soon("a connection", TcpStream::connect(address))
        .await
        .expect("a connection");
    stream.write_all(bytes.as_bytes()).await.expect("sent");
    stream
}

/// All that is answered until the connection is closed; nothing if it is reset.
async fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = soon("the connection's end", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// The status and the body of the answer to this request.
async fn answer(app: &TestApp, request: &str) -> (u16, String) {
    let answer = rest(sent(app, request).await).await;
    let status = answer.get(9..12).and_then(|status| status.parse().ok());
    (status.unwrap_or_default(), answer)
}

#[tokio::test]
async fn a_request_names_its_host_once() {
    let app = TestApp::with().agent("solo", "").spawn().await;
    let port = app.daemon.url.rsplit(':').next().expect("a port");
    let evil = format!("host: evil.example:{port}\r\n");
    for hosts in [
        String::new(),
        "host:\r\n".to_owned(),
        "host: ???\r\n".to_owned(),
        "host: localhost/\r\n".to_owned(),
        format!("host: user@evil.example:{port}\r\n"),
        format!("host: evil.example:{port},localhost\r\n"),
        "host: evil.example:99999\r\n".to_owned(),
        format!("host: localhost\r\n{evil}"),
        "host: localhost\r\nhost: localhost\r\n".to_owned(),
    ] {
        for line in ["GET /runs", "POST /agents/solo/runs", "GET /livez"] {
            let request = format!("{line} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n");
            let (status, text) = answer(&app, &request).await;
            assert_eq!(status, 400, "{request}{text}");
            assert!(text.contains("application/problem+json"), "{text}");
            assert!(text.contains("\"code\":\"invalid_host\""), "{text}");
        }
    }
    let absolute = format!(
        "GET http://evil.example:{port}/runs HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    );
    let (status, text) = answer(&app, &absolute).await;
    assert_eq!(status, 403, "{text}");
    assert_eq!(app.get("/runs").await.json()["data"], json!([]));
}

#[tokio::test]
async fn an_old_client_may_probe_without_a_host() {
    let app = TestApp::with().spawn().await;
    for (path, expected) in [
        ("/livez", 200),
        ("/readyz", 200),
        ("/metrics", 200),
        ("/runs", 400),
        ("/agents", 400),
    ] {
        let (status, text) = answer(&app, &format!("GET {path} HTTP/1.0\r\n\r\n")).await;
        assert_eq!(status, expected, "{path}: {text}");
    }
    let (status, text) = answer(&app, "GET /livez HTTP/1.0\r\nhost: ???\r\n\r\n").await;
    assert_eq!(status, 400, "{text}");
}

#[tokio::test]
async fn a_host_that_differs_from_the_authority_is_refused() {
    let app = TestApp::with().spawn().await;
    let client = Client::builder()
        .http2_prior_knowledge()
        .build()
        .expect("a client");
    let get = |host: &'static str| {
        client
            .get(format!("{}/runs", app.daemon.url))
            .header("host", host)
    };
    let response = soon("an answer", get("localhost").send())
        .await
        .expect("an answer");
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
}
