//! `axed agents check`, `axed config check` and `axed config show`: what they find, their lines and their exit codes.

use crate::cli::home::{Home, ended};
use crate::support::app::TestApp;
use serde_json::{Value, json};
use std::os::unix::fs::symlink;

const ECHO: &str = "[[replies]]\ntext = \"got: {{input}}\"\n";

/// An agent that names much that the server does not have.
const LACKING: &str = r#"name = "lacking"
model = "opnai/known"
fallback_models = ["anthropic/known",
  "scripted/ecko", "vllm/unknown"]
skill = "review"
workdir = "nowhere"
node = ["gpu"]
files = ["*.md"]
tools = ["read_file",
  "run_command", "web_search"]
sub_agents = ["eco", "bad"]

[subagent]
enabled = true
model = "groq/llama"

[budget]
max_cost_usd = 1
max_runs = 2000

[[mcp_servers]]
name = "files"
transport = "stdio"
command = "no-such-program"
env = { TOKEN = "${NO_SUCH_VARIABLE}" }

[webhook]
url = "https://example.com/hook"
"#;

fn lacking_home() -> Home {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    home.write(
        "config/axed.toml",
        "[providers.scripted]\nscripts = [\"scripts\"]\n[providers.vllm]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1\"\n\
         [prices.\"anthropic/known\"]\ninput = 1\noutput = 1\n",
    );
    home.write("agents/bad.toml", "name = \"bad\"\n");
    home.write("agents/lacking.toml", LACKING);
    home.write(
        "agents/globs.toml",
        "name = \"globs\"\nmodel = \"scripted/echo\"\nworkdir = \"work\"\nfiles = [\"*.md\", \"**/*.rs\"]\n",
    );
    home.write("work/a.md", "a");
    home
}

#[tokio::test]
async fn a_check_lists_what_agents_name_and_the_server_lacks() {
    let home = lacking_home();
    let check = home.axed(&["agents", "check"]).await;
    insta::assert_snapshot!(check.with(2));
    assert_eq!(check.err, "axed: 4 files checked: 2 errors, 17 warnings\n");
}

#[tokio::test]
async fn a_check_finds_what_every_run_or_delivery_refuses() {
    let home = Home::new();
    home.write(
        "config/axed.toml",
        "[providers.scripted]\nscripts = [\"scripts\"]\n[tools]\nroots = [\"work\"]\n",
    );
    home.write("work/real/a.md", "a");
    symlink("real", home.path().join("work/link")).expect("a link");
    for (name, more) in [
        (
            "hooked",
            "[webhook]\nurl = \"http://127.0.0.1:1/hook\"\nsecret_env = \"HOOK_SECRET\"\n",
        ),
        (
            "keeps",
            "[memory]\nenabled = true\npath = \"config/axed.toml\"\n",
        ),
        (
            "linked",
            "workdir = \"work/link\"\ntools = [\"read_file\"]\n",
        ),
    ] {
        home.agent(name, more, ECHO);
    }
    let check = home.axed(&["agents", "check"]).await;
    let out = check.with(2);
    for expected in [
        "agents/hooked.toml:4:1: warning: nothing is sent to webhook.url: 127.0.0.1 must be reached by https",
        "agents/keeps.toml:5:1: error: memory.path config/axed.toml belongs to the daemon",
        "agents/linked.toml:3:1: warning: the workdir work/link contains the link ",
    ] {
        assert!(out.lines().any(|line| line.starts_with(expected)), "{out}");
    }
}

#[tokio::test]
async fn a_file_with_errors_is_compared_with_the_server_too() {
    let home = lacking_home();
    home.write(
        "agents/wrong.toml",
        "name = \"wrong\"\nmodel = \"opnai/x\"\nmax_turns = 3\nsub_agents = [\"ecko\"]\ntols = []\n",
    );
    let check = home.axed(&["agents", "check", "agents/wrong.toml"]).await;
    let lines: Vec<&str> = check.with(2).lines().collect();
    let expected = [
        "2:1: error: model: unsupported provider \"opnai\"",
        "3:1: error: unknown key \"max_turns\"; it belongs in [limits]",
        "4:15: warning: sub_agents",
        "5:1: error: unknown key \"tols\"",
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, expected) in lines.iter().zip(expected) {
        let expected = format!("agents/wrong.toml:{expected}");
        assert!(line.starts_with(&expected), "{line}");
    }
}

