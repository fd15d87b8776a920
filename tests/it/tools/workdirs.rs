//! Workdirs from outside: no tool reaches the daemon's own files, and a run works in the directory that it was accepted
//! with or in none.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::gate::Gate;
use crate::support::provider::answer::{calls, delegates, hangs, says};
use crate::tools::call_results::call_results;

const FILE_TOOLS: &str = "tools = [\"copy_path\", \"create_directory\", \"delete_path\", \"edit_file\", \
    \"find_path\", \"grep\", \"list_directory\", \"move_path\", \"read_file\", \"write_file\"]";
const OWN: &str = "belongs to the daemon";

/// An agent with every file tool whose workdir is the daemon's own directory.
fn worker() -> Setup {
    TestApp::setup()
        .agent("worker", FILE_TOOLS)
        .file("mine.toml", "mine")
}

/// Every call is refused because the file belongs to the daemon.
async fn refused(app: &TestApp, sent: &[(&str, Value)]) {
    for (reported, call) in call_results(app, sent).await.iter().zip(sent) {
        assert!(
            reported.starts_with("error: ") && reported.contains(OWN),
            "{call:?}: {reported}"
        );
    }
}

/// Calls of every tool that would read, write, take or replace this file.
fn everything_with(path: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("read_file", json!({"path": path})),
        ("write_file", json!({"path": path, "content": "evil"})),
        (
            "edit_file",
            json!({"path": path, "old_string": "name", "new_string": "evil"}),
        ),
        ("grep", json!({"path": path, "pattern": "."})),
        ("delete_path", json!({"path": path})),
        ("move_path", json!({"from": path, "to": "stolen"})),
        ("copy_path", json!({"from": path, "to": "stolen"})),
    ]
}

/// Calls of every tool that would make something of this path.
fn everything_new(path: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("write_file", json!({"path": path, "content": "evil"})),
        ("move_path", json!({"from": "mine.toml", "to": path})),
        ("copy_path", json!({"from": "mine.toml", "to": path})),
        ("create_directory", json!({"path": path})),
    ]
}

#[tokio::test]
async fn no_file_tool_reaches_the_daemons_own_files() {
    let app = worker()
        .config("[providers.scripted]\nscripts = [\"../scripts\"]")
        .file("scripts/plan.toml", "[[replies]]\ntext = \"name\"\n")
        .file("config/skills/review/SKILL.md", "name")
        .sqlite()
        .spawn()
        .await;
    symlink("agents", app.path("alias")).expect("a link");
    symlink("agents/worker.toml", app.path("alias.toml")).expect("a link");
    fs::hard_link(app.path("config/axed.toml"), app.path("hard.toml")).expect("a link");
    for path in [
        "agents/worker.toml",
        "config/axed.toml",
        "config/skills/review/SKILL.md",
        "scripts/plan.toml",
        "data/axed.db",
        "alias/worker.toml",
        "hard.toml",
    ] {
        refused(&app, &everything_with(path)).await;
    }
    for path in [
        "agents/evil.toml",
        "agents/new/evil.toml",
        "config/evil.toml",
        "data/evil",
        "scripts/evil.toml",
        "alias/evil.toml",
    ] {
        refused(&app, &everything_new(path)).await;
    }
    // What a link leads to counts; the link itself is the model's to take away.
    refused(&app, &everything_with("alias.toml")[..4]).await;
    for path in ["agents", "config", "data", "scripts"] {
        let sent = [
            ("list_directory", json!({"path": path})),
            ("grep", json!({"path": path, "pattern": "."})),
            ("delete_path", json!({"path": path})),
            ("move_path", json!({"from": path, "to": "stolen"})),
            ("copy_path", json!({"from": path, "to": "stolen"})),
        ];
        refused(&app, &sent).await;
    }
    let found = call_results(
        &app,
        &[
            ("find_path", json!({"pattern": "**"})),
            ("find_path", json!({"pattern": "agents/*"})),
            ("grep", json!({"pattern": "name|api_key"})),
        ],
    )
    .await;
    for name in [
        "worker.toml",
        "axed.toml",
        "axed.db",
        "plan.toml",
        "SKILL.md",
    ] {
        assert!(!found[0].contains(name), "{name} is found: {}", found[0]);
    }
    assert!(found[0].contains("mine.toml"), "{}", found[0]);
    assert_eq!(found[1], "nothing matches agents/*");
    assert!(!found[2].contains("key-of-anthropic"), "{}", found[2]);
    assert!(!app.path("stolen").exists());
    let agents = fs::read_dir(app.path("agents")).expect("a directory");
    assert_eq!(agents.count(), 1);
    let list = app.get("/agents").await.json();
    assert_eq!(list["data"].as_array().expect("agents").len(), 1);
}

