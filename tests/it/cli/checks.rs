//! `axed agents check`: what it finds, its lines and its exit codes.

use crate::cli::home::{Ended, Home};
use crate::support::app::TestApp;

const ECHO: &str = "[[replies]]\ntext = \"got: {{input}}\"\n";

/// An agent that names much that the server does not have.
const LACKING: &str = r#"name = "lacking"
model = "opnai/gpt-5"
fallback_models = ["anthropic/claude-sonnet-4-5",
  "scripted/ecko", "vllm/unknown"]
skill = "review"
workdir = "nowhere"
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
        "[providers.scripted]\nscripts = [\"scripts\"]\n[providers.vllm]\nkind = \"openai\"\nbase_url = \"http://127.0.0.1:1\"\n",
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
    assert_eq!(check.err, "axed: 4 files checked: 2 errors, 16 warnings\n");
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
    let wrong: Ended = check(&["work/a.md"]).await;
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