#[tokio::test]
async fn checks_print_json() {
    let home = lacking_home();
    let check = home
        .axed(&["agents", "check", "-o", "json", "agents/bad.toml"])
        .await;
    let report: Value = serde_json::from_str(check.with(2)).expect("JSON");
    let problem = &report["data"][0]["problems"][0];
    assert_eq!(problem["severity"], "error", "{report}");
    assert_eq!(
        problem["message"],
        "agent config missing required field: model"
    );
    assert_eq!(report["errors"], 1);

    let none = Home::new();
    none.write("agents/empty/README", "");
    std::fs::remove_file(none.path().join("config/axed.toml")).expect("the file");
    let check = none.axed(&["config", "check", "-o", "json"]).await;
    let report: Value = serde_json::from_str(check.with(0)).expect("JSON");
    assert_eq!(report, json!({"data": [], "errors": 0, "warnings": 0}));
    assert!(
        check
            .err
            .contains("there is no config/axed.toml or /etc/axed/axed.toml"),
        "{}",
        check.err
    );
}

#[tokio::test]
async fn warnings_fail_a_check_only_if_it_is_strict() {
    let home = lacking_home();
    let check =
        async |arguments: &[&str]| home.axed(&[&["agents", "check"], arguments].concat()).await;
    let globs = check(&["agents/globs.toml"]).await;
    let warning = "agents/globs.toml:4:18: warning: files has \"**/*.rs\", which matches no file in the workdir work\n";
    assert_eq!(globs.with(0), warning);
    assert_eq!(globs.err, "axed: 1 file checked: 0 errors, 1 warning\n");
    assert_eq!(
        check(&["--strict", "agents/globs.toml"]).await.with(2),
        warning
    );
    let fine = check(&["--strict", "agents/echo.toml"]).await;
    assert_eq!(fine.with(0), "agents/echo.toml: ok\n");
    let wrong = check(&["work/a.md"]).await;
    wrong.with(2);
    assert!(wrong.err.contains("is no agent file"), "{}", wrong.err);
}

#[tokio::test]
async fn a_file_that_an_earlier_directory_hides_is_listed() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    home.write(
        "more/echo.toml",
        "name = \"echo\"\nmodel = \"scripted/echo\"\n",
    );
    let arguments = ["agents", "check", "--agents", "agents", "--agents", "more"];
    assert_eq!(
        home.axed(&arguments).await.with(0),
        "agents/echo.toml: warning: hides more/echo.toml\n\
         more/echo.toml: warning: is not used, because agents/echo.toml in an earlier directory has the same name\n"
    );
    // The directory that is named comes first, however it is written.
    let named = home.axed(&["agents", "check", "./agents"]).await;
    assert_eq!(named.with(0), "agents/echo.toml: ok\n");
}

#[tokio::test]
async fn warnings_are_listed_and_follow_what_the_disk_has() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"writr\"]\nskill = \"review\"")
        .agent("writer", "")
        .spawn()
        .await;
    app.daemon
        .wait_for_log("sub_agents names \\\"writr\\\", but there is no such agent; did you mean")
        .await;
    let listed = app.get("/agents").await.json();
    let warnings = listed["data"][0]["warnings"].as_array().expect("warnings");
    let warnings: Vec<&str> = warnings.iter().filter_map(|it| it.as_str()).collect();
    assert_eq!(
        warnings[0],
        "sub_agents names \"writr\", but there is no such agent; did you mean \"writer\"?"
    );
    assert!(warnings[1].starts_with("skill not found: "), "{warnings:?}");
    assert_eq!(listed["data"][0]["valid"], true);
    // A skill that appears later changes no agent file.
    app.write("config/skills/review/SKILL.md", "Be kind.");
    app.write("skills/review/SKILL.md", "Be kind.");
    app.get_until("/agents/planner", |got| {
        !got.text.contains("skill not found")
    })
    .await;
}

#[tokio::test]
async fn every_error_of_the_configuration_is_found_at_once() {
    let home = Home::new();
    let mut wrong =
        String::from("[server]\nmax_tree = 3\nlistne = 1\n[tools]\nmax_wait = 2\n[runs]\n");
    for number in 0..12 {
        wrong.push_str(&format!("zzz{number} = 1\n"));
    }
    home.write("config/axed.toml", &wrong);
    let check = home.axed(&["config", "check"]).await;
    let lines: Vec<&str> = check.with(2).lines().collect();
    assert_eq!(
        lines[..3],
        [
            "config/axed.toml:2:1: error: unknown key \"server.max_tree\"; it belongs in [runs]",
            "config/axed.toml:3:1: error: unknown key \"server.listne\"; did you mean \"server.listen\"?",
            "config/axed.toml:5:1: error: unknown key \"tools.max_wait\"; it belongs in [server]",
        ]
    );
    assert_eq!(lines.len(), 15);
    assert_eq!(check.err, "axed: 1 file checked: 15 errors, 0 warnings\n");

    home.write("config/axed.toml", "[server\n");
    let check = home.axed(&["config", "check"]).await;
    assert!(
        check.with(2).starts_with("config/axed.toml:1:"),
        "{}",
        check.out
    );
    for filter in ["=,=/[", "inof"] {
        home.write(
            "config/axed.toml",
            &format!("[telemetry]\nlog = \"{filter}\"\n"),
        );
        let check = home.axed(&["config", "check"]).await;
        let expected = "config/axed.toml:2:1: error: telemetry.log: ";
        assert!(check.with(2).contains(expected), "{}", check.out);
    }
}

