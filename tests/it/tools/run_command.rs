//! `run_command` from outside: what a command can do, and what it cannot.

use crate::support::app::{Setup, TestApp};
use crate::support::events::count;
use crate::support::eventually;
use crate::support::provider::answer::{calls, says};
use crate::tools::call_results::call_results;
use crate::tools::command_sandbox::supervised;
use crate::tools::mcp::UNATTENDED;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

pub const ALLOWED: &str = "[tools]\nallow_commands = true\n";

/// An agent that may run commands in `work`.
pub fn worker(more: &str) -> Setup {
    TestApp::setup()
        .agent("worker", "workdir = \"work\"\ntools = [\"run_command\"]")
        .config(&format!("{ALLOWED}{more}"))
        .file("work/a.txt", "alpha\n")
}

/// Whether this system can confine commands; if not, prints that the story is skipped.
pub fn is_confined(app: &TestApp) -> bool {
    let is_offered = !app.daemon.log().contains("has no Landlock");
    if !is_offered {
        eprintln!("SKIPPED: this system has no Landlock of Linux 6.2, nothing is confined here");
    }
    is_offered
}

async fn command_results(app: &TestApp, arguments: &[Value]) -> Vec<String> {
    let calls = arguments.iter().map(|one| ("run_command", one.clone()));
    call_results(app, &calls.collect::<Vec<_>>()).await
}

pub async fn reported(app: &TestApp, commands: &[&str]) -> Vec<String> {
    let sent: Vec<Value> = commands.iter().map(|it| json!({"command": it})).collect();
    command_results(app, &sent).await
}

/// Waits until no process has this in its command line.
pub async fn gone(mark: &str) {
    eventually(&format!("the end of {mark}"), async || {
        (!is_alive(mark)).then_some(())
    })
    .await;
}

pub fn is_alive(mark: &str) -> bool {
    !alive(mark).is_empty()
}

/// The processes that have this in their command line.
pub fn alive(mark: &str) -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let processes =
        entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    let marked = processes.filter(|(_, path)| {
        fs::read(path.join("cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(mark))
    });
    marked.map(|(pid, _)| pid).collect()
}

/// Waits for a file that a command writes.
pub async fn written(path: &Path) {
    eventually(&path.display().to_string(), async || {
        path.exists().then_some(())
    })
    .await;
}

/// A number of seconds that no other story sleeps, to know our processes by.
pub fn mark() -> String {
    format!("99{}", random())
}

fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let random = RandomState::new().build_hasher().finish();
    u32::try_from(random % 100_000_000).unwrap_or_default()
}

#[tokio::test]
async fn a_model_runs_commands_in_the_workdir() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let reported = reported(
        &app,
        &[
            "cat a.txt; echo oops >&2; echo more",
            "echo x > b.txt && mkdir -p d/e && mv b.txt d/e && cat d/e/b.txt",
            "exit 3",
            "echo before; kill -9 $$",
            "cat",
            "printf '\\377a\\000b'",
            "echo $HOME; echo $TMPDIR; echo hi > $TMPDIR/f; cat $TMPDIR/f; echo hi > ~/g",
            "seq 100000 | sort -n | tail -n 1; test -d /usr/bin && ls /etc/passwd",
            "no-such-program",
            "printf '#!/bin/sh\\necho ran' > s; chmod +x s; ./s",
            "true",
        ],
    )
    .await;
    assert_eq!(reported[0], "alpha\noops\nmore\n");
    assert_eq!(reported[1], "x\n");
    assert_eq!(reported[2], "error: exit code 3");
    assert_eq!(reported[3], "error: ended by signal 9\nbefore\n");
    assert_eq!(reported[4], "");
    assert_eq!(reported[5], "\u{fffd}a\0b");
    let lines: Vec<&str> = reported[6].lines().collect();
    assert_eq!((lines[0], lines[2]), (lines[1], "hi"), "{}", reported[6]);
    assert!(
        !Path::new(lines[0]).exists(),
        "the temporary folder is removed"
    );
    assert_eq!(reported[7], "100000\n/etc/passwd\n");
    assert!(
        reported[8].starts_with("error: exit code 127\n"),
        "{}",
        reported[8]
    );
    assert_eq!(reported[9], "ran\n");
    assert_eq!(reported[10], "");
    assert!(app.path("work/d/e/b.txt").exists());
}

