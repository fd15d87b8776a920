//! `axed run`, as a person at a terminal and a script use it.

use crate::cli::home::{ECHO, Ended, Home, ended, leftovers, signal};
use crate::support::app::{Setup, TestApp, send};
use crate::support::daemon::Daemon;
use crate::support::{eventually, within_timeout};
use serde_json::Value;
use std::process::Stdio;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn run_prints_the_final_text() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    assert_eq!(home.axed(&["run", "echo", "hi"]).await.with(0), "got: hi\n");
    let arguments = ["run", "echo", "hi", "--context", "there"];
    assert_eq!(
        home.axed(&arguments).await.with(0),
        "got: hi\n\nContext:\nthere\n"
    );
    assert_eq!(leftovers(&home), [".keep"]);
    assert!(!home.path().join("data").exists());
}

#[tokio::test]
async fn run_reads_its_input_from_stdin() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let mut command = home.command(&["run", "echo"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("start axed");
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(b"from afar").await.expect("write");
    drop(stdin);
    let output = within_timeout("the end", child.wait_with_output()).await;
    assert_eq!(
        Ended::from(output.expect("wait")).with(0),
        "got: from afar\n"
    );
}

#[tokio::test]
async fn run_says_which_message_an_empty_stdin_means() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let ended = home.axed(&["run", "echo"]).await;
    assert_eq!(
        ended.with(0),
        "got: Execute the task described in your instructions.\n"
    );
    assert!(
        ended
            .err
            .contains("stdin is empty; the message is \"Execute the task"),
        "{}",
        ended.err
    );
}

#[tokio::test]
async fn run_reads_more_from_stdin_than_a_body_may_have() {
    let home = Home::new();
    home.agent("deaf", "", "[[replies]]\ntext = \"got\"\n");
    for (size, code) in [(5 << 20, 0), (65 << 20, 2)] {
        let mut command = home.command(&["run", "deaf"]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("start axed");
        let mut stdin = child.stdin.take().expect("stdin");
        // A command that refuses the input need not read it to its end.
        let _ = within_timeout("stdin", stdin.write_all(&vec![b'x'; size])).await;
        drop(stdin);
        let output = within_timeout("the end", child.wait_with_output()).await;
        let ended = Ended::from(output.expect("wait"));
        match code {
            0 => assert_eq!(ended.with(0), "got\n"),
            _ => {
                ended.with(code);
                assert!(ended.err.contains("larger than 64 MiB"), "{}", ended.err);
            }
        }
    }
}

#[tokio::test]
async fn run_keeps_its_record_in_the_given_directory() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let ended = home
        .axed(&["run", "echo", "hi", "--data", "kept", "--json"])
        .await;
    let run: Value = serde_json::from_str(ended.with(0)).expect("JSON");
    assert_eq!(run["content"], "got: hi");
    assert_eq!(run["status"], "completed");
    let id = run["id"].as_str().expect("an id");
    let arguments = ["serve", "--data", "kept", "--listen", "127.0.0.1:0"];
    let daemon = Daemon::start(home.command(&arguments)).await;
    let url = format!("{}/runs/{id}", daemon.url);
    let found = send(reqwest::Client::new().get(url)).await;
    assert_eq!(found.json(), run);
}

#[tokio::test]
async fn verbose_prints_turns_and_child_runs() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    home.agent(
        "lead",
        "sub_agents = [\"echo\"]\n",
        r#"replies = [
            { tool_calls = [{ name = "call_agent", arguments = { agent = "echo", task = "say it" } }] },
            { text = "{{result.1}}" },
        ]"#,
    );
    let ended = home.axed(&["run", "lead", "go", "--verbose"]).await;
    assert_eq!(ended.with(0), "got: Task: say it\n");
    for line in [
        "lead: turn 1: 1 message, 0 pending results",
        "lead: turn 1: tool_use, 1 tool call (call_agent); tokens so far: in ",
        "lead: → call_agent",
        "lead: → echo (depth 1): say it",
        "  echo: turn 1: ",
        ", no tool calls; tokens so far: in ",
        "lead: ← echo after ",
        " s, 17 characters",
        "lead: turn 2: 3 messages, 1 pending result",
    ] {
        assert!(
            ended.err.contains(line),
            "{line:?} is missing in {}",
            ended.err
        );
    }
    let silent = home.axed(&["run", "lead", "go"]).await;
    silent.with(0);
    assert_eq!(silent.err, "");
}

