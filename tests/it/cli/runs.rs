//! `axed runs`, as a person at a terminal and a script use it.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::gate::Gate;
use crate::support::provider::answer::{delegates, fails, says};
use crate::support::relay::Relay;
use crate::support::within_timeout;

/// What a command ended with: its code, stdout and stderr.
async fn ended(app: &TestApp, server: &str, arguments: &[&str]) -> (i32, String, String) {
    ended_in(&app.path("."), server, arguments).await
}

/// What a command in this directory ended with.
async fn ended_in(home: &Path, server: &str, arguments: &[&str]) -> (i32, String, String) {
    let arguments = [&["runs"], arguments, &["--server", server]].concat();
    let mut command = axed_command(home, &arguments);
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
    assert!(
        table.starts_with("run\tagent\tstatus\tage\ttokens\tusd\ttime\terror\n"),
        "{table}"
    );
    let planner = line(&planner).expect("the planner's line");
    assert!(planner.contains("\tplanner\tcompleted\t"), "{planner}");
    let is_young = ["s ago\t", "m ago\t"].map(|age| planner.contains(age));
    assert!(is_young.contains(&true), "{planner}");
    let failed = line(&failed).expect("the failed one's line");
    assert!(failed.contains("\treader\tfailed\t"), "{failed}");
    assert!(failed.contains("\tbad_request: "), "{failed}");
    for (since, count) in [("1h", 3), ("2020-01-01", 3), ("2100-01-01T00:00:00Z", 0)] {
        let listed = printed(&app, &["list", "--json", "--since", since]).await;
        assert_eq!(ids(&listed).len(), count, "{since}");
    }
    let (code, _, err) = ended(&app, &app.daemon.url, &["list", "--since", "lunch"]).await;
    assert_eq!(code, 2, "{err}");
    let wide = printed(&app, &["list", "-o", "wide", "--status", "failed"]).await;
    assert!(
        wide.contains("\truns\tturns\tmodel\tscores\terror\n"),
        "{wide}"
    );
    let (code, out, err) = ended(&app, &app.daemon.url, &["list", "--agent", "raeder"]).await;
    assert_eq!((code, &*out), (0, ""));
    assert!(err.contains("no matching runs"), "{err}");
    assert!(err.contains("did you mean \"reader\"?"), "{err}");
}

#[tokio::test]
async fn a_list_fits_a_terminal_of_80_columns() {
    let config = "[prices.\"anthropic/dear\"]\ninput = 1000000\noutput = 1000000";
    let app = TestApp::setup()
        .config(config)
        .agent("researcher-of-manuals", "model = \"anthropic/dear\"")
        .spawn()
        .await;
    let why = "the request is larger than the model's context window of 200000 tokens";
    app.provider.will("dear", [says("done"), fails(400, why)]);
    app.run("researcher-of-manuals", "go").await;
    app.run("researcher-of-manuals", "go").await;
    let arguments = [
        "runs",
        "list",
        "--color",
        "always",
        "--server",
        &app.daemon.url,
    ];
    let mut command = axed_command(&app.path("."), &arguments);
    let output = within_timeout("the list", command.output()).await;
    let listed = String::from_utf8(output.expect("run axed").stdout).expect("UTF-8");
    let is_code = regex::Regex::new("\u{1b}\\[[0-9;]*m").expect("an expression");
    let listed = is_code.replace_all(&listed, "");
    assert!(listed.starts_with("run "), "{listed}");
    for line in listed.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
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
        " 1 tool call by 2 runs\n",
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
        tree.contains(&format!("\nplanner\t{}\tcompleted\t", run.id())),
        "{tree}"
    );
    assert!(tree.contains("\n  reader\trun_"), "{tree}");
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
    for command in [
        "show", "tree", "cancel", "delete", "watch", "wait", "events", "messages",
    ] {
        let (code, out, err) = ended(&app, &app.daemon.url, &[command, unknown]).await;
        assert_eq!((code, &*out), (2, ""), "{command}: {err}");
        assert!(err.contains(unknown), "{err}");
        let (code, _, err) = ended(&app, &app.daemon.url, &[command, ".."]).await;
        assert_eq!(code, 2, "{command}: {err}");
        assert!(
            err.contains("a run id is run_ and a UUID; its first or last digits"),
            "{err}"
        );
    }
    let (code, _, err) = ended(&app, &app.daemon.url, &["list", "--status", "odd"]).await;
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("[possible values: queued, running, waiting"),
        "{err}"
    );
    for (option, form) in [
        ("--param", "a parameter must be NAME=VALUE"),
        ("--edit-result", "a result must be CALL=TEXT"),
        ("--label", "a label must be KEY=VALUE"),
    ] {
        let arguments = ["fork", unknown, option, "odd"];
        let (code, _, err) = ended(&app, &app.daemon.url, &arguments).await;
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(form), "{err}");
    }
    let (code, _, err) = ended(&app, "http://127.0.0.1:1", &["list"]).await;
    assert_eq!(code, 3, "{err}");
    assert!(
        err.contains("could not reach a daemon at http://127.0.0.1:1/"),
        "{err}"
    );
}

