//! The file tools from outside: calls of a model, their results, and the files on disk.

use std::fs;
use std::os::unix::fs::{FileExt, symlink};

use serde_json::json;

use crate::support::app::{Setup, TestApp};
use crate::support::events::{Event, count};
use crate::support::provider::answer::{calls, hangs, raw, says};
use crate::tools::call_results::call_results;
use crate::tools::mcp::UNATTENDED;

const ALL: [&str; 10] = [
    "copy_path",
    "create_directory",
    "delete_path",
    "edit_file",
    "find_path",
    "grep",
    "list_directory",
    "move_path",
    "read_file",
    "write_file",
];

/// An agent with these tools and the workdir `work`.
fn worker(tools: &[&str]) -> Setup {
    TestApp::setup()
        .agent("worker", &format!("workdir = \"work\"\ntools = {tools:?}"))
        .file("work/notes/a.md", "# One\nalpha\n")
}

#[tokio::test]
async fn a_model_works_with_files() {
    let app = worker(&ALL).spawn().await;
    let reported = call_results(
        &app,
        &[
            ("list_directory", json!({})),
            ("read_file", json!({"path": "notes/a.md"})),
            (
                "write_file",
                json!({"path": "new/deep/b.md", "content": "beta é\n"}),
            ),
            (
                "edit_file",
                json!({"path": "notes/a.md", "old_string": "alpha", "new_string": "omega"}),
            ),
            ("grep", json!({"pattern": "o[nm]e"})),
            (
                "grep",
                json!({"pattern": "(?i)ONE|beta", "include": "*.md"}),
            ),
            ("find_path", json!({"pattern": "**/*.md"})),
            ("create_directory", json!({"path": "x/y"})),
            ("copy_path", json!({"from": "notes", "to": "x/notes"})),
            ("move_path", json!({"from": "x/notes/a.md", "to": "z.md"})),
            ("delete_path", json!({"path": "new"})),
            ("list_directory", json!({"path": "."})),
        ],
    )
    .await;
    assert_eq!(
        reported,
        [
            "notes/",
            "1: # One\n2: alpha",
            "wrote 8 bytes to new/deep/b.md",
            "replaced 1 occurrence(s) in notes/a.md",
            "notes/a.md:2: omega",
            "new/deep/b.md:1: beta é\nnotes/a.md:1: # One",
            "new/deep/b.md\nnotes/a.md",
            "created directory x/y",
            "copied notes to x/notes (1 file(s))",
            "moved x/notes/a.md to z.md",
            "deleted new",
            "notes/\nx/\nz.md",
        ]
    );
    let z = fs::read_to_string(app.path("work/z.md")).expect("a file");
    assert_eq!(z, "# One\nomega\n");
}

#[tokio::test]
async fn no_pattern_of_a_model_crashes_the_daemon() {
    let app = worker(&["write_file", "grep", "find_path"]).spawn().await;
    let nested = |depth| format!("{}a{}", "{".repeat(depth), "}".repeat(depth));
    let reported = call_results(
        &app,
        &[
            ("find_path", json!({"pattern": nested(300)})),
            ("grep", json!({"pattern": "alpha", "include": nested(300)})),
            ("find_path", json!({"pattern": "a".repeat(1001)})),
            ("grep", json!({"pattern": "a".repeat(4001)})),
            ("grep", json!({"pattern": r"\w{2000}"})),
            (
                "write_file",
                json!({"path": ".gitignore", "content": format!("{}\nb*\n", nested(32_000))}),
            ),
            ("write_file", json!({"path": "b", "content": "alpha"})),
            ("grep", json!({"pattern": "alpha"})),
        ],
    )
    .await;
    assert_eq!(
        reported[..4],
        [
            "error: pattern is not a glob: it has more than 50 braces",
            "error: include is not a glob: it has more than 50 braces",
            "error: pattern has 1001 bytes, and at most 1000 are allowed",
            "error: pattern has 4001 bytes, and at most 4000 are allowed",
        ]
    );
    assert!(reported[4].starts_with("error: the pattern cannot be used: "));
    assert_eq!(reported[7], "notes/a.md:2: alpha", "the other rules hold");
}