#[tokio::test]
async fn arguments_are_checked() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let reported = command_results(
        &app,
        &[
            json!({}),
            json!({"command": ""}),
            json!({"command": "true", "timeout": 0}),
            json!({"command": "echo a\u{0}b"}),
        ],
    )
    .await;
    for (reported, why) in
        reported
            .iter()
            .zip(["\"command\" is a required", "/command", "/timeout", "NUL"])
    {
        assert!(
            reported.starts_with("error: ") && reported.contains(why),
            "{reported}"
        );
    }
}

#[tokio::test]
async fn no_process_outlives_the_call() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let mark = mark();
    let commands = [
        format!("sleep {mark} & echo started"),
        format!("setsid sh -c 'setsid sleep {mark} &' & sleep 0.1; echo started"),
        format!(
            "(trap '' TERM HUP INT; sleep {mark}) & (trap '' TERM; setsid nohup sleep {mark} >/dev/null 2>&1 &) ; echo started"
        ),
        format!("for i in $(seq 200); do setsid sleep {mark} & done; echo started"),
        format!(
            "for i in 1 2 3; do (for j in 1 2 3; do (for k in 1 2 3; do sleep {mark} & done) & done) & done; echo started"
        ),
    ];
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    for reported in reported(&app, &commands).await {
        assert_eq!(reported, "started\n");
    }
    // The calls came back, so nothing is left, without any waiting.
    assert!(!is_alive(&format!("sleep\0{mark}")));
}

#[tokio::test]
async fn a_background_process_ends_with_its_call() {
    let app = worker("").spawn().await;
    if !is_confined(&app) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let mark = mark();
    let code = format!(
        "import os,signal,time\n\
         for s in range(1,32):\n\
         \x20   try: signal.signal(s, signal.SIG_IGN)\n\
         \x20   except OSError: pass\n\
         if os.fork(): os._exit(0)\n\
         os.setsid()\n\
         if os.fork(): os._exit(0)\n\
         open('up', 'w').close()\n\
         for fd in (0, 1, 2): os.close(fd)\n\
         time.sleep({mark})"
    );
    let command = format!(
        "/usr/bin/python3 -c \"{code}\"; while [ ! -e up ]; do sleep 0.01; done; echo started"
    );
    assert_eq!(reported(&app, &[&command]).await, ["started\n"]);
    assert!(!is_alive(&mark));
}

#[tokio::test]
async fn a_timed_out_command_is_ended_with_its_descendants() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let mark = mark();
    let reported = command_results(
        &app,
        &[
            json!({"command": format!("echo begun; trap '' TERM; setsid sleep {mark} & sleep {mark}"), "timeout": 20}),
            json!({"command": "yes", "timeout": 20}),
        ],
    )
    .await;
    assert_eq!(
        reported[0],
        "error: timed out after 20 s. It was ended with everything that it had started.\nbegun\n"
    );
    assert!(!is_alive(&mark));
    assert!(reported[1].starts_with("error: timed out after 20 s."));
    assert!(reported[1].len() <= 256 << 10);
    assert!(
        reported[1].contains("the output was longer"),
        "{}",
        &reported[1][reported[1].len() - 300..]
    );
}

#[tokio::test]
async fn long_output_is_cut_with_a_notice_and_the_command_continues() {
    let app = worker("max_result = \"4 KiB\"").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let reported = reported(&app, &["seq 1000000; echo end > end"]).await;
    assert!(
        reported[0].starts_with("1\n2\n3\n") && reported[0].len() <= 4096,
        "{}",
        reported[0].len()
    );
    assert!(
        reported[0].contains("(the output was longer, 6888896 bytes in all"),
        "{}",
        reported[0]
    );
    assert!(app.path("work/end").exists());
}

#[tokio::test]
async fn a_cancelled_run_ends_its_commands() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let mark = mark();
    let command = format!("setsid sleep {mark} & touch up; sleep {mark}");
    app.provider.will(
        "worker",
        [calls([("run_command", json!({"command": command}))])],
    );
    let run = app.start("worker", "go").await;
    written(&app.path("work/up")).await;
    assert_eq!(run.cancel("enough").await.status(), "cancelled");
    gone(&mark).await;
}

