//! The commands, as a person at a terminal and a script use them.

use crate::cli::home::{ECHO, Ended, Home, ended, leftovers, signal};
use crate::support::app::TestApp;
use crate::support::daemon::{Daemon, axed_command};
use crate::support::{eventually, within_timeout};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, BufReader};

#[tokio::test]
async fn serve_prints_one_line_and_exits_with_0_on_a_signal() {
    let home = Home::new();
    let mut daemon = Daemon::start(home.command(&["serve", "--listen", "127.0.0.1:0"])).await;
    assert!(
        daemon.url.starts_with("http://127.0.0.1:"),
        "{}",
        daemon.url
    );
    let console = format!("The console is at {}/ui/", daemon.url);
    daemon.wait_for_log(&console).await;
    eventually("axed health", async || {
        let health = home.axed(&["health", "--server", &daemon.url]).await;
        (health.code == 0 && health.out.is_empty()).then_some(())
    })
    .await;
    daemon.signal("INT");
    assert!(daemon.wait_for_exit().await.success());
    let health = home.axed(&["health", "--server", &daemon.url]).await;
    health.with(1);
    assert!(
        health.err.contains("could not reach a daemon"),
        "{}",
        health.err
    );
}

#[tokio::test]
async fn the_console_is_named_to_people_unless_it_is_off() {
    let home = Home::new();
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--log-format", "human"];
    let mut daemon = Daemon::start(home.command(&arguments)).await;
    let console = format!("axed: the console is at {}/ui/\n", daemon.url);
    daemon.wait_for_log(&console).await;
    let page = reqwest::Client::new().get(format!("{}/ui/", daemon.url));
    let page = page.send().await;
    assert_eq!(page.expect("a page").status(), 200);
    daemon.signal("INT");
    daemon.wait_for_exit().await;

    home.write("config/axed.toml", "[clients]\nconsole = false\n");
    let mut daemon = Daemon::start(home.command(&arguments)).await;
    daemon.signal("INT");
    daemon.wait_for_exit().await;
    assert!(!daemon.log().contains("console"), "{}", daemon.log());
}

