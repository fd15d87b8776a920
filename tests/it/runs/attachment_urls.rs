//! Pictures and files that a request names by URL.

use crate::runs::attachments::{shown, solo};
use crate::support::app::TestApp;
use crate::support::attachments::{PNG, base64};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;
use crate::tools::web::Web;
use serde_json::json;

#[tokio::test]
async fn a_picture_may_be_a_url() {
    let web = Web::start().await;
    let mut app = TestApp::setup()
        .agent("solo", "")
        .config(
            "[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]\n[limits]\nattachment_bytes = 1000",
        )
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider
        .always("solo", move |_| says("done").after_gate(&gate));
    let link = |path: &str| json!({"input": [{"type": "image", "url": web.url(path)}]});
    let run = app.start_with("solo", link("/picture?secret=hush")).await;
    let shown_url = web.url("/picture");
    assert_eq!(
        run.reload().await.messages().await["data"][0]["content"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let record = app.get(&format!("/runs/{}", run.id())).await;
    assert_eq!(record.json()["input"][0]["url"], shown_url);
    assert!(!record.text.contains("hush"));
    let id = run.id().to_owned();
    app.provider.wait_for_concurrency("solo", 1).await;
    app.provider.always("solo", |_| says("done"));

    // The fetched bytes are in the record, and are not fetched again.
    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    for number in 1..=2 {
        assert_eq!(
            shown(&*app.provider.wait_for_request("solo", number).await),
            [base64(PNG)]
        );
    }
    assert_eq!(web.seen().len(), 1);
    assert_eq!(
        run.messages().await["data"][0]["content"][0]["bytes"],
        PNG.len()
    );
    assert!(!run.messages().await.to_string().contains("hush"));

    for (path, why) in [
        ("/missing?secret=hush", "the answer is 404"),
        ("/image?secret=hush", "it is larger than 1000 bytes"),
        ("/page?secret=hush", "it is of no kind that is taken"),
        (
            "/to?http://10.1.2.3/x?secret=hush",
            "It redirects to http://10.1.2.3/x, ",
        ),
    ] {
        let failed = app.run_with("solo", link(path)).await;
        let (code, message) = failed.failure();
        assert_eq!(code, "config", "{message}");
        assert!(
            message.contains(why) && !message.contains("hush"),
            "{message}"
        );
        assert!(
            message.contains(&web.url(path.split('?').next().unwrap_or_default())),
            "{message}"
        );
    }
    let file = json!({"input": [{"type": "file", "url": web.url("/picture")}]});
    // The bytes decide what it is.
    let run = app.run_with("solo", file).await;
    assert_eq!(run.status(), "completed");
}

#[tokio::test]
async fn a_url_is_checked_by_the_guard() {
    let web = Web::start().await;
    let app = solo().await;
    let named = |url: &str| json!({"input": [{"type": "image", "url": url}]});
    let port = web.url("/picture");
    for url in [
        port.as_str(),
        "https://127.0.0.1/a.png",
        "https://169.254.169.254/a.png",
        "http://example.com/a.png",
    ] {
        let refused = app.post("/agents/solo/runs", &named(url)).await;
        refused.problem(422);
        let pointer = &refused.json()["errors"][0]["pointer"];
        assert_eq!(pointer, "/input/0/url", "{url}");
    }
    let message = json!({"role": "user", "content": named("https://10.0.0.1/a.png")["input"]});
    let body = json!({"input": "and this?", "messages": [message, {"role": "assistant", "content": "a dot"}]});
    let refused = app.post("/agents/solo/runs", &body).await;
    refused.problem(422);
    let pointer = &refused.json()["errors"][0]["pointer"];
    assert_eq!(pointer, "/messages/0/content/0/url");
    // The addresses of a name are known when it is fetched.
    let failed = app.run_with("solo", named("https://localhost/a.png")).await;
    assert_eq!(failed.failure().0, "config");
    assert_eq!((web.seen().len(), app.provider.requests().len()), (0, 0));
    for (part, pointer) in [
        (
            json!({"type": "image", "url": "file:///etc/passwd"}),
            "/input/0/url",
        ),
        (
            json!({"type": "image", "url": "https://user:pass@example.com/"}),
            "/input/0/url",
        ),
        (
            json!({"type": "image", "url": "https://example.com/", "data": base64(PNG)}),
            "/input/0/url",
        ),
    ] {
        let refused = app
            .post("/agents/solo/runs", &json!({"input": [part]}))
            .await;
        refused.problem(422);
        assert_eq!(refused.json()["errors"][0]["pointer"], pointer);
    }
}