#[tokio::test]
async fn a_killed_daemon_ends_its_commands() {
    let mut app = worker("").config(UNATTENDED).spawn().await;
    if !is_confined(&app) {
        return;
    }
    let mark = mark();
    let command = format!("setsid sleep {mark} & echo $TMPDIR > up; sleep {mark}");
    app.provider.will(
        "worker",
        [calls([("run_command", json!({"command": command}))])],
    );
    let id = app.start("worker", "go").await.id().to_owned();
    written(&app.path("work/up")).await;
    eventually("the command's own processes", async || {
        is_alive(&format!("sleep\0{mark}")).then_some(())
    })
    .await;
    app.daemon.kill().await;
    gone(&mark).await;
    let temporary = fs::read_to_string(app.path("work/up")).expect("a path");
    assert!(!Path::new(temporary.trim()).exists());
    app.restart_after_end().await;
    let run = app.find(&id).await.wait_for_end().await;
    let (code, message) = run.failure();
    assert_eq!(code, "interrupted");
    assert!(message.contains("run_command"), "{message}");
}

#[tokio::test]
async fn the_temporary_directory_is_removed_however_deep() {
    let app = worker("").spawn().await;
    if !is_confined(&app) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let code = "import os; top = os.environ[\"TMPDIR\"]; print(top); os.chdir(top)\n\
                for at in range(1500): os.mkdir(\"d\" * 200); os.chdir(\"d\" * 200)\n\
                open(\"f\", \"w\").close(); os.chmod(\".\", 0)";
    // Fewer files than levels.
    let command =
        "ulimit -n 256; exec \"$AXED\" __command confined \"/usr/bin/python3 -c '$CODE'\" <.";
    let printed = supervised(&app, &format!("CODE='{code}'; {command}")).await;
    assert!(printed.starts_with('/'), "{printed}");
    assert!(!Path::new(printed.trim()).exists(), "{printed}");
}

#[tokio::test]
async fn twenty_commands_run_at_once() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    // Each waits for all others, so they must run at the same time.
    let command = |number| {
        let command = format!(
            "touch n{number}; while [ $(ls | grep -c '^n') -lt 20 ]; do sleep 0.02; done; echo {number}"
        );
        ("run_command", json!({"command": command, "timeout": 600}))
    };
    app.provider
        .will("worker", [calls((0..20).map(command)), says("done")]);
    let run = app.run("worker", "go").await;
    assert_eq!(run.output(), "done");
    assert_eq!(count(&run.events().await, "tool.completed"), 20);
    let reported = app
        .provider
        .wait_for_request("worker", 2)
        .await
        .tool_results();
    let expected: Vec<String> = (0..20).map(|number| format!("{number}\n")).collect();
    assert_eq!(reported, expected);
}

#[tokio::test]
async fn without_allow_commands_the_tool_is_valid_but_not_offered() {
    let app = TestApp::setup()
        .agent(
            "worker",
            "workdir = \"work\"\ntools = [\"run_command\", \"read_file\"]",
        )
        .file("work/a.txt", "alpha")
        .spawn()
        .await;
    app.daemon
        .wait_for_log("tools lists run_command, which this server does not offer")
        .await;
    let reported = reported(&app, &["touch here"]).await;
    assert_eq!(reported, ["error: Unknown tool: \"run_command\""]);
    let names = app
        .provider
        .wait_for_request("worker", 1)
        .await
        .tool_names();
    assert_eq!(names, ["read_file"]);
    assert!(!app.path("work/here").exists());
}

#[tokio::test]
async fn a_command_is_bounded_in_bytes() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let [fits, too_long] = [59_000, 66_000].map(|count| format!("printf %s {}", "é".repeat(count)));
    assert_eq!(
        reported(&app, &[&fits, &too_long]).await,
        [
            "é".repeat(59_000),
            "error: the command has 132010 bytes, and at most 120000 are possible; write long texts to a file first, \
             as with write_file"
                .to_owned(),
        ]
    );
}
