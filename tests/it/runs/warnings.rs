//! What goes wrong without failing a run is in the run, in the log, and on the terminal.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::events::count;
use crate::support::provider::answer::{calls, delegates, fails, hangs, says};
use crate::support::run::Run;
use crate::support::within_timeout;

/// An MCP server that fails at its start.
const BROKEN_SERVER: &str = "[[mcp_servers]]\nname = \"broken\"\ntransport = \"stdio\"\ncommand = \"sh\"\n\
                             args = [\"-c\", \"echo no licence found >&2; exit 3\"]\n";

/// An MCP server whose program does not exist.
const MISSING_SERVER: &str =
    "[[mcp_servers]]\nname = \"missing\"\ntransport = \"stdio\"\ncommand = \"no-such-program\"\n";

fn codes(warnings: &Value) -> Vec<&str> {
    let warnings = warnings.as_array().expect("warnings");
    let codes = warnings.iter().map(|warning| warning["code"].as_str());
    codes.map(|code| code.expect("a code")).collect()
}

/// The message of the only warning with this code.
fn message<'w>(warnings: &'w Value, code: &str) -> &'w str {
    let list = warnings.as_array().expect("warnings");
    let matching: Vec<_> = list.iter().filter(|it| it["code"] == code).collect();
    assert_eq!(matching.len(), 1, "{code} in {warnings:#}");
    matching[0]["message"].as_str().expect("a message")
}

/// Waits until the log has the end of the run, which is after all else of it.
async fn end_is_logged(app: &TestApp, run: &Run<'_>) {
    let agent = run["agent"].as_str().expect("an agent");
    let end = format!("{} of agent {agent} is ", run.id());
    app.daemon.wait_for_log(&end).await;
}

/// The log lines of the daemon with this message.
fn log_lines(app: &TestApp, message: &Value) -> Vec<Value> {
    let log = app.daemon.log();
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["message"] == *message).collect()
}

/// Each warning of the run is once in the log, with the run and its agent.
async fn assert_logged(app: &TestApp, run: &Run<'_>) {
    end_is_logged(app, run).await;
    for warning in run["warnings"].as_array().expect("warnings") {
        let lines = log_lines(app, &warning["message"]);
        assert_eq!(lines.len(), 1, "{warning}\n{}", app.daemon.log());
        let line = &lines[0];
        assert_eq!(line["level"], "WARN", "{line}");
        assert_eq!(line["code"], warning["code"], "{line}");
        assert_eq!(
            (&line["run.id"], &line["agent"]),
            (&run["id"], &run["agent"])
        );
    }
}

#[tokio::test]
async fn a_sub_agent_that_cannot_start_is_a_warning_in_the_turn_of_its_call() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"ghost\", \"keyless\"]")
        .agent("keyless", "model = \"groq/m\"")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("ghost", "x"), ("ghost", "y"), ("keyless", "z")]),
            says("done"),
        ],
    );

    let run = app.run("planner", "go").await;

    assert_eq!(run.output(), "done");
    let warnings = &run["warnings"];
    assert_eq!(codes(warnings).len(), 2, "{warnings}");
    let missing = message(warnings, "sub_agent_not_found");
    assert_eq!(missing, "sub-agent \"ghost\" does not exist");
    let keyless = message(warnings, "sub_agent_unavailable");
    let expected = "sub-agent \"keyless\" could not be started: API key for provider \"groq\"";
    assert!(keyless.starts_with(expected), "{keyless}");
    assert_eq!(warnings[0]["turn"], 1);
    assert_logged(&app, &run).await;
}

