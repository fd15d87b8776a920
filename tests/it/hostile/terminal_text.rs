//! Text of models and clients on a terminal: it is read and does nothing. In pipes it is what it was.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::AXED;
use crate::support::provider::answer::{calls, fails, says};
use crate::support::within_timeout;

/// A title, a clear screen by C1, a bidirectional override, and invisible characters.
const HOSTILE: &str = "one\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}two\u{2066}\u{200b}\u{e0041}\nthree \u{1f469}\u{200d}\u{1f4bb}";

/// Runs a command with a terminal as stdin, stdout and stderr; what it wrote there.
async fn on_a_terminal(app: &TestApp, arguments: &[&str]) -> String {
    let program = "import os, pty, sys\nstatus = pty.spawn(sys.argv[1:])\n";
    let mut command = tokio::process::Command::new("python3");
    command
        .args(["-c", program, AXED])
        .args(arguments)
        .current_dir(app.path("."))
        .env("HOME", app.path("."))
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    let output = within_timeout("the command's end", command.output()).await;
    String::from_utf8(output.expect("python3").stdout).expect("UTF-8")
}

/// Checks that nothing in it commands a terminal but what erases the line of progress.
fn is_harmless(shown: &str) {
    let own = shown.replace("\r\u{1b}[K", "").replace("\r\n", "\n");
    let is_harmful = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{202e}' | '\u{2066}' | '\u{200b}' | '\u{e0041}')
    };
    assert!(!own.contains(is_harmful), "{own:?}");
}

async fn piped(app: &TestApp, arguments: &[&str]) -> (Vec<u8>, Vec<u8>) {
    let mut command = crate::support::daemon::axed_command(&app.path("."), arguments);
    let output = within_timeout("the command's end", command.output()).await;
    let output = output.expect("run axed");
    (output.stdout, output.stderr)
}

#[tokio::test]
async fn a_final_text_is_exact_in_a_pipe_and_escaped_on_a_terminal() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says(HOSTILE));
    let server = app.daemon.url.clone();
    let run = ["run", "solo", "go", "--server", &server];

    let (out, _) = piped(&app, &run).await;
    assert_eq!(out, format!("{HOSTILE}\n").into_bytes());

    let shown = on_a_terminal(&app, &run).await;
    is_harmless(&shown);
    assert!(
        shown.contains("two") && shown.contains("three \u{1f469}\u{200d}\u{1f4bb}"),
        "{shown:?}"
    );

    let (out, _) = piped(&app, &[&run[..], &["--json"]].concat()).await;
    let out = String::from_utf8(out).expect("UTF-8");
    is_harmless(&out);
    let json: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(json["content"], HOSTILE);
    let id = json["id"].as_str().expect("an id");
    for command in ["show", "tree"] {
        for more in [&[][..], &["--json"]] {
            let arguments = [&["runs", command, id, "--server", &server], more].concat();
            is_harmless(&String::from_utf8(piped(&app, &arguments).await.0).expect("UTF-8"));
        }
    }
}

#[tokio::test]
async fn tables_and_trees_are_escaped_too() {
    let hostile = serde_json::to_string(HOSTILE).expect("JSON");
    let app = TestApp::setup()
        .agent(
            "solo",
            &format!("system_prompt = {hostile}\ndescription = {hostile}\ntools = [\"read_file\"]\nworkdir = \".\"\n"),
        )
        .spawn()
        .await;
    app.provider.will(
        "solo",
        [
            calls([("no_such_tool", json!({}))]).with_text(HOSTILE),
            fails(400, HOSTILE),
        ],
    );
    let server = app.daemon.url.clone();

    let (out, err) = piped(&app, &["run", "solo", HOSTILE, "--server", &server]).await;
    assert_eq!(out, b"");
    let err = String::from_utf8(err).expect("UTF-8");
    assert!(err.contains("two"), "{err}");
    is_harmless(&err);
    for arguments in [
        &["run", "solo", HOSTILE, "--server", &server, "--dry-run"][..],
        &[
            "run",
            "solo",
            HOSTILE,
            "--server",
            &server,
            "--dry-run",
            "--json",
        ],
        &["runs", "list", "--server", &server],
        &["runs", "list", "--server", &server, "--json"],
        &["runs", "cancel", "run_1\u{202e}", "--server", &server],
        &["agents", "list"],
    ] {
        let (out, err) = piped(&app, arguments).await;
        for text in [out, err] {
            is_harmless(&String::from_utf8(text).expect("UTF-8"));
        }
    }
    is_harmless(&on_a_terminal(&app, &["agents", "show", "solo"]).await);
}

#[tokio::test]
async fn a_pending_approval_shows_all_arguments() {
    let app = TestApp::setup()
        .agent(
            "careful",
            "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]\napprove_timeout = 20\n",
        )
        .file("work/here.txt", "here")
        .spawn()
        .await;
    let arguments = json!({"path": "a\u{202e}txt.exe", "content": "x\u{200b}\u{9b}2J"});
    app.provider
        .always("careful", move |seen| match seen.tool_results().len() {
            0 => calls([("write_file", arguments.clone())]),
            _ => says("done"),
        });
    let server = app.daemon.url.clone();

    let shown = on_a_terminal(&app, &["run", "careful", "go", "--server", &server]).await;

    is_harmless(&shown);
    assert!(
        shown.contains("a\\u202etxt.exe") && shown.contains("x\\u200b\\u009b2J"),
        "{shown:?}"
    );
}