#[tokio::test]
async fn errors_let_a_model_correct_its_call() {
    let app = worker(&["read_file", "edit_file", "write_file", "grep"])
        .spawn()
        .await;
    let reported = call_results(
        &app,
        &[
            ("read_file", json!({})),
            (
                "read_file",
                json!({"path": "notes/a.md", "offset": "two", "lines": 3}),
            ),
            ("read_file", json!({"path": "notes/a.md", "offset": 0})),
            ("read_file", json!({"path": "notes/b.md"})),
            ("read_file", json!({"path": "notes"})),
            ("read_file", json!({"path": "/etc/passwd"})),
            ("read_file", json!({"path": "../agents/worker.toml"})),
            (
                "edit_file",
                json!({"path": "notes/a.md", "old_string": "a", "new_string": "b"}),
            ),
            (
                "edit_file",
                json!({"path": "notes/a.md", "old_string": "", "new_string": "b"}),
            ),
            (
                "edit_file",
                json!({"path": "notes/a.md", "old_string": "nowhere", "new_string": "b"}),
            ),
            ("grep", json!({"pattern": "("})),
            ("delete_path", json!({"path": "notes"})),
            ("no_tool", json!({})),
        ],
    )
    .await;
    let expected = [
        "The arguments of read_file do not fit its schema: \"path\" is a required property",
        "/offset: \"two\" is not of type \"integer\"",
        "/offset: 0 is less than the minimum of 1",
        "notes/b.md does not exist",
        "notes is a directory; list_directory shows what is in it",
        "/etc/passwd is an absolute path; give it relative to the workdir",
        "../agents/worker.toml leads out of the workdir",
        "old_string occurs 2 times in notes/a.md",
        "/old_string: \"\" is shorter than 1 character",
        "old_string was not found in notes/a.md (0 occurrences)",
        "unclosed group",
        // There is such a tool, but not for this agent.
        "Unknown tool: \"delete_path\"",
        "Unknown tool: \"no_tool\"",
    ];
    for (reported, expected) in reported.iter().zip(expected) {
        assert!(
            reported.starts_with("error: ") && reported.contains(expected),
            "{reported}"
        );
    }
    assert!(
        reported[1].contains("'lines' was unexpected"),
        "{}",
        reported[1]
    );
    assert!(app.path("work/notes/a.md").exists());
}

#[tokio::test]
async fn other_json_is_accepted_as_text_if_a_string_is_expected() {
    let app = worker(&["write_file"]).spawn().await;
    let reported = call_results(
        &app,
        &[
            (
                "write_file",
                json!({"path": 7, "content": {"a": [1, true]}}),
            ),
            ("write_file", json!({"path": "x", "content": null})),
        ],
    )
    .await;
    assert_eq!(reported[0], "wrote 14 bytes to 7");
    assert!(
        reported[1].contains("/content: null is not of type \"string\""),
        "{}",
        reported[1]
    );
    let written = fs::read_to_string(app.path("work/7")).expect("a file");
    assert_eq!(written, r#"{"a":[1,true]}"#);
}

/// The environment of the daemon contains the keys of its providers.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn no_file_tool_reads_processes_in_proc() {
    let app = TestApp::setup()
        .agent("worker", &format!("workdir = \"/\"\ntools = {ALL:?}"))
        .spawn()
        .await;
    let stolen = app.path("stolen");
    let to = stolen.strip_prefix("/").expect("an absolute path");
    let mut sent = vec![
        ("list_directory", json!({"path": "proc"})),
        ("list_directory", json!({"path": "proc/self"})),
        ("grep", json!({"path": "proc/self", "pattern": "."})),
        ("copy_path", json!({"from": "proc/self/net", "to": to})),
    ];
    for path in ["proc/self/environ", "proc/self/maps", "proc/version"] {
        sent.extend([
            ("read_file", json!({"path": path})),
            ("grep", json!({"path": path, "pattern": "."})),
            ("copy_path", json!({"from": path, "to": to})),
        ]);
    }
    for (reported, call) in call_results(&app, &sent).await.iter().zip(&sent) {
        assert!(
            reported.starts_with("error: ") && reported.contains("it lies in /proc"),
            "{call:?}: {reported}"
        );
    }
    assert!(!stolen.exists());
}