/// A directory with files of the daemon cannot be moved, since it could then be created again.
#[tokio::test]
async fn a_directory_with_the_daemons_files_cannot_be_moved_or_created() {
    let app = TestApp::setup()
        .argument("--agents")
        .argument("etc/agents")
        .argument("--agents")
        .argument("later/agents")
        .file(
            "etc/agents/worker.toml",
            &format!("name = \"worker\"\nmodel = \"anthropic/worker\"\n{FILE_TOOLS}\n"),
        )
        .file("etc/notes.md", "notes")
        .file("mine.toml", "mine")
        .spawn()
        .await;
    refused(
        &app,
        &[
            ("move_path", json!({"from": "etc", "to": "old"})),
            ("copy_path", json!({"from": "etc", "to": "old"})),
            ("delete_path", json!({"path": "etc"})),
            (
                "write_file",
                json!({"path": "later/agents/evil.toml", "content": "evil"}),
            ),
            ("create_directory", json!({"path": "later"})),
            ("move_path", json!({"from": "mine.toml", "to": "later"})),
            (
                "copy_path",
                json!({"from": "mine.toml", "to": "later/agents/evil.toml"}),
            ),
        ],
    )
    .await;
    let beside = [
        ("read_file", json!({"path": "etc/notes.md"})),
        (
            "write_file",
            json!({"path": "etc/new.md", "content": "new"}),
        ),
    ];
    assert_eq!(
        call_results(&app, &beside).await,
        ["1: notes", "wrote 3 bytes to etc/new.md"]
    );
    assert!(!app.path("old").exists() && !app.path("later").exists());
}

#[tokio::test]
async fn context_files_and_skills_exclude_the_daemons_files() {
    let app = TestApp::setup()
        .config("[tools]\nroots = [\"config/skills\", \"open\"]")
        .agent(
            "worker",
            "skill = \"review\"\nfiles = [\"**/*.toml\", \"**/*.md\", \"data/*\", \"agents/*\", \"config/*\"]",
        )
        .file("config/skills/review/SKILL.md", "the operator's skill")
        .file("config/skills/other/SKILL.md", "another skill")
        .file("open/SKILL.md", "an open skill")
        .file("notes.md", "a note")
        .file("data/secret.md", "a secret")
        .spawn()
        .await;
    app.provider.always("worker", |_| says("done"));
    symlink(
        app.path("config/skills/other/SKILL.md"),
        app.path("open/link.md"),
    )
    .expect("a link");

    app.run("worker", "go").await.output();
    let system = app.provider.wait_for_request("worker", 1).await.system();
    assert!(
        system.contains("the operator's skill") && system.contains("a note"),
        "{system}"
    );
    for own in [
        "a secret",
        "another skill",
        "key-of-anthropic",
        "name = \"worker\"",
    ] {
        assert!(!system.contains(own), "{system}");
    }

    let skill = |path: &str| json!({"skill": app.path(path).to_str().expect("text")});
    app.run_with("worker", skill("open/SKILL.md"))
        .await
        .output();
    let system = app.provider.wait_for_request("worker", 2).await.system();
    assert!(system.contains("an open skill"), "{system}");
    for closed in [
        "config/skills/other/SKILL.md",
        "open/link.md",
        "open/none.md",
    ] {
        app.post("/agents/worker/runs", &skill(closed))
            .await
            .problem(422);
    }
    // By its bare name, too.
    let other = app
        .post("/agents/worker/runs", &json!({"skill": "other"}))
        .await;
    other.problem(422);
}

