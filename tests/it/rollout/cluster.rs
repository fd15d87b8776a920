//! Rollouts of agents on several nodes.

use serde_json::json;

use crate::cluster::{other_with_agents, spawn};
use crate::rollout::{
    CANDIDATE, answer, candidates, rollout, run_many, set_percent, with_candidate,
};
use crate::support::daemon::Daemon;
use crate::support::eventually;
use crate::support::provider::answer::says;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_and_a_promotion_are_in_force_at_all_nodes() {
    let file = format!(
        "name = \"solo\"\nmodel = \"anthropic/solo\"\n{}\n",
        rollout(0, "")
    );
    let setup = with_candidate(0, "")
        .file("others/solo.toml", &file)
        .file("others/solo.next.toml", CANDIDATE);
    let Some((mut app, url)) = spawn(setup).await else {
        return;
    };
    answer(&app, || says("old"), || says("new"));
    let second = Daemon::start(other_with_agents(&app, &url, "second", "others")).await;
    set_percent(&app, 100).await;
    let first = std::mem::replace(&mut app.daemon, second);
    eventually("the share at the other node", async || {
        (candidates(&run_many(&app, 1).await) == 1).then_some(())
    })
    .await;
    let second = std::mem::replace(&mut app.daemon, first);
    let promoted = app.post("/agents/solo/promote", &json!({})).await.json();
    assert_eq!(promoted["written"], true, "{promoted}");
    app.daemon = second;
    app.get_until("/agents/solo", |got| {
        got.json()["version"] == promoted["version"]
    })
    .await;
    assert_eq!(app.run("solo", "go").await["model"], "next");
}