#[tokio::test]
async fn a_dry_run_needs_no_key() {
    let home = Home::new();
    home.write(
        "agents/real.toml",
        "name = \"real\"\nmodel = \"anthropic/some-model\"\nsystem_prompt = \"Be kind.\"\n",
    );
    let ended = home.axed(&["run", "real", "hi", "--dry-run"]).await;
    let shown = ended.with(0);
    for term in ["Be kind.", "anthropic/some-model", "hi"] {
        assert!(shown.contains(term), "{term:?} is missing in {shown}");
    }
    for section in [
        "\nSub-agents: (none)\n",
        "\nMax Depth: 3\n",
        "\nParallel: yes\n",
    ] {
        assert!(shown.contains(section), "{section:?} is missing in {shown}");
    }
    home.agent(
        "lead",
        "sub_agents = [\"alpha\", \"beta\"]\n[sub_agents_config]\ntimeout = 7\nparallel = false\n",
        ECHO,
    );
    let lead = home.axed(&["run", "lead", "hi", "--dry-run"]).await;
    let shown = lead.with(0);
    for section in [
        "\nSub-agents: alpha, beta\n",
        "\nParallel: no\n",
        "\nTimeout: 7s\n",
        "\nTools: call_agent\n",
    ] {
        assert!(shown.contains(section), "{section:?} is missing in {shown}");
    }
    let ended = home
        .axed(&["run", "real", "hi", "--dry-run", "--json"])
        .await;
    let dry: Value = serde_json::from_str(ended.with(0)).expect("JSON");
    assert_eq!(dry["message"], "hi");
}

#[tokio::test]
async fn exit_codes_match_how_a_run_ended() {
    let home = Home::new();
    home.write(
        "agents/real.toml",
        "name = \"real\"\nmodel = \"anthropic/some-model\"\n",
    );
    home.write("agents/broken.toml", "name = \"broken\"\nmodle = \"x/y\"\n");
    let call = "tool_calls = [{ name = \"call_agent\", arguments = { agent = \"x\", task = \"{{input}}\" } }]";
    let tired = format!("[[replies]]\n{call}\n");
    home.agent(
        "tired",
        "sub_agents = [\"x\"]\n[limits]\nmax_turns = 1\n",
        &tired,
    );
    home.agent(
        "poor",
        "sub_agents = [\"x\"]\n[budget]\nmax_tokens = 1\n",
        &tired,
    );
    home.agent(
        "slow",
        "",
        "delay_ms = 1000\n[[replies]]\ntext = \"x\"\noutput_tokens = 600\n",
    );
    for category in ["rate_limit", "auth", "bad_request"] {
        let script = format!("[[replies]]\nerrors = [{{ category = \"{category}\" }}]\n");
        home.agent(category, "[retry]\nmax_retries = 0\n", &script);
    }
    for (arguments, code, term) in [
        (&["nobody"][..], 2, "agent config not found"),
        (&["../echo"], 2, "agent config not found: ../echo"),
        (&["broken"], 2, "modle"),
        (&["real"], 3, "ANTHROPIC_API_KEY"),
        (
            &["tired", "--model", "nowhere/x"],
            2,
            "unsupported provider",
        ),
        (&["tired"], 1, "maximum conversation turns"),
        (&["poor"], 4, "budget exceeded"),
        (&["rate_limit"], 3, "rate_limit"),
        (&["auth"], 3, "auth"),
        (&["bad_request"], 1, "bad_request"),
        (&["slow", "--timeout", "1s"], 3, "timeout"),
        (
            &["slow", "--timeout", "soon"],
            2,
            "such as 90, 90s, 2m or 1h30m",
        ),
        (&["slow", "--key", "x"], 2, "--server or AXED_SERVER"),
        (
            &["slow", "--server", "http://127.0.0.1:1"],
            3,
            "could not reach",
        ),
        (
            &["slow", "--server", "ftp://x"],
            2,
            "not the address of a daemon",
        ),
    ] {
        let arguments: Vec<&str> = ["run"].iter().chain(arguments).copied().collect();
        let ended = home.axed(&arguments).await;
        assert_eq!(ended.code, code, "{arguments:?}: {}", ended.err);
        assert!(ended.err.contains(term), "{arguments:?}: {}", ended.err);
        assert_eq!(ended.out, "", "{arguments:?}");
    }
}