/// A workdir among the daemon's own files is refused, and an agent's is listed with a warning.
#[tokio::test]
async fn a_workdir_among_the_daemons_own_files_is_refused() {
    let app = TestApp::setup()
        .config("[tools]\nroots = [\".\"]")
        .agent("worker", &format!("workdir = \"data/files\"\n{FILE_TOOLS}"))
        .agent("other", FILE_TOOLS)
        .file("data/files/a.md", "a")
        .spawn()
        .await;
    let run = app.run("worker", "go").await;
    let (code, why) = run.failure();
    assert_eq!(code, "config");
    assert!(why.contains("data/files") && why.contains(OWN), "{why}");
    let listed = app.get("/agents/worker").await.json();
    assert!(
        listed["warnings"][0]
            .as_str()
            .expect("a warning")
            .contains(OWN),
        "{listed}"
    );
    for path in ["data", "data/files", "agents", "config"] {
        let body = json!({"workdir": app.path(path).to_str().expect("text")});
        let why = app.post("/agents/other/runs", &body).await.problem(422);
        assert!(why.contains(OWN), "{path}: {why}");
    }
}

/// One run at a time, so that the second one is queued.
fn queueing() -> Setup {
    TestApp::setup()
        .config("[runs]\nmax_running = 1\n[tools]\nroots = [\"area\"]")
        .agent("first", "")
        .agent("worker", &format!("workdir = \"area/work\"\n{FILE_TOOLS}"))
        .file("area/work/a.md", "a")
        .file("other/a.md", "a secret")
}

/// Puts something else in the directory's place.
fn replace(app: &TestApp, path: &str, by: impl FnOnce(&std::path::Path) -> std::io::Result<()>) {
    let at = app.path(path);
    fs::rename(&at, app.path("moved")).expect("a move");
    by(&at).expect("something in its place");
}

async fn fails_for(run: &crate::support::run::Run<'_>, why: &str) {
    let run = run.wait_for_end().await;
    let (code, message) = run.failure();
    assert_eq!(code, "config");
    assert!(
        message.contains("area/work") && message.contains(why),
        "{message}"
    );
}

#[tokio::test]
async fn a_queued_run_refuses_a_directory_that_was_replaced() {
    for (is_link, why) in [
        (true, "contains the link"),
        (false, "is not the directory that it was when"),
    ] {
        let app = queueing().spawn().await;
        let gate = Gate::closed();
        app.provider.will("first", [says("done").after_gate(&gate)]);
        let first = app.start("first", "go").await;
        let by_file = app.start("worker", "go").await;
        let sent = json!({"workdir": app.path("area/work").to_str().expect("text")});
        let by_request = app.start_with("worker", sent).await;
        assert_eq!(by_request.status(), "queued");
        replace(&app, "area/work", |at| match is_link {
            true => symlink(app.path("other"), at),
            false => fs::create_dir(at),
        });
        gate.open();
        assert_eq!(first.wait_for_end().await.output(), "done");
        for run in [by_file, by_request] {
            fails_for(&run, why).await;
        }
        assert!(app.provider.requests_for("worker").is_empty());
    }
}

/// Runs of an earlier process: one active, one queued behind it.
#[tokio::test]
async fn a_resumed_run_refuses_a_directory_that_was_replaced() {
    for (is_link, why) in [
        (true, "contains the link"),
        (false, "is not the directory that it was when"),
    ] {
        let mut app = queueing().spawn().await;
        app.provider.will("worker", [hangs()]);
        let at_work = app.start("worker", "go").await.id().to_owned();
        app.provider.wait_for_concurrency("worker", 1).await;
        let queued = app.start("worker", "go").await.id().to_owned();
        app.daemon.kill().await;
        replace(&app, "area/work", |at| match is_link {
            true => symlink(app.path("other"), at),
            false => fs::create_dir(at),
        });
        app.restart_after_end().await;
        for id in [at_work, queued] {
            fails_for(&app.find(&id).await, why).await;
        }
        assert_eq!(app.provider.requests_for("worker").len(), 1);
    }
}

