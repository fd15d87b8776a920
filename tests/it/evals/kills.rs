//! A daemon that is killed during an evaluation pays for no case twice.

use serde_json::json;

use crate::evals::{cases, create, finished, two_versions};
use crate::support::gate::Gate;
use crate::support::provider::answer::says;

#[tokio::test]
async fn an_evaluation_goes_on_after_kills_and_no_case_has_two_runs() {
    let mut app = two_versions().spawn().await;
    app.provider.always("new", |_| says("good"));
    app.provider.always("old", |_| says("bad"));
    let accepted = create(
        &app,
        json!({"agent": "new", "against": "old", "cases": cases(60)}),
    )
    .await;
    for part in 1..=2 {
        app.provider.wait_for_request("new", part * 15).await;
        app.crash_and_restart().await;
    }
    let eval = finished(&app, &accepted).await;
    assert_eq!(
        (&eval["state"], &eval["ended"]),
        (&json!("completed"), &json!(120)),
        "{eval}"
    );
    assert_eq!(eval["result"]["scorers"]["fine"]["n"], 60);
    assert_eq!(app.database().count("runs"), 120);
}

#[tokio::test]
async fn a_cancelled_evaluation_ends_its_runs_and_keeps_what_it_has() {
    let app = two_versions().spawn().await;
    let gate = Gate::closed();
    let slow = gate.clone();
    app.provider.always("new", move |request| {
        match request.user_messages().concat().contains("case 0") {
            true => says("good"),
            false => says("good").after_gate(&slow),
        }
    });
    let accepted = create(&app, json!({"agent": "new", "cases": cases(5)})).await;
    let id = accepted.json()["id"].as_str().expect("an id").to_owned();
    let path = format!("/evals/{id}?wait=1");
    app.get_until(&path, |got| got.json()["ended"] == 1).await;
    let cancelled = app
        .post(&format!("/evals/{id}/cancel"), &json!({"reason": "enough"}))
        .await;
    assert_eq!(cancelled.status, 202, "{}", cancelled.text);
    let eval = finished(&app, &accepted).await;
    assert_eq!(
        (&eval["state"], &eval["reason"]),
        (&json!("cancelled"), &json!("enough"))
    );
    assert_eq!(eval["result"]["scorers"]["fine"]["n"], 1);
    gate.open();
}