#[tokio::test]
async fn a_run_is_named_by_the_beginning_or_the_end_of_its_id() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one"), says("two")]);
    let (first, second) = (app.run("solo", "go").await, app.run("solo", "go").await);
    let status = |id: &str| format!("run        {id}\n");
    for id in [first.id(), second.id()] {
        let parts = [
            &id[..28],
            &id[4..28],
            &id.to_uppercase()[4..],
            &id[32..],
            &id[20..],
        ];
        for part in parts {
            let shown = printed(&app, &["show", part]).await;
            assert!(shown.contains(&status(id)), "{part}: {shown}");
        }
    }
    // Both were created at the same time, as far as these characters of it count.
    let (code, out, err) = ended(&app, &app.daemon.url, &["show", &first.id()[..8]]).await;
    assert_eq!((code, &*out), (2, ""), "{err}");
    assert!(err.contains("several runs have run_0"), "{err}");
    assert!(
        err.contains(first.id()) && err.contains(second.id()),
        "{err}"
    );
    // A terminal shows as much as these commands take.
    let arguments = [
        "runs",
        "list",
        "--color",
        "always",
        "--server",
        &app.daemon.url,
    ];
    let listed = axed_command(&app.path("."), &arguments).output().await;
    let listed = String::from_utf8(listed.expect("a list").stdout).expect("UTF-8");
    for id in [first.id(), second.id()] {
        assert!(listed.contains(&format!("{} ", &id[32..])), "{listed}");
        assert!(!listed.contains(&id[20..]), "{listed}");
    }
}

#[tokio::test]
async fn an_unknown_run_is_compared_with_the_newest() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("one")]);
    let run = app.run("solo", "go").await;
    let mistyped = |text: &str| {
        let other = if text.ends_with('0') { "1" } else { "0" };
        format!("{}{other}", &text[..text.len() - 1])
    };
    for part in [run.id(), &run.id()[28..]] {
        for command in ["show", "cancel", "tree"] {
            let arguments = [command, &mistyped(part)];
            let (code, _, err) = ended(&app, &app.daemon.url, &arguments).await;
            assert_eq!(code, 2, "{err}");
            let hint = format!("did you mean \"{}\"?", run.id());
            assert!(err.contains(&hint), "{command} {part}: {err}");
        }
    }
    let (code, _, err) = ended(&app, &app.daemon.url, &["show", "run_00000000"]).await;
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("there is no run \"run_00000000\""), "{err}");
    assert!(err.contains("axed runs list --all lists them"), "{err}");
}