#[tokio::test]
async fn a_resumed_run_continues_in_its_directory() {
    let mut app = queueing().spawn().await;
    app.provider.will("worker", [hangs()]);
    let at_work = app.start("worker", "go").await.id().to_owned();
    app.provider.wait_for_concurrency("worker", 1).await;
    let queued = app.start("worker", "go").await.id().to_owned();
    app.daemon.kill().await;
    let read = || calls([("read_file", json!({"path": "a.md"}))]);
    app.provider
        .will("worker", [read(), says("done"), read(), says("done")]);
    app.restart_after_end().await;
    for id in [at_work, queued] {
        assert_eq!(app.find(&id).await.wait_for_end().await.output(), "done");
    }
    for seen in app
        .provider
        .requests_for("worker")
        .iter()
        .filter(|seen| seen.turn() == 2)
    {
        assert_eq!(seen.tool_results(), ["1: a"]);
    }
}

/// A model of the outer agent may have put a link in the place of the inner one's directory.
#[tokio::test]
async fn a_child_in_a_nested_workdir_follows_no_link() {
    follow_no_link_in_a_nested_workdir(|_| ()).await;
}

#[tokio::test]
async fn the_workdir_of_an_agent_that_is_gone_is_still_one() {
    follow_no_link_in_a_nested_workdir(|app| {
        fs::remove_file(app.path("agents/planner.toml")).expect("removed");
    })
    .await;
}

async fn follow_no_link_in_a_nested_workdir(change: impl Fn(&TestApp)) {
    let app = TestApp::setup()
        .agent(
            "planner",
            "workdir = \"area\"\ntools = [\"write_file\"]\nsub_agents = [\"worker\"]",
        )
        .agent(
            "worker",
            &format!("workdir = \"area/in/work\"\nfiles = [\"*.md\"]\n{FILE_TOOLS}"),
        )
        .file("area/in/work/a.md", "a")
        .file("other/work/a.md", "a secret")
        .spawn()
        .await;
    app.provider.will(
        "planner",
        [
            delegates([("worker", "x")]),
            delegates([("worker", "y")]),
            says("done"),
        ],
    );
    let gate = Gate::closed();
    app.provider
        .will("worker", [says("read").after_gate(&gate)]);

    let run = app.start("planner", "go").await;
    app.provider.wait_for_concurrency("worker", 1).await;
    replace(&app, "area/in", |at| symlink(app.path("other"), at));
    change(&app);
    let exists = app.path("agents/planner.toml").exists();
    app.get_until("/agents/planner", |got| (got.status == 200) == exists)
        .await;
    gate.open();
    assert_eq!(run.wait_for_end().await.output(), "done");

    let results = app
        .provider
        .wait_for_request("planner", 3)
        .await
        .tool_results();
    assert_eq!(results[0], "read");
    assert!(
        results[1].contains("area/in/work contains the link"),
        "{}",
        results[1]
    );
    assert_eq!(app.provider.requests_for("worker").len(), 1);
}

/// Links above every workdir and root are the operator's.
#[tokio::test]
async fn links_above_workdirs_and_roots_are_followed() {
    let app = TestApp::setup()
        .config("[tools]\nroots = [\"to-real/area\"]")
        .agent("worker", &format!("workdir = \"to-area\"\n{FILE_TOOLS}"))
        .file("real/area/a.md", "a")
        .file("real/area/in/a.md", "b")
        .spawn()
        .await;
    symlink("real", app.path("to-real")).expect("a link");
    symlink("to-real/area", app.path("to-area")).expect("a link");
    let read = [("read_file", json!({"path": "a.md"}))];
    assert_eq!(call_results(&app, &read).await, ["1: a"]);
    for path in [
        "to-real/area/in",
        "real/area/in",
        "to-real/area/../area/./in",
    ] {
        app.provider.will("worker", [says("done")]);
        let sent = json!({"workdir": app.path(path).to_str().expect("text")});
        assert_eq!(
            app.run_with("worker", sent).await.output(),
            "done",
            "{path}"
        );
    }
    symlink("in", app.path("real/area/link")).expect("a link");
    for path in [
        "to-real/area/link",
        "to-area/in",
        "to-real/area/../../agents",
    ] {
        let sent = json!({"workdir": app.path(path).to_str().expect("text")});
        app.post("/agents/worker/runs", &sent).await.problem(422);
    }
}

