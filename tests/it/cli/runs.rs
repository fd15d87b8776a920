//! `axed runs`, as a person at a terminal and a script use it.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, fails, says};
use crate::support::within_timeout;

/// What a command ended with: its code, stdout and stderr.
async fn ended(app: &TestApp, server: &str, arguments: &[&str]) -> (i32, String, String) {
    let arguments = [&["runs"], arguments, &["--server", server]].concat();
    let mut command = axed_command(&app.path("."), &arguments);
    let output = within_timeout("the command's end", command.output())
        .await
        .expect("run axed");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().unwrap_or(-1);
    (code, text(output.stdout), text(output.stderr))
}

/// What a command printed that did its work.
async fn printed(app: &TestApp, arguments: &[&str]) -> String {
    let (code, out, err) = ended(app, &app.daemon.url, arguments).await;
    assert_eq!(code, 0, "stdout: {out}\nstderr: {err}");
    out
}

fn ids(lines: &str) -> Vec<String> {
    let id = |line: &str| {
        let run: Value = serde_json::from_str(line).expect("a run");
        run["id"].as_str().expect("an id").to_owned()
    };
    lines.lines().map(id).collect()
}

#[tokio::test]
async fn runs_are_listed_by_filter() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider
        .will("reader", [says("read"), fails(400, "no"), says("again")]);
    let planner = app.run("planner", "go").await.id().to_owned();
    let failed = app.run("reader", "go").await.id().to_owned();
    let labelled = json!({"input": "go", "labels": {"team": "a&b"}});
    let labelled = app.run_with("reader", labelled).await.id().to_owned();

    let roots = ids(&printed(&app, &["list", "--json"]).await);
    assert_eq!(roots, [&*labelled, &*failed, &*planner]);
    let all = ids(&printed(&app, &["list", "--json", "--all"]).await);
    assert_eq!(all.len(), 4);
    let by = ["list", "--json", "--agent", "reader", "--status", "failed"];
    assert_eq!(ids(&printed(&app, &by).await), [&*failed]);
    let by = ["list", "--json", "--label", "team=a&b"];
    assert_eq!(ids(&printed(&app, &by).await), [&*labelled]);
    let by = ["list", "--json", "--limit", "2"];
    assert_eq!(ids(&printed(&app, &by).await), [&*labelled, &*failed]);

    let table = printed(&app, &["list"]).await;
    let line = |id: &str| {
        table
            .lines()
            .find(|line| line.contains(id))
            .map(str::to_owned)
    };
    let planner = line(&planner).expect("the planner's line");
    assert!(planner.contains("┆ planner ┆ completed ┆"), "{planner}");
    let failed = line(&failed).expect("the failed one's line");
    assert!(failed.contains("┆ reader  ┆ failed    ┆"), "{failed}");
    let (code, out, err) = ended(&app, &app.daemon.url, &["list", "--agent", "nobody"]).await;
    assert_eq!((code, &*out), (0, ""));
    assert!(err.contains("no matching runs"), "{err}");
}

#[tokio::test]
async fn a_long_list_is_read_page_by_page() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let mut started = Vec::new();
    for _ in 0..205 {
        app.provider.will("solo", [says("done")]);
        started.push(app.run("solo", "go").await.id().to_owned());
    }
    started.reverse();
    let listed = ids(&printed(&app, &["list", "--json", "--limit", "204"]).await);
    assert_eq!(listed, started[..204]);
    let listed = ids(&printed(&app, &["list", "--json", "--limit", "1000"]).await);
    assert_eq!(listed, started);
}

#[tokio::test]
async fn a_run_and_its_tree_are_shown() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "x")]), says("all \u{1b}[31mdone")],
    );
    app.provider.will("reader", [says("read")]);
    let run = app.run("planner", "go there").await;

    let shown = printed(&app, &["show", run.id()]).await;
    for line in [
        &format!("run        {}\n", run.id()),
        "agent      planner\n",
        "status     completed\n",
        "turns      2\n",
        " 1 tool calls by 2 runs\n",
        "\ninput:\ngo there\n",
        "\ncontent:\nall \u{fffd}[31mdone\n",
    ] {
        assert!(shown.contains(line), "{line:?} is not in {shown}");
    }
    let json: Value =
        serde_json::from_str(&printed(&app, &["show", run.id(), "--json"]).await).expect("a run");
    assert_eq!(json, app.get(&format!("/runs/{}", run.id())).await.json());

    let tree = printed(&app, &["tree", run.id()]).await;
    assert!(
        tree.contains("│ planner       ┆ completed ┆     2 ┆"),
        "{tree}"
    );
    assert!(
        tree.contains("│   reader      ┆ completed ┆     1 ┆"),
        "{tree}"
    );
    assert!(tree.contains("total: 2 runs"), "{tree}");
    let json: Value =
        serde_json::from_str(&printed(&app, &["tree", run.id(), "--json"]).await).expect("a tree");
    assert_eq!(json, run.tree().await);
}

#[tokio::test]
async fn a_cancel_can_wait_for_the_end() {
    let app = TestApp::setup().agent("slow", "").spawn().await;
    let gate = Gate::closed();
    app.provider.will(
        "slow",
        [
            says("late").after_gate(&gate),
            says("later").after_gate(&gate),
        ],
    );
    let (first, second) = (app.start("slow", "go").await, app.start("slow", "go").await);
    app.provider.wait_for_concurrency("slow", 2).await;
    let reported = printed(
        &app,
        &["cancel", first.id(), "--wait", "--reason", "no need"],
    )
    .await;
    assert_eq!(reported, format!("{} is cancelled\n", first.id()));
    let record = app.get(&format!("/runs/{}", first.id())).await.json();
    assert_eq!(record["cancel_reason"], "no need");
    let shown = printed(&app, &["show", first.id()]).await;
    assert!(shown.contains("reason     no need\n"), "{shown}");

    let reported = printed(&app, &["cancel", second.id(), "--json"]).await;
    let reported: Value = serde_json::from_str(&reported).expect("a run");
    assert_eq!(reported["cancel_reason"], "cancelled at the command line");
    assert_eq!(second.wait_for_end().await.status(), "cancelled");
}

#[tokio::test]
async fn exit_codes_show_missing_runs_and_daemons() {
    let app = TestApp::spawn().await;
    let unknown = "run_01890a5d-ac96-774b-bcce-b302099a8057";
    for command in ["show", "tree", "cancel"] {
        let (code, out, err) = ended(&app, &app.daemon.url, &[command, unknown]).await;
        assert_eq!((code, &*out), (2, ""), "{command}: {err}");
        assert!(err.contains(unknown), "{err}");
        let (code, _, err) = ended(&app, &app.daemon.url, &[command, ".."]).await;
        assert_eq!(code, 2, "{command}: {err}");
        assert!(err.contains("a run id is run_ and a UUID"), "{err}");
    }
    let (code, _, err) = ended(&app, &app.daemon.url, &["list", "--status", "odd"]).await;
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("a status must be one of queued, running"),
        "{err}"
    );
    let (code, _, err) = ended(&app, "http://127.0.0.1:1", &["list"]).await;
    assert_eq!(code, 3, "{err}");
    assert!(
        err.contains("could not reach a daemon at http://127.0.0.1:1/"),
        "{err}"
    );
}