#[tokio::test]
async fn what_a_prompt_and_an_offer_lack_is_known_before_the_first_turn() {
    let setup = TestApp::setup()
        .agent(
            "worker",
            &format!(
                "workdir = \"work\"\nfiles = [\"*.md\", \"plan.txt\"]\ntools = [\"run_command\", \"read_file\"]\n\
                 sub_agents = [\"ghost\"]\n{BROKEN_SERVER}"
            ),
        )
        .file("work/a.md", "alpha")
        .file("work/b.md", "be\0ta");
    let app = setup.spawn().await;
    app.provider.will("worker", [says("done")]);

    let run = app.run("worker", "go").await;

    let warnings = &run["warnings"];
    assert_eq!(
        codes(warnings),
        [
            "context_file_left_out",
            "context_file_left_out",
            "mcp_server_unavailable",
            "tool_not_offered"
        ]
    );
    let left_out = "context file b.md is left out: it is a binary file";
    assert_eq!(warnings[0]["message"], left_out);
    let missing = "context file plan.txt is left out: it does not exist";
    assert_eq!(warnings[1]["message"], missing);
    let server = message(warnings, "mcp_server_unavailable");
    let end = "the last lines of its standard error: no licence found";
    assert!(server.ends_with(end), "{server}");
    let tool = "run_command is not offered: the server allows no commands; set allow_commands = true in [tools]";
    assert_eq!(message(warnings, "tool_not_offered"), tool);
    for warning in warnings.as_array().expect("warnings") {
        assert_eq!(warning["turn"], Value::Null);
    }
    assert_logged(&app, &run).await;
    assert_eq!(run.reload().await["warnings"], *warnings);

    let dry = app.post("/agents/worker/dry-run", &json!({})).await.json();
    let mut known = codes(warnings);
    known.push("sub_agent_not_found");
    assert_eq!(codes(&dry["warnings"]), known);
}

#[tokio::test]
async fn what_a_request_leaves_out_is_a_warning() {
    let app = TestApp::setup()
        .config(
            "[providers.anthropic.models.solo]\neffort = [\"low\", \"high\"]\nsampling = \"without_effort\"\n",
        )
        .agent(
            "solo",
            "effort = \"max\"\nfallback_models = [\"openai/second\"]\n[params]\ntemperature = 0.5\n\
             [retry]\nmax_retries = 0",
        )
        .spawn()
        .await;
    app.provider.will("solo", [fails(529, "busy")]);
    app.provider.will("second", [says("done")]);

    let run = app.run("solo", "go").await;

    let warnings = &run["warnings"];
    assert_eq!(
        codes(warnings)[..2],
        ["effort_changed", "param_dropped"],
        "{warnings}"
    );
    let fallback = message(warnings, "fallback_used");
    let expected = "anthropic/solo gave no reply (overloaded): the fallback openai/second replied";
    assert_eq!(fallback, expected);
    assert!(warnings[0]["turn"] == 1 && warnings[2]["turn"] == 1);
    assert_logged(&app, &run).await;
    let dry = app.post("/agents/solo/dry-run", &json!({})).await.json();
    assert_eq!(codes(&dry["warnings"]), ["effort_changed", "param_dropped"]);
}

#[tokio::test]
async fn the_warning_of_a_fallback_has_the_error_of_the_agents_own_model() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "fallback_models = [\"openai/second\", \"ollama/third\"]\n[retry]\nmax_retries = 0",
        )
        .spawn()
        .await;
    app.provider.will("solo", [fails(529, "busy")]);
    app.provider.will("second", [fails(500, "oops")]);
    app.provider.will("third", [says("done")]);

    let run = app.run("solo", "go").await;

    assert_eq!(run.output(), "done");
    let fallback = message(&run["warnings"], "fallback_used");
    let expected = "anthropic/solo gave no reply (overloaded): the fallback ollama/third replied";
    assert_eq!(fallback, expected);
}

