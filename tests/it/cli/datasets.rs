//! `axed dataset`: files of cases are checked, and recorded runs become cases.

use serde_json::{Value, json};

use crate::cli::home::{Ended, Home};
use crate::cli::recordings::{axed, read};
use crate::support::app::TestApp;
use crate::support::attachments::{PNG, picture_part};
use crate::support::provider::answer::{delegates, fails, hangs, says};

#[tokio::test]
async fn what_is_broken_is_named_by_file_line_and_key() {
    let home = Home::new();
    let none = home.axed(&["dataset", "check"]).await;
    assert_eq!(none.with(0), "");
    assert!(
        none.err.contains("no datasets in datasets;"),
        "{}",
        none.err
    );
    let good = "{\"input\": \"a\", \"expected\": {\"b\": 1}}\n\n{\"id\": \"x\", \"input\": [{\"type\": \"text\", \"text\": \"c\"}]}\n";
    home.write("datasets/good.jsonl", good);
    let checked = home.axed(&["dataset", "check"]).await;
    let expected = "good: 2 cases, 1 with expected, 0 with run\n";
    assert_eq!(checked.with(0), expected);

    let bad = [
        r#"{"inptu": "a"}"#,
        r#"{"input": "a", "messages": [{"role": "user", "content": "b"}, {"role": "asistant", "content": "c"}]}"#,
        r#"{"input": [{"type": "image", "data": "AAAA"}]}"#,
        r#"{"input": "a", "messages": [{"role": "assistant", "content": "c"}]}"#,
        r#"{"input": "a", "labels": {"": "b"}}"#,
        r#"{"id": "same", "input": "a"}"#,
        r#"{"id": "same", "input": "b"}"#,
        r#"{"input": 5}"#,
        r#"{"input": "a","#,
    ];
    home.write("datasets/bad.jsonl", &bad.join("\n"));
    home.write("datasets/not a name.jsonl", "");
    let checked = home.axed(&["dataset", "check"]).await;
    let lines: Vec<&str> = checked.with(1).lines().collect();
    let starts = [
        "datasets/bad.jsonl:1: error: /inptu: unknown key; did you mean \"input\"?",
        "datasets/bad.jsonl:2: error: /messages/1/role: unknown value `asistant`",
        "datasets/bad.jsonl:3: error: /input/0/media_type: is required",
        "datasets/bad.jsonl:4: error: /messages/0: the first message is a user's",
        "datasets/bad.jsonl:5: error: /labels: a label's key has 1 to 64 characters",
        "datasets/bad.jsonl:7: error: /id: \"same\" is the id of line 6 too",
        "datasets/bad.jsonl:8: error: /input: invalid type: integer `5`",
        "datasets/bad.jsonl:9: error: is not JSON: ",
        "good: 2 cases",
    ];
    assert_eq!(lines.len(), starts.len(), "{}", checked.out);
    for (line, start) in lines.iter().zip(starts) {
        assert!(
            line.starts_with(start),
            "{line} does not begin with {start}"
        );
    }
    home.axed(&["dataset", "check", "good"]).await.with(0);
    let file = ["dataset", "check", "datasets/bad.jsonl"];
    home.axed(&file).await.with(1);
    let json = home.axed(&["dataset", "check", "bad", "--json"]).await;
    let json: Value = serde_json::from_str(json.with(1)).expect("JSON");
    assert_eq!(json["data"][0]["problems"][5]["line"], 7, "{json:#}");

    let listed = home.axed(&["dataset", "list"]).await;
    let rows = listed.with(0);
    assert!(
        rows.starts_with("dataset\tcases\texpected\truns\terror\nbad\t\t\t\tline 1: "),
        "{rows}"
    );
    assert!(rows.ends_with("good\t2\t1\t0\t\n"), "{rows}");
}