#[tokio::test]
async fn a_check_of_the_configuration_warns_about_what_it_names_and_is_missing() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let config = r#"[server]
listen = "0.0.0.0:8080"
default_timeout = 100000
[limits]
loop_warn = 6
[tools]
roots = ["nowhere"]
[webhooks]
secret_env = "NO_SUCH_VARIABLE"
[runs.per_agent]
ecko = 2
[providers.scripted]
scripts = ["scripts"]
[providers.groq]
timeout = 5
[prices."opnai/gpt-5"]
input = 1
output = 1
[budgets.team]
match = { agent = "ekho" }
tokens = 1000
per = "day"
[budgets.known]
match = { agent = "echo" }
tokens = 1000
per = "day"
"#;
    home.write("config/axed.toml", config);
    let check = home.axed(&["config", "check"]).await;
    insta::assert_snapshot!(check.with(0));
    home.axed(&["config", "check", "--strict"]).await.with(2);
    home.write(
        "config/axed.toml",
        "[providers.scripted]\nscripts = [\"none\"]\n",
    );
    let check = home.axed(&["config", "check"]).await;
    let expected = "config/axed.toml:1:12: error: [providers.scripted]: ";
    assert!(check.with(2).starts_with(expected), "{}", check.out);
}

#[tokio::test]
async fn settings_are_shown_with_their_sources_and_without_secrets() {
    let home = Home::new();
    let config = "[server]\nmax_wait = 7\n[providers.vllm]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1\"\n\
                  api_key = \"sk-file\"\nheaders = { x-team = \"sk-header\" }\n[prices.\"vllm/m\"]\ninput = 0.5\noutput = 1.5\n";
    home.write("config/axed.toml", config);
    let show = async |arguments: &[&str]| {
        let arguments = [&["config", "show", "--agents", "mine"], arguments].concat();
        let mut command = home.command(&arguments);
        command
            .env("AXED_RUNS__MAX_RUNNING", "9")
            .env("AXED_VLLM_BASE_URL", "http://127.0.0.1:2")
            .env("ANTHROPIC_API_KEY", "sk-variable");
        ended(command).await
    };
    let shown = show(&[]).await;
    insta::assert_snapshot!(shown.with(0));
    let json = show(&["--json"]).await;
    for secret in ["sk-file", "sk-header", "sk-variable"] {
        assert!(!shown.out.contains(secret) && !json.out.contains(secret));
    }
    let json: Value = serde_json::from_str(json.with(0)).expect("JSON");
    let settings = json["data"].as_array().expect("data");
    let setting = |key: &str| {
        let found = settings.iter().find(|it| it["key"] == key);
        found.expect("a setting").clone()
    };
    assert_eq!(
        setting("server.max_wait"),
        json!({"key": "server.max_wait", "value": 7, "source": {"kind": "file", "file": "config/axed.toml", "line": 2}})
    );
    assert_eq!(
        setting("runs.max_running")["source"],
        json!({"kind": "environment", "name": "AXED_RUNS__MAX_RUNNING"})
    );
    assert_eq!(
        setting("agents.dirs")["source"],
        json!({"kind": "flag", "name": "--agents"})
    );
    assert_eq!(setting("server.listen")["source"]["kind"], "default");
}

#[tokio::test]
async fn a_check_takes_files_and_not_names() {
    let home = Home::new();
    home.agent("echo", "", ECHO);
    let check = home.axed(&["agents", "check", "echo"]).await;
    assert_eq!(check.with(2), "");
    let expected = "; name the agent's file, such as agents/echo.toml";
    assert!(check.err.contains(expected), "{}", check.err);
    let check = home.axed(&["agents", "check", "agents/none.toml"]).await;
    check.with(2);
    assert!(!check.err.contains("such as"), "{}", check.err);
}
