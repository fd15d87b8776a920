//! How bodies travel: compressed where that is worth it, and not at all if the client has them already.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::app::{TestApp, send};
use crate::support::events::Events;
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::support::within_timeout;

async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).expect("compress");
    encoder.finish().expect("compress")
}

fn header<'r>(response: &'r Response, name: &str) -> &'r str {
    let value = response.headers().get(name);
    value.map_or("", |value| value.to_str().expect("text"))
}

async fn accepting(request: RequestBuilder, coding: &str) -> Response {
    let request = request.header("accept-encoding", coding);
    within_timeout("a head", request.send())
        .await
        .expect("a head")
}

/// The bytes of a compressed body, decompressed.
async fn unpacked(response: Response) -> String {
    let bytes = within_timeout("a body", response.bytes())
        .await
        .expect("a body");
    let mut text = String::new();
    GzDecoder::new(&bytes[..])
        .read_to_string(&mut text)
        .expect("gzip");
    text
}

#[tokio::test]
async fn a_large_response_is_compressed_for_a_client_that_accepts_it() {
    let app = solo().await;
    let get = |path: &str| app.request(Method::GET, path);
    let plain = accepting(get("/openapi.json"), "identity").await;
    assert_eq!(header(&plain, "content-encoding"), "");
    let length: usize = header(&plain, "content-length").parse().expect("a length");
    assert!(header(&plain, "vary").contains("accept-encoding"));
    let tag = header(&plain, "etag").to_owned();
    let text = plain.text().await.expect("a body");
    assert_eq!(text.len(), length);

    let packed = accepting(get("/openapi.json"), "br, gzip").await;
    assert_eq!(header(&packed, "content-encoding"), "gzip");
    assert_eq!(header(&packed, "etag"), tag);
    // It was compressed before, once for all responses.
    assert!(!header(&packed, "content-length").is_empty());
    let bytes = within_timeout("a body", packed.bytes())
        .await
        .expect("a body");
    assert!(bytes.len() * 4 < length, "{} of {length}", bytes.len());
    let mut unpacked = String::new();
    GzDecoder::new(&bytes[..])
        .read_to_string(&mut unpacked)
        .expect("gzip");
    assert_eq!(unpacked, text);

    for (path, coding) in [
        ("/livez", "gzip"),
        ("/nowhere", "gzip"),
        ("/openapi.json", "br"),
        ("/openapi.json", "gzip;q=0"),
    ] {
        let whole = accepting(get(path), coding).await;
        assert_eq!(header(&whole, "content-encoding"), "", "{path} {coding}");
        assert!(
            !header(&whole, "content-length").is_empty(),
            "{path} {coding}"
        );
    }
    let off = TestApp::setup().server("compression = false").spawn().await;
    let whole = accepting(off.request(Method::GET, "/openapi.json"), "gzip").await;
    assert_eq!(header(&whole, "content-encoding"), "");
}

#[tokio::test]
async fn an_event_stream_is_never_compressed() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [says("one two three").pausing_at(&gate)]);
    let post = app
        .request(Method::POST, "/agents/solo/runs")
        .header("accept", "text/event-stream")
        .json(&json!({"input": "x".repeat(5000)}));
    let posted = accepting(post, "gzip").await;
    assert_eq!(header(&posted, "content-encoding"), "");
    let location = header(&posted, "location").to_owned();
    let follow = app.request(Method::GET, &format!("{location}/events"));
    let followed = accepting(follow.header("accept", "text/event-stream"), "gzip").await;
    assert_eq!(header(&followed, "content-encoding"), "");
    // Both have the first events while the run is held.
    let (mut posted, mut followed) = (Events::new(posted), Events::new(followed));
    posted.until("turn.started").await;
    followed.until("turn.started").await;
    gate.open();
    assert_eq!(
        posted
            .rest()
            .await
            .last()
            .map(|event| event.kind().to_owned()),
        Some("run.completed".to_owned())
    );
    followed.rest().await;

    let run = accepting(app.request(Method::GET, &location), "gzip").await;
    assert_eq!(header(&run, "content-encoding"), "gzip");
    let run: Value = serde_json::from_str(&unpacked(run).await).expect("JSON");
    assert_eq!(run["content"], "one two three");
}

fn post_packed(app: &TestApp, kind: &str, body: Vec<u8>) -> RequestBuilder {
    app.request(Method::POST, "/agents/solo/runs?wait=180")
        .header("content-type", kind)
        .header("content-encoding", "gzip")
        // The daemon closes the connection of a body that it does not read whole.
        .header("connection", "close")
        .body(body)
}