#[tokio::test]
async fn a_name_is_never_a_path_and_the_directory_is_a_setting() {
    let home = Home::new();
    home.write("elsewhere/tickets.jsonl", "{\"input\": \"a\"}");
    home.write("secret.jsonl", "{\"input\": \"a\"}");
    for (name, message) in [
        (
            "tikets",
            "there is no dataset tikets in elsewhere; did you mean \"tickets\"?",
        ),
        ("a b", "is no name of a dataset"),
        ("missing.jsonl", "could not read missing.jsonl"),
    ] {
        let mut command = home.command(&["dataset", "check", name]);
        command.env("AXED_AGENTS__DATASETS", "elsewhere");
        let ended = crate::cli::home::ended(command).await;
        ended.with(2);
        assert!(ended.err.contains(message), "{}", ended.err);
    }
    let add = ["dataset", "add", "../secret", "--agent", "solo"];
    let ended = home.axed(&add).await;
    ended.with(2);
    assert!(ended.err.contains("is no name"), "{}", ended.err);
    let beside = ["dataset", "check", "--agents", "elsewhere/agents"];
    home.write("elsewhere/datasets/x.jsonl", "{\"input\": \"a\"}");
    assert!(home.axed(&beside).await.with(0).starts_with("x: 1 case,"));
}

async fn add(app: &TestApp, arguments: &[&str]) -> Ended {
    let arguments = [&["dataset", "add"], arguments].concat();
    axed(app, &arguments).await
}

fn cases(app: &TestApp, file: &str) -> Vec<Value> {
    let lines = read(app, file);
    let cases = lines.lines().map(serde_json::from_str);
    cases.collect::<Result<_, _>>().expect("JSON")
}

