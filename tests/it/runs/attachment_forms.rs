//! Runs with pictures and files as a form.

use crate::runs::attachments::{Case, Field, shown, solo};
use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::attachments::{PDF, PNG, base64, png_with_suffix};
use crate::support::provider::answer::says;
use reqwest::Method;

pub fn form(boundary: &str, fields: &[Field<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    for (headers, data) in fields {
        let start =
            format!("--{boundary}\r\ncontent-disposition: form-data; name={headers}\r\n\r\n");
        body.extend([start.as_bytes(), data, b"\r\n"].concat());
    }
    body.extend(format!("--{boundary}--\r\n").as_bytes());
    body
}

async fn post_form(app: &TestApp, boundary: &str, fields: &[Field<'_>]) -> ApiResponse {
    let request = app.request(Method::POST, "/agents/solo/runs?wait=180");
    let request = request.header("idempotency-key", "form");
    let kind = format!("multipart/form-data; boundary={boundary}");
    send(
        request
            .header("content-type", kind)
            .body(form(boundary, fields)),
    )
    .await
}

const PICTURE: &str = "input; filename=photo.png\r\ncontent-type: image/png";

const NOTES: &str = "input; filename=notes.txt\r\ncontent-type: text/plain";

const REPORT: &str = "input; filename=a.pdf\r\ncontent-type: application/octet-stream";

#[tokio::test]
async fn a_form_starts_a_run() {
    let app = solo().await;
    app.provider.will("solo", [says("a grey pixel")]);
    let fields: [Field<'_>; 7] = [
        (PICTURE, PNG),
        ("input", b"What is this?"),
        (REPORT, PDF),
        (NOTES, b"some notes"),
        ("context", b"Be brief."),
        ("labels", b"{\"team\": \"a\"}"),
        ("timeout", b"60"),
    ];
    let first = post_form(&app, "one", &fields).await;
    assert_eq!(
        (first.status, first.json()["content"].as_str()),
        (200, Some("a grey pixel"))
    );
    assert_eq!(first.json()["labels"]["team"], "a");
    assert_eq!(first.json()["input"][2]["name"], "a.pdf");
    let seen = app.provider.wait_for_request("solo", 1).await;
    assert_eq!(shown(&seen), [base64(PNG), base64(PDF)]);
    assert_eq!(
        seen.user_messages(),
        ["What is this?some notesContext:\nBe brief."]
    );
    // A form's boundary differs each time; only its fields count.
    let again = post_form(&app, "another", &fields).await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    post_form(&app, "one", &fields[..6]).await.problem(422);
}

#[tokio::test]
async fn a_form_has_the_same_limits() {
    let app = TestApp::setup()
        .agent("solo", "")
        .server("max_body = 600")
        .config("[limits]\nattachments = 1\nattachment_bytes = 1000")
        .spawn()
        .await;
    let large = png_with_suffix(&"x".repeat(1000));
    let long = "x".repeat(601).into_bytes();
    let cases: [Case<'_>; 8] = [
        (&[(PICTURE, &large)], 413, "limits.attachment_bytes"),
        (&[(PICTURE, PNG), (PICTURE, PNG)], 413, "limits.attachments"),
        (&[("input", &long)], 413, "server.max_body"),
        (
            &[(PICTURE, b"<svg/>..")],
            422,
            "the type of the bytes is not supported",
        ),
        (&[("colour", b"red")], 422, "unknown field"),
        (
            &[("timeout", b"soon")],
            422,
            "/timeout: must be JSON in a form",
        ),
        (
            &[("context", b"a"), ("context", b"b")],
            422,
            "/context: is given twice",
        ),
        (
            &[("context; filename=a.png", PNG)],
            422,
            "only fields named input may be files",
        ),
    ];
    for (fields, status, why) in cases {
        let refused = post_form(&app, "b", fields).await;
        let problem = refused.problem(status);
        assert!(problem.contains(why), "{problem}");
    }
    let cut = app.request(Method::POST, "/agents/solo/runs");
    let cut = cut.header("content-type", "multipart/form-data; boundary=b");
    send(cut.body("--b\r\n")).await.problem(400);
    let elsewhere = app.request(Method::POST, "/agents/solo/gc");
    let elsewhere = elsewhere.header("content-type", "multipart/form-data; boundary=b");
    send(elsewhere.body(form("b", &[]))).await.problem(415);
}