#[tokio::test]
async fn a_run_is_watched_to_its_end() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let gate = Gate::closed();
    app.provider.will(
        "planner",
        [delegates([("reader", "look")]), says("all done")],
    );
    app.provider
        .will("reader", [says("read").after_gate(&gate)]);
    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("reader", 1).await;
    let id = run.id().to_owned();
    let arguments = ["watch", id.as_str()];
    let (watched, ()) = tokio::join!(printed(&app, &arguments), async { gate.open() });
    for line in [
        "planner: turn 1: 1 message, 0 pending results\n",
        "planner: → reader (depth 1): look\n",
        "  reader: turn 1: ",
        "planner: ← reader after ",
        "\nall done\n",
    ] {
        assert!(watched.contains(line), "{line:?} is missing in {watched}");
    }
    assert_eq!(
        printed(&app, &["wait", &id]).await,
        format!("{id} is completed\n")
    );
    let events = printed(&app, &["events", &id, "-o", "json"]).await;
    let events: Vec<Value> = events
        .lines()
        .map(|line| serde_json::from_str(line).expect("an event"))
        .collect();
    assert_eq!(events[0]["type"], "run.queued");
    assert_eq!(events.last().expect("events")["type"], "run.completed");
    let after = printed(&app, &["events", &id, "--after", "3"]).await;
    assert!(after.starts_with("seq\ttime\ttype\tevent\n4\t"), "{after}");
}

#[tokio::test]
async fn waiting_ends_with_the_runs_code_or_after_a_time() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let gate = Gate::closed();
    app.provider
        .will("solo", [fails(400, "no"), says("late").after_gate(&gate)]);
    let failed = app.run("solo", "go").await;
    for command in ["wait", "watch"] {
        let (code, _, err) = ended(&app, &app.daemon.url, &[command, failed.id()]).await;
        assert_eq!(code, 1, "{command}: {err}");
    }
    let arguments = ["wait", failed.id(), "--timeout", "0"];
    let (code, out, err) = ended(&app, &app.daemon.url, &arguments).await;
    assert_eq!((code, &*err), (1, ""));
    assert_eq!(out, format!("{} is failed\n", failed.id()));
    let slow = app.start("solo", "go").await;
    for seconds in ["0", "1"] {
        let arguments = ["wait", slow.id(), "--timeout", seconds];
        let (code, _, err) = ended(&app, &app.daemon.url, &arguments).await;
        assert_eq!(code, 3, "{err}");
        let expected = format!("has not ended after {seconds} s; it continues");
        assert!(err.contains(&expected), "{err}");
    }
    gate.open();
    slow.wait_for_end().await;
}

#[tokio::test]
async fn waiting_goes_on_at_the_daemon_that_is_started_next() {
    let mut app = TestApp::setup().agent("solo", "").spawn().await;
    let relay = Relay::start(&app.daemon.url).await;
    let gate = Gate::closed();
    let answer = || says("late").after_gate(&gate);
    app.provider.will("solo", [answer(), answer()]);
    let id = app.start("solo", "go").await.id().to_owned();
    let (home, server) = (app.path("."), relay.url.clone());
    let arguments = ["wait", id.as_str()];
    let restart = async {
        relay.wait_for("\"status\"").await;
        app.daemon.kill().await;
        app.restart_after_end().await;
        relay.set_daemon(&app.daemon.url);
        gate.open();
    };
    let ((code, out, err), ()) = tokio::join!(ended_in(&home, &server, &arguments), restart);
    assert_eq!(code, 0, "{err}");
    assert_eq!(out, format!("{id} is completed\n"));
    assert!(err.contains("; connecting again"), "{err}");

    // Where nobody has answered yet the address may be wrong.
    app.daemon.kill().await;
    for command in ["wait", "watch"] {
        let (code, _, err) = ended(&app, &app.daemon.url, &[command, &id]).await;
        assert_eq!(code, 3, "{command}: {err}");
        assert!(!err.contains("connecting again"), "{command}: {err}");
    }
}