#[tokio::test]
async fn a_compressed_request_is_the_same_request() {
    let app = solo().await;
    app.provider
        .will("solo", [says("one"), says("two"), says("three")]);
    let body = json!({"input": "a long story ".repeat(1000)}).to_string();
    let packed = post_packed(&app, "application/json", gzip(body.as_bytes()));
    let run = send(packed.header("idempotency-key", "k")).await;
    assert_eq!(run.status, 200, "{}", run.text);
    assert_eq!(run.json()["input"], "a long story ".repeat(1000));
    let plain = app
        .request(Method::POST, "/agents/solo/runs?wait=180")
        .header("content-type", "application/json")
        .header("idempotency-key", "k")
        .body(body);
    let again = send(plain).await;
    assert_eq!(
        again.header("idempotency-replayed"),
        "true",
        "{}",
        again.text
    );

    let (first, second) = (gzip(b"two "), gzip(b"members"));
    let text = send(post_packed(&app, "text/plain", [first, second].concat())).await;
    assert_eq!(text.json()["input"], "two members", "{}", text.text);
    let form =
        "--b\r\ncontent-disposition: form-data; name=\"input\"\r\n\r\nof a form\r\n--b--\r\n";
    let form = post_packed(
        &app,
        "multipart/form-data; boundary=b",
        gzip(form.as_bytes()),
    );
    assert_eq!(send(form).await.json()["input"], "of a form");
}

#[tokio::test]
async fn limits_of_a_body_apply_to_its_decompressed_size() {
    let app = TestApp::setup()
        .agent("solo", "")
        .server("max_body = \"64 KiB\"")
        .spawn()
        .await;
    let bomb = gzip(&vec![b'x'; 64 << 20]);
    assert!(bomb.len() < 100_000);
    for kind in [
        "text/plain",
        "application/json",
        "multipart/form-data; boundary=b",
    ] {
        let refused = send(post_packed(&app, kind, bomb.clone())).await;
        assert!(
            matches!(refused.status, 400 | 413),
            "{kind}: {}",
            refused.text
        );
    }
    send(post_packed(&app, "text/plain", bomb))
        .await
        .problem(413);
    // Many bytes that decompress to nothing, on a route without attachments.
    let nothing = app
        .request(Method::POST, "/agents/solo/gc")
        .header("connection", "close")
        .header("content-encoding", "gzip")
        .body(gzip(b"").repeat(20_000));
    send(nothing).await.problem(400);
    for broken in [b"no gzip".to_vec(), gzip(b"cut off")[..12].to_vec()] {
        let refused = send(post_packed(&app, "text/plain", broken)).await;
        assert!(
            refused.problem(400).contains("decompressed"),
            "{}",
            refused.text
        );
    }
    assert_eq!(app.get("/runs").await.json()["data"], json!([]));
}

#[tokio::test]
async fn a_client_that_has_a_response_already_gets_304() {
    let app = solo().await;
    let gate = Gate::closed();
    app.provider.will("solo", [says("done").pausing_at(&gate)]);
    let run = app.start("solo", "go").await;
    let path = format!("/runs/{}", run.id());
    let get =
        |path: &str, tag: &str| send(app.request(Method::GET, path).header("if-none-match", tag));
    assert_eq!(app.get(&path).await.header("etag"), "", "it still changes");
    gate.open();
    run.wait_for_end().await;

    for path in [path.as_str(), "/agents", "/agents/solo", "/openapi.json"] {
        let first = app.get(path).await;
        let tag = first.header("etag").to_owned();
        assert!(tag.starts_with("W/\""), "{path}: {tag}");
        assert_eq!(first.header("cache-control"), "private, no-cache");
        let known = get(path, &format!("\"other\", {tag}")).await;
        assert_eq!((known.status, known.text.as_str()), (304, ""), "{path}");
        assert_eq!(known.header("etag"), tag);
        assert_eq!(known.header("cache-control"), "private, no-cache");
        let other = get(path, "\"other\"").await;
        assert_eq!((other.status, other.text), (200, first.text), "{path}");
    }
    let before = app.get("/agents/solo").await;
    app.write_agent("solo", "description = \"changed\"");
    let changed = |got: &crate::support::app::ApiResponse| got.text.contains("changed");
    let after = app.get_until("/agents/solo", changed).await;
    assert_ne!(after.header("etag"), before.header("etag"));
    assert_eq!(get("/agents/solo", before.header("etag")).await.status, 200);
}

#[tokio::test]
async fn a_slash_at_the_end_is_named_in_the_404() {
    let app = solo().await;
    assert!(
        app.get("/runs/")
            .await
            .problem(404)
            .contains("leave out the slash")
    );
    let unknown = app.get("/nothing").await.problem(404);
    assert!(!unknown.contains("slash"), "{unknown}");
}