#[tokio::test]
async fn a_full_memory_and_repeated_calls_are_warnings() {
    let app = TestApp::setup()
        .agent(
            "solo",
            "workdir = \"work\"\ntools = [\"read_file\"]\n[memory]\nenabled = true\nmax_entries = 1",
        )
        .file("work/a.md", "alpha")
        .spawn()
        .await;
    let reads = || calls([("read_file", json!({"path": "a.md"}))]);
    app.provider
        .will("solo", [reads(), reads(), reads(), says("done")]);

    let run = app.run("solo", "go").await;

    let warnings = &run["warnings"];
    assert_eq!(codes(warnings), ["calls_repeated", "memory_full"]);
    assert_eq!(
        (&warnings[0]["turn"], &warnings[1]["turn"]),
        (&json!(3), &json!(4))
    );
    assert_logged(&app, &run).await;
    assert_eq!(run.reload().await["warnings"], *warnings);
}

#[tokio::test]
async fn warnings_survive_a_crash_and_are_recorded_once() {
    let mut app = TestApp::setup()
        .agent(
            "planner",
            &format!("sub_agents = [\"ghost\"]\n{MISSING_SERVER}"),
        )
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [delegates([("ghost", "x")]), hangs(), says("done")],
    );
    let id = app.start("planner", "go").await.id().to_owned();
    app.provider.wait_for_request("planner", 2).await;
    let run = app.find(&id).await;
    app.events(&run)
        .await
        .until_matches(|events| count(events, "turn.started") == 2)
        .await;
    let before = run.reload().await["warnings"].clone();
    assert_eq!(
        codes(&before),
        ["mcp_server_unavailable", "sub_agent_not_found"]
    );

    app.crash_and_restart().await;

    let run = app.find(&id).await.wait_for_end().await;
    assert_eq!(run.output(), "done");
    assert_eq!(run["warnings"], before);
    assert_eq!(count(&run.events().await, "tools.warning"), 1);
}

#[tokio::test]
async fn the_command_line_prints_the_warnings_of_a_run() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"ghost\"]")
        .spawn()
        .await;
    app.provider
        .will("planner", [delegates([("ghost", "x")]), says("done")]);
    let arguments = ["run", "planner", "go", "--server", &app.daemon.url];
    let mut command = axed_command(&app.path("."), &arguments);

    let output = within_timeout("the end of the command", command.output())
        .await
        .expect("its output");

    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr, "warning: sub-agent \"ghost\" does not exist\n");
}

#[tokio::test]
async fn the_end_of_a_run_is_one_line_of_the_log() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "[retry]\nmax_retries = 0")
        .spawn()
        .await;
    let reply = delegates([("reader", "read the secret plan")]).with_usage(10, 2);
    app.provider
        .will("planner", [reply, says("a secret").with_usage(20, 3)]);
    app.provider.will("reader", [fails(500, "broken")]);

    let run = app.run("planner", "go").await;

    let child = run.children().await.remove(0);
    let (_, why) = child.failure();
    assert_eq!(why, "server: broken (anthropic/reader)");
    end_is_logged(&app, &run).await;
    let log = app.daemon.log();
    let end_of = |run: &Run<'_>| {
        let lines = log.lines().filter_map(|it| serde_json::from_str(it).ok());
        let ends: Vec<Value> = lines
            .filter(|line: &Value| line["run.id"] == run["id"] && !line["status"].is_null())
            .collect();
        assert_eq!(ends.len(), 1, "{log}");
        ends[0].clone()
    };
    let end = end_of(&run);
    assert_eq!(
        (&end["level"], &end["status"]),
        (&json!("INFO"), &json!("completed"))
    );
    assert_eq!(
        (&end["input_tokens"], &end["output_tokens"]),
        (&json!(30), &json!(5))
    );
    assert_eq!(
        (&end["turns"], &end["tool_calls"], &end["depth"]),
        (&json!(2), &json!(1), &json!(0))
    );
    assert_eq!(end["duration_ms"], run["duration_ms"]);
    let end = end_of(&child);
    assert_eq!(
        (&end["error"], &end["run.root"]),
        (&json!("provider_server"), &run["id"])
    );
    assert!(log.contains("server: broken (anthropic/reader)"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}
