//! Connections before their first request: which host they name, and how many of them wait at once.

use reqwest::{Client, Method, StatusCode};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::app::TestApp;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

/// A connection on which these bytes were sent.
async fn sent(app: &TestApp, bytes: &str) -> TcpStream {
    let address = app.daemon.url.strip_prefix("http://").expect("a URL");
    let mut stream = within_timeout("a connection", TcpStream::connect(address))
        .await
        .expect("a connection");
    stream.write_all(bytes.as_bytes()).await.expect("sent");
    stream
}

/// All that is answered until the connection is closed; nothing if it is reset.
async fn rest(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = within_timeout("the connection's end", stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// The status and the body of the answer to this request.
async fn answer(app: &TestApp, request: &str) -> (u16, String) {
    let answer = rest(sent(app, request).await).await;
    let status = answer.get(9..12).and_then(|status| status.parse().ok());
    (status.unwrap_or_default(), answer)
}

#[tokio::test]
async fn a_request_has_exactly_one_host() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
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
async fn http_1_0_probes_need_no_host() {
    let app = TestApp::setup().spawn().await;
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
    let app = TestApp::setup().spawn().await;
    let client = Client::builder()
        .http2_prior_knowledge()
        .build()
        .expect("a client");
    let get = |host: &'static str| {
        client
            .get(format!("{}/runs", app.daemon.url))
            .header("host", host)
    };
    let response = within_timeout("an answer", get("localhost").send())
        .await
        .expect("an answer");
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn pending_connections_are_closed_for_new_ones() {
    let app = TestApp::setup()
        .agent("solo", "")
        .server("max_pending_per_address = 20")
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    let beginnings = [
        "GET /runs HTTP/1.1\r\nhost: local",
        "POST /agents/solo/runs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "",
    ];
    let mut flood = Vec::new();
    for n in 0..200 {
        flood.push(sent(&app, beginnings[n % beginnings.len()]).await);
    }

    assert_eq!(app.run("solo", "go").await.output(), "done");

    // Closed because there were too many of them, and not after their time: that would be answered with 408.
    for stream in flood.drain(..100) {
        let answer = rest(stream).await;
        assert!(!answer.contains("HTTP/1.1"), "{answer}");
    }
    // The youngest are still there.
    let mut last = flood.pop().expect("a connection");
    let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    last.write_all(request.as_bytes()).await.expect("sent");
    assert!(rest(last).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn connections_with_a_request_are_never_closed_for_new_ones() {
    let app = TestApp::setup()
        .server("max_pending_per_address = 2\nmax_pending_connections = 2")
        .spawn()
        .await;
    let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut kept = Vec::new();
    for _ in 0..20 {
        let mut stream = sent(&app, request).await;
        let mut head = [0; 12];
        within_timeout("an answer", stream.read_exact(&mut head))
            .await
            .expect("an answer");
        kept.push(stream);
    }
    let mut flood = Vec::new();
    for _ in 0..20 {
        flood.push(sent(&app, "GET ").await);
    }
    let closed = flood.drain(..10).map(rest);
    futures_util::future::join_all(closed).await;
    for mut stream in kept {
        let again = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        stream.write_all(again.as_bytes()).await.expect("sent");
        assert!(rest(stream).await.contains("HTTP/1.1 200"));
    }
}

#[tokio::test]
async fn idle_connections_are_closed_if_descriptors_run_out() {
    let app = TestApp::setup().spawn().await;
    let daemon = Pid::from_raw(i32::try_from(app.daemon.pid()).expect("a process id"));
    let files = Some(128);
    let few = Rlimit {
        current: files,
        maximum: files,
    };
    prlimit(daemon, Resource::Nofile, few).expect("a limit");
    let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut flood = Vec::new();
    for n in 0..300 {
        flood.push(sent(&app, if n % 2 == 0 { request } else { "GET " }).await);
    }

    // A connection is closed too if its request has not arrived when others need the descriptors.
    let answered = async {
        loop {
            if let Ok(got) = app.request(Method::GET, "/readyz").send().await {
                return got.status().as_u16();
            }
        }
    };
    let status = within_timeout("an answer", answered).await;

    assert!([200, 503].contains(&status), "{status}");
    app.daemon.wait_for_log("Cannot accept connections").await;
    // Given back at once, and not after their time, which would be answered.
    let answer = rest(flood.swap_remove(1)).await;
    assert_eq!(answer, "");
}

#[tokio::test]
async fn many_clients_may_connect_at_once() {
    let app = TestApp::setup()
        .server("metrics_listen = \"127.0.0.1:0\"")
        .spawn()
        .await;
    app.daemon.wait_for_log("Metrics are at ").await;
    let log = app.daemon.log();
    let metrics = log
        .split("Metrics are at http://")
        .nth(1)
        .and_then(|rest| rest.split('/').next())
        .expect("the address")
        .to_owned();
    let own = app
        .daemon
        .url
        .strip_prefix("http://")
        .expect("a URL")
        .to_owned();
    // Nothing is accepted meanwhile: only the kernel completes the connections.
    app.daemon.signal("STOP");
    let mut clients = Vec::new();
    for address in [own, metrics] {
        for _ in 0..400 {
            let client = within_timeout("a connection", TcpStream::connect(&address)).await;
            clients.push(client.expect("a connection"));
        }
    }
    app.daemon.signal("CONT");
    assert_eq!(app.get("/livez").await.status, 200);
}
