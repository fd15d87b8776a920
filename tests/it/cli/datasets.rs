//! `axed dataset`: files of cases are checked.

use serde_json::Value;

use crate::cli::home::Home;

#[tokio::test]
async fn what_is_broken_is_named_by_file_line_and_key() {
    let home = Home::new();
    let none = home.axed(&["dataset", "check"]).await;
    assert_eq!(none.with(0), "");
    assert!(
        none.err.contains("no datasets in datasets"),
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
    let beside = ["dataset", "check", "--agents", "elsewhere/agents"];
    home.write("elsewhere/datasets/x.jsonl", "{\"input\": \"a\"}");
    assert!(home.axed(&beside).await.with(0).starts_with("x: 1 case,"));
}