#[tokio::test]
async fn progress_goes_on_at_the_daemon_that_is_started_next() {
    let mut app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let relay = Relay::start(&app.daemon.url).await;
    let gate = Gate::closed();
    let late = || says("read").after_gate(&gate);
    app.provider
        .will("planner", [delegates([("reader", "x")]), says("done")]);
    app.provider.will("reader", [late(), late()]);
    let (home, server) = (app.path("."), relay.url.clone());
    let arguments = ["run", "planner", "go", "--verbose", "--server", &server];
    let mut command = axed_command(&home, &arguments);
    let restart = async {
        app.provider.wait_for_concurrency("reader", 1).await;
        relay.wait_for("\"agent\":\"reader\"").await;
        app.daemon.kill().await;
        app.restart_after_end().await;
        relay.set_daemon(&app.daemon.url);
        relay.wait_for("run.resumed").await;
        gate.open();
    };
    let output = within_timeout("the command's end", command.output());
    let (output, ()) = tokio::join!(output, restart);
    let output = output.expect("run axed");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n");
    for line in [
        "; connecting again",
        "reader (depth 1)",
        "planner: resumed",
        "turn 2: end_turn",
    ] {
        assert_eq!(err.matches(line).count(), 1, "{line}: {err}");
    }
}

#[tokio::test]
async fn a_conversation_is_printed_and_a_run_deleted() {
    let app = TestApp::setup()
        .agent(
            "planner",
            "sub_agents = [\"reader\"]\nsystem_prompt = \"Be brief.\"",
        )
        .agent("reader", "")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("reader", "look")]), says("all done")],
    );
    app.provider.will("reader", [says("read \u{1b}[2J")]);
    let run = app.run("planner", "go there").await;
    let shown = printed(&app, &["messages", run.id()]).await;
    for text in [
        "system:\nBe brief.\n",
        "user:\ngo there\n",
        "{\"agent\":\"reader\",\"task\":\"look\"}\n",
        ":\nread \u{fffd}[2J\n",
        "assistant:\nall done\n",
    ] {
        assert!(shown.contains(text), "{text:?} is missing in {shown}");
    }
    let json = printed(&app, &["messages", run.id(), "-o", "json"]).await;
    let json: Value = serde_json::from_str(&json).expect("messages");
    assert_eq!(json["data"].as_array().map(Vec::len), Some(4), "{json}");
    assert_eq!(
        printed(&app, &["delete", run.id()]).await,
        format!("{} is deleted\n", run.id())
    );
    assert_eq!(app.get(&format!("/runs/{}", run.id())).await.status, 404);
}

#[tokio::test]
async fn a_run_is_repeated_with_its_recorded_request() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider
        .will("solo", [says("one"), says("two"), says("three")]);
    let request = json!({"input": "go", "context": "there", "labels": {"team": "a"}, "timeout": 77,
        "params": {"temperature": 0.5}, "messages": [{"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"}]});
    let first = app.run_with("solo", request).await.id().to_owned();
    let reported = printed(&app, &["rerun", &first]).await;
    let (second, rest) = reported.split_once(' ').expect("an id");
    assert_eq!(rest, format!("repeats {first}\n"));
    let (code, _, err) = ended(&app, &app.daemon.url, &["wait", second]).await;
    assert_eq!(code, 0, "{err}");
    let sent = app.provider.requests_for("solo");
    assert_eq!(sent.len(), 2);
    assert_eq!(sent[0].body, sent[1].body);
    let run = app.get(&format!("/runs/{second}")).await.json();
    assert_eq!(run["labels"], json!({"team": "a"}));
    assert_eq!(run["input"], "go");
    let events = app.get(&format!("/runs/{second}/events")).await.json();
    assert_eq!(events["data"][0]["request"]["timeout"], 77, "{events}");
    let watched = printed(&app, &["rerun", second, "--watch"]).await;
    assert!(watched.ends_with("\nthree\n"), "{watched}");
}