#[tokio::test]
async fn recorded_runs_become_cases_once() {
    let mut app = TestApp::setup()
        .sqlite()
        .agent("solo", "sub_agents = [\"kid\"]")
        .agent("kid", "")
        .spawn()
        .await;
    let replies = ["one", "two", "three", "{\"a\": 1}", "picture", "judged"];
    app.provider.will("solo", replies.map(says));
    app.provider.will(
        "solo",
        [fails(400, "no"), delegates([("kid", "go")]), says("last")],
    );
    app.provider.will("kid", [says("kid's")]);
    let messages = json!([
        {"role": "user", "content": "before"}, {"role": "assistant", "content": "then"}
    ]);
    let bodies = [
        json!({"input": "first", "context": "Be brief.", "messages": messages}),
        json!({"input": "in a session", "session": "s"}),
        json!({"input": "next", "session": "s"}),
        json!({"input": "as JSON", "response_format": {"type": "json_object"}}),
        json!({"input": [picture_part(PNG)]}),
        json!({"input": "judge", "labels": {"by": "a-judge"}}),
        json!({"input": "fails"}),
        json!({}),
    ];
    let mut ids = Vec::new();
    for body in bodies {
        ids.push(app.run_with("solo", body).await.id().to_owned());
    }
    // As that of a judge, which no client can start.
    let mark = "UPDATE runs SET labels = '{\"scorer\":\"solo/x\"}' WHERE labels LIKE '%a-judge%'";
    app.database().execute(mark);

    let url = app.daemon.url.clone();
    let server = ["--server", url.as_str()];
    let arguments = ["new", "--agent", "solo", "--since", "1d", "--expect"];
    let added = add(&app, &[&arguments[..], &server].concat()).await;
    let expected = "datasets/new.jsonl: 5 cases added, 1 run skipped: 1 with images or files\n";
    assert_eq!(added.with(0), expected);
    let earlier = json!([
        {"role": "user", "content": "in a session"},
        {"role": "assistant", "content": "two", "tool_calls": []}
    ]);
    let mut sent = messages.clone();
    sent[1]["tool_calls"] = json!([]);
    let wanted = [
        json!({"input": "first", "context": "Be brief.", "messages": sent, "expected": "one", "run": ids[0]}),
        json!({"input": "in a session", "expected": "two", "run": ids[1]}),
        json!({"input": "next", "messages": earlier, "expected": "three", "run": ids[2]}),
        json!({"input": "as JSON", "expected": {"a": 1}, "run": ids[3]}),
        json!({"input": "", "expected": "last", "run": ids[7]}),
    ];
    assert_eq!(cases(&app, "datasets/new.jsonl"), wanted);
    axed(&app, &["dataset", "check"]).await.with(0);

    let before = read(&app, "datasets/new.jsonl");
    let again = add(&app, &[&arguments[..], &server, &["--json"]].concat()).await;
    let report: Value = serde_json::from_str(again.with(0)).expect("JSON");
    let skipped = json!({"in it already": 5, "with images or files": 1});
    assert_eq!(
        (&report["added"], &report["skipped"]),
        (&json!(0), &skipped)
    );
    assert_eq!(read(&app, "datasets/new.jsonl"), before);

    let failed = ["failed", "--agent", "solo", "--status", "failed"];
    add(&app, &[&failed[..], &server].concat()).await.with(0);
    let case = json!({"input": "fails", "run": ids[6]});
    assert_eq!(cases(&app, "datasets/failed.jsonl"), [case]);
    let few = ["few", "--agent", "solo", "--limit", "2"];
    add(&app, &[&few[..], &server].concat()).await.with(0);
    assert_eq!(cases(&app, "datasets/few.jsonl").len(), 1);

    let named = ["named", "--run", ids[6].as_str(), "--run", ids[5].as_str()];
    let added = add(&app, &[&named[..], &server].concat()).await;
    let expected =
        "datasets/named.jsonl: 1 case added, 1 run skipped: 1 of scorers or evaluations\n";
    assert_eq!(added.with(0), expected);
    assert_eq!(
        cases(&app, "datasets/named.jsonl"),
        cases(&app, "datasets/failed.jsonl")
    );
    // The console shows the line that the command writes.
    let page = app.get(&format!("/ui/runs/{}/dataset", ids[0])).await.text;
    let line = before.lines().next().expect("a line");
    assert!(page.contains(&line.replace('"', "&quot;")), "{page}");
    let page = app.get(&format!("/ui/runs/{}/dataset", ids[4])).await.text;
    assert!(page.contains("Runs with images or files cannot."), "{page}");

    app.write("datasets/broken.jsonl", "{\"input\": \"a\"}\n{}\n");
    let broken = ["broken", "--agent", "solo"];
    let refused = add(&app, &[&broken[..], &server].concat()).await;
    refused.with(2);
    let message = "datasets/broken.jsonl:2: error: /input: is required";
    assert!(refused.err.contains(message), "{}", refused.err);
    assert_eq!(
        read(&app, "datasets/broken.jsonl"),
        "{\"input\": \"a\"}\n{}\n"
    );

    // Nothing of the directory is resumed: the run that hangs stays as it was.
    app.provider.will("solo", [hangs()]);
    app.start("solo", "hangs").await;
    app.provider.wait_for_request("solo", 10).await;
    let offline = ["old", "--agent", "solo", "--expect", "--data", "data"];
    let in_use = add(&app, &offline).await;
    in_use.with(1);
    assert!(in_use.err.contains("with --server URL"), "{}", in_use.err);
    app.daemon.kill().await;
    let added = add(&app, &offline).await;
    assert!(
        added
            .with(0)
            .starts_with("datasets/old.jsonl: 5 cases added, 1 run skipped")
    );
    assert_eq!(read(&app, "datasets/old.jsonl"), before);
    assert_eq!(app.provider.requests_for("solo").len(), 10);
    let missing = ["none", "--agent", "solo", "--data", "nowhere"];
    add(&app, &missing).await.with(2);
    assert!(!app.path("datasets/none.jsonl").exists() && !app.path("nowhere").exists());
    let unreachable = ["none", "--agent", "solo", "--server", "127.0.0.1:1"];
    add(&app, &unreachable).await.with(3);
}
