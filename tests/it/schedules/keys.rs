//! Whose schedules and runs they are.

use axed::config::key_hash::KeyHash;
use reqwest::Method;
use serde_json::Value;

use crate::support::app::{ApiResponse, TestApp, send};
use crate::support::provider::answer::says;

const SCHEDULES: &str = "
[[schedules]]
name = \"own\"
cron = \"0 0 1 1 *\"
key = \"ada\"
[[schedules]]
name = \"of-nobody\"
cron = \"0 0 1 1 *\"
[[schedules]]
name = \"of-a-missing-key\"
cron = \"0 0 1 1 *\"
key = \"eve\"
";

async fn app_with_keys() -> TestApp {
    let keys = [
        ("ada", "[\"run\", \"read\"]"),
        ("bob", "[\"run\", \"read\"]"),
        ("reader", "[\"read\"]"),
        ("root", "[\"admin\"]"),
    ];
    let keys = keys.map(|(name, scopes)| {
        let sha256 = KeyHash::digest(name.as_bytes());
        format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\nscopes = {scopes}\n")
    });
    let setup = TestApp::setup().config(&keys.concat());
    let app = setup.agent("solo", SCHEDULES).spawn().await;
    app.provider.always("solo", |_| says("done"));
    app
}

async fn send_as(app: &TestApp, key: &str, method: Method, path: &str) -> ApiResponse {
    send(app.request(method, path).bearer_auth(key)).await
}

fn names(list: &ApiResponse) -> Vec<String> {
    let list = list.json();
    let schedules = list["data"].as_array().expect("a list").iter();
    schedules
        .map(|it| it["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[tokio::test]
async fn a_key_sees_and_changes_only_the_schedules_whose_runs_are_its_own() {
    let app = app_with_keys().await;
    let list = async |key| names(&send_as(&app, key, Method::GET, "/schedules").await);
    assert_eq!(list("ada").await, ["own"]);
    assert!(list("bob").await.is_empty());
    assert_eq!(list("root").await, ["own", "of-nobody", "of-a-missing-key"]);
    for action in ["trigger", "pause", "resume"] {
        let path = format!("/schedules/solo/own/{action}");
        let refused = send_as(&app, "bob", Method::POST, &path).await;
        assert_eq!(
            refused.problem(404),
            "agent \"solo\" has no schedule \"own\""
        );
        let refused = send_as(&app, "reader", Method::POST, &path).await;
        assert!(refused.problem(403).contains("scope run"));
        assert_eq!(send(app.request(Method::POST, &path)).await.status, 401);
        let path = format!("/schedules/solo/of-nobody/{action}");
        send_as(&app, "ada", Method::POST, &path).await.problem(404);
    }
}

#[tokio::test]
async fn runs_belong_to_the_key_that_the_schedule_names() {
    let app = app_with_keys().await;
    let trigger = async |key, name| {
        let path = format!("/schedules/solo/{name}/trigger?wait=180");
        send_as(&app, key, Method::POST, &path).await
    };
    let own = trigger("root", "own").await.json();
    let of_nobody = trigger("root", "of-nobody").await.json();
    let sees = async |key, run: &Value| {
        let path = format!("/runs/{}", run["id"].as_str().expect("an id"));
        send_as(&app, key, Method::GET, &path).await.status
    };
    assert_eq!(
        (sees("ada", &own).await, sees("bob", &own).await),
        (200, 404)
    );
    assert_eq!(sees("ada", &of_nobody).await, 404);
    assert_eq!(sees("root", &of_nobody).await, 200);

    let refused = trigger("root", "of-a-missing-key").await;
    let why = refused.problem(422);
    assert!(why.contains("no key \"eve\""), "{why}");
}