#[tokio::test]
async fn commands_are_not_offered_if_they_would_reach_the_daemons_files() {
    let app = TestApp::setup()
        .config("[tools]\nallow_commands = true\nroots = [\".\"]")
        .agent("worker", "tools = [\"run_command\", \"read_file\"]")
        .agent(
            "other",
            "workdir = \"work\"\ntools = [\"run_command\", \"read_file\"]",
        )
        .file("work/a.md", "a")
        .spawn()
        .await;
    if app.daemon.log().contains("has no Landlock") {
        eprintln!("SKIPPED: this system has no Landlock of Linux 6.2, nothing is confined here");
        return;
    }
    for agent in ["worker", "other"] {
        app.provider.always(agent, |_| says("done"));
    }
    app.run("worker", "go").await.output();
    app.run("other", "go").await.output();
    let offered = |tools: Vec<String>| tools.contains(&"run_command".to_owned());
    assert!(!offered(
        app.provider
            .wait_for_request("worker", 1)
            .await
            .tool_names()
    ));
    assert!(offered(
        app.provider.wait_for_request("other", 1).await.tool_names()
    ));
    // Whatever directory a request names.
    let sent = json!({"workdir": app.path("").to_str().expect("text")});
    app.run_with("other", sent).await.output();
    assert!(!offered(
        app.provider.wait_for_request("other", 2).await.tool_names()
    ));

    let listed = app.get("/agents").await.json();
    let warnings = |at: usize| {
        listed["data"][at]["warnings"]
            .as_array()
            .expect("warnings")
            .clone()
    };
    assert_eq!(warnings(0), Vec::<Value>::new());
    let warning = warnings(1)[0].as_str().expect("a text").to_owned();
    let named = warning.contains(app.path("").to_str().expect("text"));
    assert!(
        warning.contains("run_command is not offered") && named,
        "{warning}"
    );
    assert_eq!(
        app.get("/agents/worker").await.json()["warnings"][0],
        warning
    );
    app.daemon
        .wait_for_log("run_command is not offered: the workdir")
        .await;
    // A file that comes later is looked at, too.
    app.write_agent("late", "tools = [\"run_command\"]");
    app.get_until("/agents/late", |got| {
        got.text.contains("run_command is not offered")
    })
    .await;
}

/// What is the daemon's own is left out of the system's files that every command reads.
#[tokio::test]
async fn a_command_cannot_read_the_daemons_files_among_system_files() {
    let app = TestApp::setup().file("work/a.md", "a").spawn().await;
    let mut shared = fs::read_dir("/usr/share").expect("a directory").flatten();
    let own = shared.find(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let own = own.expect("a directory").path();
    let ls = |reserved: &str| {
        let script = format!(
            "exec \"$AXED\" __command confined 'ls {}; ls -d /usr/share/*/. /usr/bin/env' {reserved} <.",
            own.display()
        );
        let output = std::process::Command::new("/bin/sh")
            .args(["-c", &script])
            .env("AXED", env!("CARGO_BIN_EXE_axed"))
            .current_dir(app.path("work"))
            .output()
            .expect("a supervisor");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let open = ls("");
    if open.is_empty() {
        eprintln!("SKIPPED: this system has no Landlock of Linux 6.2, nothing is confined here");
        return;
    }
    assert!(!open.contains("cannot open"), "{open}");
    let shut = ls(own.to_str().expect("text"));
    assert!(
        shut.contains("Permission denied") && shut.contains("/usr/bin/env"),
        "{shut}"
    );
}
