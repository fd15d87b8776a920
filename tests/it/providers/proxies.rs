//! Proxies that the environment names, on the way to a provider.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::json;

use crate::support::app::{Setup, TestApp};
use crate::support::replay::{CannedResponse, ReplayServer};

const REPLY: &str = r#"{"choices":[{"message":{"content":"done"},"finish_reason":"stop"}]}"#;
/// `user:secret`, as HTTP sends it.
const AUTHORIZATION: &str = "Basic dXNlcjpzZWNyZXQ=";

#[tokio::test]
async fn a_proxy_of_the_environment_gets_plain_requests_whole() {
    let proxy = ReplayServer::start([CannedResponse::json(200, REPLY)]);
    let app = with_service("http://provider.test/v1")
        .environment("HTTP_PROXY", &with_user(&proxy.base_url()))
        .spawn()
        .await;

    assert_eq!(app.run("solo", "go").await.output(), "done");
    let request = &proxy.requests()[0];
    assert_eq!(request.path, "http://provider.test/v1/chat/completions");
    assert_eq!(request.headers["host"], "provider.test");
    assert_eq!(request.headers["proxy-authorization"], AUTHORIZATION);
}

#[tokio::test]
async fn a_proxy_of_the_environment_carries_tls_unread() {
    let certificate = generate_simple_self_signed(["provider.test".to_owned()]).expect("a key");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let proxy = format!("http://{}", listener.local_addr().expect("an address"));
    let tunnel = serve_tunnel(listener, &certificate);
    let app = with_service("https://provider.test/v1")
        .file("authorities.pem", &certificate.cert.pem())
        .environment("HTTPS_PROXY", &with_user(&proxy))
        .environment("SSL_CERT_FILE", "authorities.pem")
        .spawn()
        .await;

    assert_eq!(app.run("solo", "go").await.output(), "done");
    let (connect, request) = tunnel.join().expect("no panic");
    assert_eq!(connect[0], "CONNECT provider.test:443 HTTP/1.1");
    assert!(
        connect.iter().any(|line| line.ends_with(AUTHORIZATION)),
        "{connect:?}"
    );
    assert_eq!(request[0], "POST /v1/chat/completions HTTP/1.1");
    assert!(
        !request.iter().any(|line| line.contains("proxy-auth")),
        "{request:?}"
    );
}

#[tokio::test]
async fn a_service_in_no_proxy_is_reached_directly() {
    let [proxy, service] =
        [(); 2].map(|()| ReplayServer::start([CannedResponse::json(200, REPLY)]));
    // An address of this machine that is not a loopback address: those never go through a proxy.
    let app = with_service(&service.base_url().replace("127.0.0.1", "0.0.0.0"))
        .environment("ALL_PROXY", &proxy.base_url())
        .environment("NO_PROXY", "elsewhere.test,0.0.0.0")
        .spawn()
        .await;

    assert_eq!(app.run("solo", "go").await.output(), "done");
    assert_eq!(service.requests()[0].path, "/v1/chat/completions");
    assert_eq!(proxy.connections(), 0);
}

#[tokio::test]
async fn a_proxy_that_refuses_is_named() {
    for status in [407, 502] {
        let proxy = ReplayServer::start([CannedResponse::json(status, "{}")]);
        let app = with_service("https://provider.test/v1")
            .environment("HTTPS_PROXY", &with_user(&proxy.base_url()))
            .spawn()
            .await;
        let run = app.run("solo", "go").await;
        let (code, message) = run.failure();
        assert_eq!(code, "provider_server", "{message}");
        let address = proxy.base_url().replace("http://", "");
        let expected = format!("could not connect to provider.test: through the proxy {address}: ");
        assert!(message.contains(&expected), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
}

#[tokio::test]
async fn a_proxy_of_another_protocol_makes_only_its_providers_unavailable() {
    let app = with_service("http://provider.test/v1")
        .environment("ALL_PROXY", "socks5://127.0.0.1:1080")
        .spawn()
        .await;

    let refused = app.post("/agents/solo/runs", &json!({"input": "go"})).await;
    let detail = refused.problem(422);
    assert!(detail.contains("or add the host to NO_PROXY"), "{detail}");
}

fn with_service(base_url: &str) -> Setup {
    let section = format!(
        "[providers.service]\nkind = \"openai\"\nbase_url = \"{base_url}\"\napi_key = \"k\"\n"
    );
    let agent = "model = \"service/m\"\n[retry]\nmax_retries = 0";
    TestApp::setup().config(&section).agent("solo", agent)
}

fn with_user(proxy: &str) -> String {
    proxy.replace("http://", "http://user:secret@")
}

/// Takes one connection: the request for a tunnel, then one request within TLS. Returns the lines of both heads.
fn serve_tunnel(
    listener: TcpListener,
    certificate: &CertifiedKey<rcgen::KeyPair>,
) -> JoinHandle<(Vec<String>, Vec<String>)> {
    let key = PrivatePkcs8KeyDer::from(certificate.signing_key.serialize_der());
    let mut tls = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.cert.der().clone()], key.into())
        .expect("a certificate");
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a connection");
        // The client sends nothing after this head until it is answered.
        let connect = read_head(&mut BufReader::new(&socket));
        socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").expect("write");
        let session = ServerConnection::new(Arc::new(tls)).expect("a session");
        let mut stream = StreamOwned::new(session, socket);
        let request = read_head(&mut BufReader::new(&mut stream));
        assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            REPLY.len()
        );
        stream.write_all((head + REPLY).as_bytes()).expect("write");
        stream.conn.send_close_notify();
        stream.flush().expect("flush");
        // Until the client hangs up: an early close could discard what it has not read.
        let _ = stream.read_to_end(&mut Vec::new());
        (connect, request)
    })
}

fn read_head(reader: &mut impl BufRead) -> Vec<String> {
    let lines = reader.lines().map(|line| line.expect("a line"));
    lines.take_while(|line| !line.is_empty()).collect()
}