#[tokio::test]
async fn a_whole_number_may_be_written_as_a_float() {
    let app = worker(&["read_file"]).spawn().await;
    let read = |offset: f64| ("read_file", json!({"path": "notes/a.md", "offset": offset}));
    let reported = call_results(&app, &[read(2.0), read(1e20)]).await;
    assert!(reported[0].starts_with("2: alpha"), "{}", reported[0]);
    let too_large = "error: The arguments of read_file cannot be read: ";
    assert!(reported[1].starts_with(too_large), "{}", reported[1]);
}

#[tokio::test]
async fn unreadable_arguments_are_reported() {
    let app = TestApp::setup()
        .agent(
            "worker",
            "model = \"openai/worker\"\ntools = [\"write_file\"]",
        )
        .spawn()
        .await;
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let contents = ["1e400", r#""\ud800""#, &deep];
    let call = |content| {
        let arguments = format!(r#"{{"path": "x", "content": {content}}}"#);
        json!({"id": content, "type": "function",
            "function": {"name": "write_file", "arguments": arguments}})
    };
    let message = json!({"role": "assistant", "content": null, "tool_calls": contents.map(call)});
    let reply = json!({"choices": [{"message": message, "finish_reason": "tool_calls"}]});
    let reply = raw(200, "application/json", reply.to_string());
    app.provider.will("worker", [reply, says("done")]);
    assert_eq!(app.run("worker", "go").await.output(), "done");

    let results = app
        .provider
        .wait_for_request("worker", 2)
        .await
        .tool_results();
    let whys = [
        "number out of range at line 1 column",
        "unexpected end of hex escape at line 1 column",
        "recursion limit exceeded at line 1 column",
    ];
    assert_eq!(results.len(), whys.len());
    for (result, why) in results.iter().zip(whys) {
        let beginning = "The arguments of write_file do not fit its schema: they cannot be read: ";
        assert!(result.contains(&format!("{beginning}{why}")), "{result}");
    }
}

#[tokio::test]
async fn a_long_result_is_cut_with_a_note_on_how_to_get_the_rest() {
    let app = worker(&["read_file", "list_directory"])
        .config("[tools]\nmax_result = \"4 KiB\"")
        .file("work/long.txt", &"some line of a long file\n".repeat(1000))
        .spawn()
        .await;
    let reported = call_results(
        &app,
        &[
            ("read_file", json!({"path": "long.txt"})),
            ("read_file", json!({"path": "long.txt", "offset": 999})),
            (
                "read_file",
                json!({"path": "long.txt", "offset": 2, "limit": 1}),
            ),
        ],
    )
    .await;
    assert!(reported[0].len() <= 4096);
    let shown = reported[0].lines().count() - 1;
    assert!(reported[0].ends_with(&format!(
        "... (more follows; continue with offset {})",
        shown + 1
    )));
    assert_eq!(
        reported[1],
        "999: some line of a long file\n1000: some line of a long file"
    );
    assert_eq!(
        reported[2],
        "2: some line of a long file\n... (more follows; continue with offset 3)"
    );
}

#[tokio::test]
async fn all_edits_of_one_reply_are_applied() {
    let words: Vec<String> = (0..20).map(|number| format!("<{number}>")).collect();
    let app = worker(&["edit_file"])
        .file("work/f", &words.join("\n"))
        .spawn()
        .await;
    let edit = |term: &String| {
        let arguments = json!({"path": "f", "old_string": term, "new_string": "done"});
        ("edit_file", arguments)
    };
    app.provider
        .will("worker", [calls(words.iter().map(edit)), says("done")]);
    app.run("worker", "go").await;
    let edited = fs::read_to_string(app.path("work/f")).expect("a file");
    assert_eq!(edited, vec!["done"; 20].join("\n"));
}

#[tokio::test]
async fn a_dry_run_and_the_model_show_the_same_tools() {
    let app = worker(&ALL).spawn().await;
    app.provider.will("worker", [says("done")]);
    app.run("worker", "go").await;
    let mut names = app
        .provider
        .wait_for_request("worker", 1)
        .await
        .tool_names();
    names.sort();
    assert_eq!(names, ALL);
    let dry = app
        .post("/agents/worker/dry-run", &json!({"input": "go"}))
        .await;
    assert_eq!(dry.status, 200, "{}", dry.text);
    let tools = dry.json()["tools"].as_array().expect("tools").clone();
    let mut names: Vec<&str> = tools
        .iter()
        .filter_map(|tool| tool["name"].as_str())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ALL);
}

#[tokio::test]
async fn a_write_interrupted_by_a_crash_fails_its_run() {
    let mut app = worker(&["write_file"]).config(UNATTENDED).spawn().await;
    // Long enough that a crash mostly hits its middle; where it does not, the run has ended in order, and another is tried.
    let content = "x".repeat(16 << 20);
    for attempt in 0..20 {
        let path = format!("big{attempt}");
        let call = ("write_file", json!({"path": path, "content": content}));
        app.provider.will("worker", [calls([call]), says("done")]);
        let id = app.start("worker", "go").await.id().to_owned();
        let mut events = app.events(&app.find(&id).await).await;
        events
            .until_matches(|events| count(events, "tool.started") == 1)
            .await;
        app.crash_and_restart().await;
        let run = app.find(&id).await.wait_for_end().await;
        let written = fs::read_to_string(app.path("work").join(&path)).ok();
        assert!(
            written.is_none_or(|text| text.len() == content.len()),
            "whole or not at all"
        );
        let left: Vec<_> = fs::read_dir(app.path("work"))
            .expect("a directory")
            .flatten()
            .collect();
        assert!(left.len() <= 2 + attempt, "{left:?}");
        if run.status() == "failed" {
            let (code, message) = run.failure();
            assert_eq!(code, "interrupted");
            assert!(message.contains("write_file"), "{message}");
            assert_eq!(app.provider.requests_for("worker").len(), 2 * attempt + 1);
            return;
        }
        assert_eq!(run.output(), "done");
    }
    panic!("no crash hit a write");
}

#[tokio::test]
async fn a_read_interrupted_by_a_crash_is_repeated() {
    let mut app = worker(&["read_file"])
        .file("work/lines", &"\n".repeat(20 << 20))
        .spawn()
        .await;
    app.provider
        .always("worker", |seen| match seen.tool_results().is_empty() {
            true => calls([("read_file", json!({"path": "lines", "offset": 20 << 20}))]),
            false => says("done"),
        });
    for _ in 0..5 {
        let id = app.start("worker", "go").await.id().to_owned();
        let mut events = app.events(&app.find(&id).await).await;
        events
            .until_matches(|events| count(events, "tool.started") == 1)
            .await;
        app.daemon.kill().await;
        app.restart_after_end().await;
        let run = app.find(&id).await.wait_for_end().await;
        assert_eq!(run.output(), "done");
        let reported = app
            .provider
            .requests()
            .last()
            .expect("a request")
            .tool_results();
        assert_eq!(reported, [format!("{}: ", 20 << 20)]);
        let events = run.events().await;
        assert_eq!(count(&events, "tool.started"), 1);
        let at = |kind: &str| events.iter().position(|event| event.kind() == kind);
        if at("run.resumed") < at("tool.completed") {
            return;
        }
    }
    panic!("no crash hit a read");
}

#[tokio::test]
async fn a_search_ends_with_its_run() {
    let app = worker(&["read_file"])
        .file("work/lines", &"\n".repeat(20 << 20))
        .spawn()
        .await;
    let call = ("read_file", json!({"path": "lines", "offset": 20 << 20}));
    app.provider.will("worker", [calls([call]), hangs()]);
    let run = app.start("worker", "go").await;
    let mut events = app.events(&run).await;
    events
        .until_matches(|events| count(events, "tool.started") == 1)
        .await;
    assert_eq!(run.cancel("enough").await.status(), "cancelled");
}

/// Calls of one reply run side by side; only one of them gets a name.
#[tokio::test]
async fn what_exists_is_never_replaced() {
    let mut setup = worker(&ALL);
    for n in 0..20 {
        setup = setup.file(&format!("work/from/{n}.md"), &n.to_string());
    }
    let app = setup.spawn().await;
    let calls: Vec<_> = (0..20)
        .map(|n| {
            let tool = if n % 2 == 0 { "move_path" } else { "copy_path" };
            (tool, json!({"from": format!("from/{n}.md"), "to": "to.md"}))
        })
        .collect();
    let reported = call_results(&app, &calls).await;
    let done = |text: &&String| !text.starts_with("error: ");
    assert_eq!(reported.iter().filter(done).count(), 1, "{reported:#?}");
    let winner = reported.iter().position(|text| done(&text)).expect("one");
    let refused = reported.iter().filter(|text| !done(text));
    for text in refused {
        assert!(text.contains("to.md exists already"), "{text}");
    }
    let read = |path: &str| fs::read_to_string(app.path(path)).ok();
    assert_eq!(read("work/to.md"), Some(winner.to_string()));
    for n in 0..20 {
        let is_moved = n == winner && n % 2 == 0;
        let left = read(&format!("work/from/{n}.md"));
        assert_eq!(left, (!is_moved).then(|| n.to_string()), "{n}");
    }
    let all = fs::read_dir(app.path("work")).expect("a directory");
    assert_eq!(all.count(), 3, "no temporary file is left");
}

#[tokio::test]
async fn a_directory_is_not_copied_into_itself_through_a_link() {
    let app = worker(&ALL).spawn().await;
    symlink(".", app.path("work/here")).expect("a link");
    symlink("notes", app.path("work/same")).expect("a link");
    let reported = call_results(
        &app,
        &[
            ("copy_path", json!({"from": "here", "to": "backup"})),
            ("copy_path", json!({"from": "same", "to": "notes/backup"})),
            ("copy_path", json!({"from": "same", "to": "copy"})),
            ("move_path", json!({"from": "same", "to": "notes/same"})),
        ],
    )
    .await;
    assert_eq!(
        reported,
        [
            "error: here cannot go into itself, backup",
            "error: same cannot go into itself, notes/backup",
            "copied same to copy (1 file(s))",
            "moved same to notes/same",
        ]
    );
    assert!(!app.path("work/backup").exists());
    assert!(!app.path("work/notes/backup").exists());
}

#[tokio::test]
async fn calls_that_read_for_long_delay_no_run_of_another_agent() {
    let app = worker(&["read_file"]).agent("other", "").spawn().await;
    // A sparse file whose lines take longer to skip than a call may take.
    let large = fs::File::create(app.path("work/large.txt")).expect("a file");
    let text = "line\n".repeat(2000);
    large.write_all_at(text.as_bytes(), 0).expect("write");
    for line in 1..2048 {
        large.write_all_at(b"\n", line * (15 << 20)).expect("write");
    }
    let far = |n| {
        let arguments = json!({"path": "large.txt", "offset": 1_000_000 + n});
        ("read_file", arguments)
    };
    let mut readers = Vec::new();
    for _ in 0..5 {
        app.provider.will("worker", [calls((0..128).map(far))]);
        readers.push(app.start("worker", "read").await);
    }
    app.provider.always("worker", |_| says("done"));
    for reader in &readers {
        let mut events = app.events(reader).await;
        let is_reading = |events: &[Event]| count(events, "tool.started") == 128;
        events.until_matches(is_reading).await;
    }
    app.provider.will("other", [says("done")]);
    assert_eq!(app.run("other", "go").await.output(), "done");
    assert_eq!(
        app.provider.requests_for("worker").len(),
        5,
        "a reader has all its results already"
    );
}