#[tokio::test]
async fn serve_reloads_agents_on_sighup() {
    let app = TestApp::setup()
        .config("[agents]\nwatch = false")
        .spawn()
        .await;
    app.write_agent("late", "");
    app.daemon.signal("HUP");
    let known = async {
        while app.get("/agents/late").await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    within_timeout("the new agent", known).await;
}

#[tokio::test]
async fn an_invalid_configuration_is_named_and_exits_with_2() {
    let home = Home::new();
    for (config, place) in [
        ("[server]\nlistne = \"127.0.0.1:0\"\n", "config/axed.toml:2"),
        ("[server]\nlisten = 1\n", "config/axed.toml:2"),
        ("[server\n", "config/axed.toml:1"),
        ("[telemetry]\nlog = \"=,=/[\"\n", "telemetry.log"),
        ("[telemetry]\nlog = \"inof\"\n", "\"inof\" is no level"),
    ] {
        home.write("config/axed.toml", config);
        let ended = home.axed(&["serve"]).await;
        assert_eq!(ended.with(2), "");
        assert!(ended.err.contains(place), "{config}: {}", ended.err);
    }
    home.axed(&["serve", "--config", "missing.toml"])
        .await
        .with(2);
    home.axed(&["serve", "--no-such-flag"]).await.with(2);
    home.axed(&[]).await.with(2);
    assert!(home.axed(&["--help"]).await.with(0).contains("serve"));
}

#[tokio::test]
async fn the_demo_prints_a_tree_and_leaves_no_files() {
    let home = Home::new();
    let ended = home.axed(&["demo"]).await;
    let shown = ended.with(0);
    for term in [
        "planner-scripted",
        "  researcher-scripted",
        "    (read the README)",
        "    critic-scripted",
        "  triage-scripted",
        "  writer-scripted",
        "total: 6 runs",
        "(seen): 1: Version 2.0 of the importer reads empty files, too.",
        "Plan for: Prepare the release of version 2.0",
    ] {
        assert!(shown.contains(term), "{term:?} is missing in {shown}");
    }
    assert!(!shown.contains('\x1b'), "{shown}");
    assert_eq!(leftovers(&home), [".keep"]);
    assert!(!home.path().join("data").exists());
}

#[tokio::test]
async fn the_demo_can_keep_serving() {
    let home = Home::new();
    let mut command = home.command(&["demo", "--serve"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("start axed");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let mut errors = BufReader::new(child.stderr.take().expect("stderr")).lines();
    let url = loop {
        let line = within_timeout("a line", lines.next_line())
            .await
            .expect("read");
        let line = line.expect("a request to try");
        if let Some(url) = line.trim().strip_prefix("curl ") {
            break url.to_owned();
        }
    };
    let answer = reqwest::Client::new().get(&url).send().await;
    assert_eq!(answer.expect("an answer").status(), 200);
    let line = within_timeout("a line", errors.next_line()).await;
    let line = line.expect("read").expect("the console");
    let console = line.strip_prefix("axed: the console is at ");
    let page = reqwest::Client::new().get(console.expect("an address"));
    assert_eq!(page.send().await.expect("a page").status(), 200);
    signal(&child, "INT");
    let status = within_timeout("the end", child.wait()).await.expect("wait");
    assert!(status.success(), "{status}");
    assert_eq!(leftovers(&home), [".keep"]);
}

#[tokio::test]
async fn what_does_not_exist_is_no_failure_of_the_daemon() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    for (arguments, message) in [
        (
            &["agents", "check", "--agents", "nowhere", "--strict"][..],
            "",
        ),
        (&["runs", "list", "--limit", "0"], "use a number from 1 on"),
        (
            &["batch", "echo", "nowhere.jsonl"],
            "could not read nowhere.jsonl",
        ),
        (
            &["data", "check", "--data", "nowhere"],
            "axed: there is no database",
        ),
        (
            &["data", "migrate", "--to", "sqlite"],
            "axed: data.url is not set",
        ),
    ] {
        let ended = home.axed(arguments).await;
        assert_eq!(ended.code, 2, "{arguments:?}: {}", ended.err);
        assert!(ended.err.contains(message), "{arguments:?}: {}", ended.err);
    }
    let checked = home.axed(&["agents", "check", "--agents", "nowhere"]).await;
    assert!(
        checked
            .with(0)
            .contains("nowhere: warning: there is no agents directory")
    );
}

#[tokio::test]
async fn a_new_agent_file_is_valid_and_never_overwrites() {
    let home = Home::new();
    let ended = home.axed(&["agents", "init", "helper"]).await;
    assert_eq!(ended.with(0), "agents/helper.toml\n");
    let written = home.read("agents/helper.toml");
    let again = home.axed(&["agents", "init", "helper"]).await;
    again.with(2);
    assert!(again.err.contains("is there already"), "{}", again.err);
    assert_eq!(home.read("agents/helper.toml"), written);
    home.axed(&["agents", "init", "../helper"]).await.with(2);
    home.axed(&["agents", "check"]).await.with(0);
    // Placeholders of its examples are no names of this agent.
    assert!(written.contains("with `{name}` for values of the input"));
    for line in [
        "(set ANTHROPIC_API_KEY or add to config.toml); in config/axed.toml it is api_key in [providers.anthropic]",
        "--model ollama/qwen3:4b, or --scripted",
        "\n  axed agents check agents/helper.toml\n  axed run helper \"Say hello\"\n",
    ] {
        assert!(ended.err.contains(line), "{line} is not in {}", ended.err);
    }
}

#[tokio::test]
async fn a_new_agent_can_do_without_a_key() {
    let home = Home::new();
    // Nothing is configured.
    fs::remove_dir_all(home.path().join("config")).expect("no configuration");
    let ended = home.axed(&["agents", "init", "parrot", "--scripted"]).await;
    assert_eq!(
        ended.with(0),
        "agents/parrot.toml\nconfig/scripts/parrot.toml\n"
    );
    assert!(!ended.err.contains("before the first run"), "{}", ended.err);
    home.axed(&["agents", "check", "--strict"]).await.with(0);
    let run = home.axed(&["run", "parrot", "Say hello"]).await;
    assert_eq!(run.with(0), "You wrote: Say hello\n");

    let model = ["--model", "ollama/qwen3:4b"];
    let ended = home
        .axed(&[&["agents", "init", "own"][..], &model].concat())
        .await;
    ended.with(0);
    assert!(
        home.read("agents/own.toml")
            .contains("\nmodel = \"ollama/qwen3:4b\"\n")
    );
    assert!(ended.err.contains("ollama pull qwen3:4b"), "{}", ended.err);
    for refused in [["--model", "gpt"], ["--model", "ollama/x"]] {
        let arguments = [&["agents", "init", "own"][..], &refused].concat();
        home.axed(&arguments).await.with(2);
    }

    // With scripts of its own.
    home.write(
        "config/axed.toml",
        "[providers.scripted]\nscripts = [\"../lines\"]\n",
    );
    let ended = home.axed(&["agents", "init", "actor", "--scripted"]).await;
    assert_eq!(
        ended.with(0).lines().nth(1),
        Some("config/../lines/actor.toml")
    );
    home.axed(&["run", "actor", "go"]).await.with(0);
}

#[tokio::test]
async fn a_mistyped_name_is_answered_with_the_one_that_was_meant() {
    let home = Home::new();
    home.agent("helper", "", ECHO);
    home.write("pictures/photo.png", "");
    home.write("lines.jsonl", "");
    home.write("config/other.toml", "");
    for (arguments, hint) in [
        (&["agents", "show", "hepler"][..], "\"helper\""),
        (&["run", "helpr", "go"], "\"helper\""),
        (
            &[
                "run",
                "helper",
                "go",
                "--dry-run",
                "--model",
                "scripted/helper",
                "--file",
                "pictures/foto.png",
            ],
            "\"pictures/photo.png\"",
        ),
        (&["batch", "helper", "line.jsonl"], "\"lines.jsonl\""),
        (
            &["agents", "check", "agents/helpre.toml"],
            "\"agents/helper.toml\"",
        ),
        (
            &["agents", "list", "--config", "config/othre.toml"],
            "\"config/other.toml\"",
        ),
    ] {
        let ended = home.axed(arguments).await;
        ended.with(2);
        let hint = format!("did you mean {hint}?");
        assert!(ended.err.contains(&hint), "{arguments:?}: {}", ended.err);
    }
}

#[tokio::test]
async fn a_shown_definition_reads_back_as_the_same_agent() {
    let home = Home::new();
    home.axed(&["agents", "init", "helper"]).await.with(0);
    home.write("all/helper.toml", EVERY_KEY);
    for dir in ["agents", "all"] {
        let shown = home
            .axed(&["agents", "show", "helper", "--agents", dir])
            .await;
        home.write("shown/helper.toml", shown.with(0));
        let again = home
            .axed(&["agents", "show", "helper", "--agents", "shown"])
            .await;
        let body =
            |text: &str| -> String { text.lines().filter(|line| !line.starts_with('#')).collect() };
        assert_eq!(body(again.with(0)), body(shown.with(0)));
    }
    home.axed(&["agents", "show", "nobody"]).await.with(2);
}

const EVERY_KEY: &str = r#"
name = "helper"
description = "Says \"hi\""
model = "anthropic/a"
fallback_models = ["openai/b"]
system_prompt = """
Two lines
and "quotes"."""
skill = "greeting"
files = ["*.md"]
workdir = "/srv"
sub_agents = ["a", "b"]
stream = true
timeout = 7
[sub_agents_config]
max_depth = 2
parallel = false
timeout = 5
max_concurrent = 3
[params]
temperature = 0.0
max_tokens = 9
top_p = 0.5
stop = ["END"]
[params.response_format]
type = "json_schema"
schema = { type = "object", required = ["a"], properties = { a = { enum = [1, 2.5, true] } } }
[limits]
max_turns = 4
[budget]
max_tokens = 1
max_cost_usd = 0.25
max_tool_calls = 2
max_runs = 3
[retry]
max_retries = 0
backoff = "fixed"
initial_delay_ms = 1
max_delay_ms = 2
[memory]
enabled = true
path = "/srv/helper.md"
last_n = 1
max_entries = 2
"#;

#[tokio::test]
async fn invalid_files_are_listed_with_their_errors() {
    let home = Home::new();
    home.agent("good", "description = \"is fine\"\n", ECHO);
    home.write("agents/bad.toml", "name = \"bad\"\n");
    home.write("agents/two words.toml", "name = \"two words\"\n");
    let list = home.axed(&["agents", "list"]).await;
    for term in ["good", "is fine", "bad", "missing required field: model"] {
        assert!(
            list.with(0).contains(term),
            "{term:?} is missing in {}",
            list.out
        );
    }
    for arguments in [
        &["agents", "check"][..],
        &["agents", "check", "agents/bad.toml"],
    ] {
        let check = home.axed(arguments).await;
        let said = check.with(2);
        assert!(said.contains("agents/bad.toml: error: "), "{said}");
    }
    let all = home.axed(&["agents", "check"]).await;
    assert!(all.with(2).contains("agents/two words.toml: error: "));
    assert_eq!(
        home.axed(&["agents", "check", "agents/good.toml"])
            .await
            .with(0),
        "agents/good.toml: ok\n"
    );
    home.axed(&["agents", "check", "agents/none.toml"])
        .await
        .with(2);
}

#[tokio::test]
async fn memories_are_analysed_and_trimmed() {
    let home = Home::new();
    home.agent("notes", "[memory]\nenabled = true\nlast_n = 1\n", ECHO);
    home.agent("forgetful", "", ECHO);
    for input in ["one", "two"] {
        let arguments = ["run", "notes", input, "--data", "kept"];
        home.axed(&arguments).await.with(0);
    }
    for (arguments, before, after) in [
        (&["gc", "notes", "--dry-run"][..], 2, 2),
        (&["gc", "--all"], 2, 1),
        (&["gc", "notes"], 1, 1),
    ] {
        let arguments: Vec<&str> = arguments
            .iter()
            .chain(&["--data", "kept", "--json"])
            .copied()
            .collect();
        let ended = home.axed(&arguments).await;
        let report: Value = serde_json::from_str(ended.with(0)).expect("one report");
        assert_eq!(report["agent"], "notes");
        assert_eq!(report["entries_before"], before, "{report}");
        assert_eq!(report["entries_after"], after, "{report}");
    }
    home.axed(&["gc", "forgetful", "--data", "kept"])
        .await
        .with(2);
    home.axed(&["gc"]).await.with(2);
}

#[tokio::test]
async fn a_collection_without_a_memory_says_so() {
    let home = Home::new();
    home.agent("forgetful", "", ECHO);
    let ended = home.axed(&["gc", "--all", "--data", "kept"]).await;
    assert_eq!(ended.with(0), "");
    assert!(ended.err.contains("no agent has a memory"), "{}", ended.err);
}

#[tokio::test]
async fn a_data_directory_of_a_daemon_is_not_opened_and_the_daemon_can_do_the_same() {
    let home = Home::new();
    home.agent("notes", "[memory]\nenabled = true\nlast_n = 1\n", ECHO);
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--data", "kept"];
    let daemon = Daemon::start(home.command(&arguments)).await;
    for command in [&["gc", "notes"][..], &["run", "notes", "one"]] {
        let in_use = home.axed(&[command, &["--data", "kept"]].concat()).await;
        in_use.with(1);
        let advice = "; or have the daemon there do it with --server URL";
        assert!(in_use.err.contains(advice), "{}", in_use.err);
        let server = ["--server", &daemon.url];
        home.axed(&[command, &server].concat()).await.with(0);
    }
}

#[tokio::test]
async fn a_closed_stdout_causes_no_panic() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    for arguments in [
        &["agents", "list"][..],
        &["run", "echo", "hi", "--json"],
        &["--help"],
    ] {
        let mut command = home.command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start axed");
        drop(child.stdout.take());
        let output = within_timeout("the end", child.wait_with_output()).await;
        let ended = Ended::from(output.expect("wait"));
        assert!(
            !ended.err.contains("panicked"),
            "{arguments:?}: {}",
            ended.err
        );
    }
}

#[tokio::test]
async fn help_that_cannot_be_written_is_an_error() {
    let home = Home::new();
    for argument in ["--help", "--version"] {
        let full = fs::File::options().write(true).open("/dev/full");
        let mut command = home.command(&[argument]);
        command.stdout(full.expect("a full device"));
        command.stderr(Stdio::piped());
        let child = command.spawn().expect("start axed");
        let output = within_timeout("the end", child.wait_with_output()).await;
        let ended = Ended::from(output.expect("wait"));
        ended.with(1);
        assert!(
            ended.err.contains("could not write to stdout"),
            "{}",
            ended.err
        );
    }
}

#[tokio::test]
async fn shipped_agents_are_valid_and_run() {
    let home = Home::new();
    let clone = Path::new(env!("CARGO_MANIFEST_DIR"));
    let in_clone = |arguments: &[&str]| axed_command(clone, arguments);
    ended(in_clone(&["agents", "check"])).await.with(0);
    let checked = ended(in_clone(&["dataset", "check"])).await;
    assert!(checked.with(0).starts_with("release: 5 cases, "));
    let config = fs::read_to_string(clone.join("config/axed.toml")).expect("the configuration");
    home.write("config/axed.toml", &uncommented(&config));
    home.write("agents/scripts/x.toml", ECHO);
    home.axed(&["agents", "list"]).await.with(0);
    for (agent, runs) in [
        ("planner-scripted", 6),
        ("researcher-scripted", 3),
        ("reviewer-scripted", 4),
        ("triage-scripted", 1),
        ("writer-scripted", 1),
        ("critic-scripted", 1),
        ("librarian-scripted", 1),
        ("digest-scripted", 1),
    ] {
        let ended = ended(in_clone(&["run", agent, "the input", "--json"])).await;
        let run: Value = serde_json::from_str(ended.with(0)).expect("JSON");
        assert_eq!(run["tree"]["runs"], runs, "{run:#}");
    }
}

/// A shipped file with every key set: lines that start with `#` and no space lose it.
fn uncommented(text: &str) -> String {
    let lines = text.lines().map(|line| match line.strip_prefix('#') {
        Some(key) if !key.starts_with(' ') => key,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn shells_complete_commands_and_every_command_has_a_page() {
    let home = Home::new();
    for (shell, text) in [
        ("bash", "complete -F _axed"),
        ("zsh", "#compdef axed"),
        ("fish", "complete -c axed"),
    ] {
        let script = home.axed(&["completions", shell]).await;
        assert!(script.with(0).contains(text), "{shell}: {}", script.out);
    }
    home.axed(&["completions", "tcsh"]).await.with(2);
    home.axed(&["man", "pages"]).await.with(0);
    for (page, text) in [
        ("axed.1", "axed demo"),
        ("axed-run.1", "axed run planner"),
        ("axed-runs-list.1", "axed runs list"),
    ] {
        let page = home.read(&format!("pages/{page}")).replace("\\-", "-");
        assert!(page.contains(text), "{page}");
    }
}