#[tokio::test]
async fn run_can_use_a_daemon() {
    let app = slow_and_echo().spawn().await;
    let home = Home::new();
    let server = app.daemon.url.as_str();
    let arguments = ["run", "echo", "hi", "--server", server, "--label", "who=me"];
    assert_eq!(home.axed(&arguments).await.with(0), "got: hi\n");
    let found = app.get("/runs?label.who=me").await.json();
    assert_eq!(found["data"].as_array().map(Vec::len), Some(1), "{found}");
    // The environment names it too, for every command.
    let by_environment = |arguments: &[&str]| {
        let mut command = home.command(arguments);
        command.env("AXED_SERVER", server);
        ended(command)
    };
    let run = by_environment(&["run", "echo", "hi", "--label", "who=me"]).await;
    assert_eq!(run.with(0), "got: hi\n");
    let list = by_environment(&["runs", "list", "--label", "who=me"]).await;
    assert_eq!(list.with(0).lines().count(), 3, "{}", list.out);
    let search = [
        "runs", "list", "--q", "HI", "--since", "1h", "--until", "0s",
    ];
    let list = by_environment(&search).await;
    assert_eq!(list.with(0).lines().count(), 3, "{}", list.out);
    let list = by_environment(&["runs", "list", "--error-code", "timeout"]).await;
    assert_eq!(list.with(0), "");
    eventually("axed health", async || {
        (by_environment(&["health"]).await.code == 0).then_some(())
    })
    .await;
    // Flags for this process override it.
    home.agent("local", "", ECHO);
    let local = by_environment(&["run", "local", "hi", "--agents", "agents"]).await;
    assert_eq!(local.with(0), "got: hi\n");
}

#[tokio::test]
async fn an_interrupted_run_is_cancelled() {
    let app = slow_and_echo().spawn().await;
    let home = Home::new();
    let mut command = home.command(&["run", "slow", "--server", &app.daemon.url, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("start axed");
    let started = async {
        while app.get("/runs?status=running").await.json()["data"][0].is_null() {
            tokio::task::yield_now().await;
        }
    };
    within_timeout("the run", started).await;
    signal(&child, "INT");
    let output = within_timeout("the end", child.wait_with_output()).await;
    let ended = Ended::from(output.expect("wait"));
    let run: Value = serde_json::from_str(ended.with(1)).expect("JSON");
    assert_eq!(run["status"], "cancelled");
}

fn slow_and_echo() -> Setup {
    TestApp::setup()
        .config("[providers.scripted]\nscripts = [\"scripts\"]")
        .agent("echo", "model = \"scripted/echo\"")
        .file("config/scripts/echo.toml", ECHO)
        .agent("slow", "model = \"scripted/slow\"")
        .file(
            "config/scripts/slow.toml",
            "delay_ms = 1000\n[[replies]]\ntext = \"x\"\noutput_tokens = 600\n",
        )
}

#[tokio::test]
async fn run_keeps_a_memory_only_with_a_data_directory() {
    let home = Home::new();
    home.agent("notes", "[memory]\nenabled = true\n", ECHO);
    let private = home.axed(&["run", "notes", "one"]).await;
    private.with(0);
    assert!(
        private
            .err
            .contains("the memory of notes is not kept; --data DIR"),
        "{}",
        private.err
    );
    assert!(!home.path().join("data").exists());
    let kept = home.axed(&["run", "notes", "two", "--data", "data"]).await;
    kept.with(0);
    assert!(
        kept.err
            .contains(" is kept in data; to see it: axed serve --data data"),
        "{}",
        kept.err
    );
    let arguments = ["gc", "notes", "--dry-run", "--json"];
    let ended = home.axed(&arguments).await;
    let report: Value = serde_json::from_str(ended.with(0)).expect("one report");
    assert_eq!(report["entries_before"], 1, "{report}");
}
