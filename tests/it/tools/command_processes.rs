//! The processes of a command, which may start others faster than anybody can find them: how many there may be, what they
//! may use together, and that all of them end with their call.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::process::{Child, Command};

use crate::support::app::TestApp;
use crate::support::eventually;
use crate::support::provider::answer::{calls, says};
use crate::tools::run_command::{alive, gone, is_alive, is_confined, mark, reported, worker};

const AXED: &str = env!("CARGO_BIN_EXE_axed");
/// Processes that a fork bomb may start in all. It is finite, so that a failing build does not end the machine.
const MAX_FORKS: u32 = 600;
/// With this limit a bomb is not ended for its number of processes.
const ALLOWS_BOMBS: &str = "max_command_processes = 1000";

/// Each of its processes leaves its session, has the mark in its command line and starts others, also in place of those
/// that were killed.
fn fork_bomb(mark: &str) -> String {
    format!(
        "/usr/bin/python3 -c \"import os, time\n\
         left, more = os.pipe(); os.set_blocking(left, False); os.write(more, b'x' * {MAX_FORKS})\n\
         end = time.monotonic() + 60\n\
         while time.monotonic() < end:\n\
         \x20   try: os.read(left, 1)\n\
         \x20   except OSError: time.sleep(0.1); continue\n\
         \x20   try:\n\
         \x20       if os.fork() == 0: os.setsid()\n\
         \x20   except OSError: os.write(more, b'x'); time.sleep(0.02)\" {mark}"
    )
}

fn has_python(app: &TestApp) -> bool {
    is_confined(app) && Path::new("/usr/bin/python3").exists()
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

fn confinement(isolation: &str) -> String {
    format!("confined:1000:4294967296:{isolation}")
}

/// A supervisor as the daemon starts it, by this user or, if this one is root, by nobody. When its report is closed, it
/// ends the command. `None`, and a note, if the system does not isolate processes in this way.
async fn launch(app: &TestApp, is_nobody: bool, isolation: &str, command: &str) -> Option<Child> {
    // Nobody may not enter the binary's directory, but execute the open file.
    let script = match is_nobody {
        true => {
            "exec 9<\"$AXED\"; exec setpriv --reuid=65534 --regid=65534 --clear-groups /proc/self/fd/9 __command \"$@\" <."
        }
        false => "exec \"$AXED\" __command \"$@\" <.",
    };
    let confinement = confinement(isolation);
    let process = |arguments: &[&str]| {
        let mut process = Command::new("/bin/sh");
        process
            .args(["-c", script, "sh"])
            .args(arguments)
            .env("AXED", AXED)
            .env("TMPDIR", "/tmp")
            .current_dir(app.path("work"))
            .stderr(Stdio::piped());
        process
    };
    let probe = process(&[&confinement]).output().await.expect("a probe");
    if probe.stdout != isolation.as_bytes() {
        eprintln!("SKIPPED: this system has no {isolation}");
        return None;
    }
    let mut process = process(&[&confinement, command]);
    Some(process.stdout(Stdio::null()).spawn().expect("a supervisor"))
}

async fn grown(mark: &str) {
    eventually("a fork bomb", async || {
        (alive(mark).len() > 150).then_some(())
    })
    .await;
}

/// Closes the report, as an ended call and a dead daemon do. The supervisor ends when nothing is left.
async fn end(mut child: Child, mark: &str) {
    drop(child.stderr.take());
    child.wait().await.expect("its end");
    assert!(!is_alive(mark), "a process outlived its call");
}

#[tokio::test]
async fn a_fork_bomb_ends_with_its_call_and_leaves_the_daemon_responsive() {
    let app = worker("").spawn().await;
    if !has_python(&app) {
        return;
    }
    let mark = mark();
    let arguments = json!({"command": fork_bomb(&mark)});
    app.provider.will(
        "worker",
        [
            calls([
                ("run_command", arguments.clone()),
                ("run_command", arguments),
            ]),
            calls([("run_command", json!({"command": "echo usable"}))]),
            says("done"),
        ],
    );
    let wait = async || {
        let began = Instant::now();
        assert_eq!(app.get("/livez").await.status, 200);
        began.elapsed()
    };
    let mut before = Vec::new();
    for _ in 0..50 {
        before.push(wait().await);
    }
    before.sort_unstable();
    let run = app.start("worker", "go").await;
    let mut waits = Vec::new();
    let answers = async {
        loop {
            waits.push(wait().await);
        }
    };
    let ended = tokio::select! {
        ended = run.wait_for_end() => ended,
        () = answers => unreachable!(),
    };
    assert_eq!(ended.output(), "done");
    assert!(!is_alive(&mark), "a process outlived its call");
    let bombs = app.provider.wait_for_request("worker", 2).await;
    for result in &bombs.tool_results()[..2] {
        let expected = "ended with everything that it had started: it had more than 256 processes";
        assert!(result.contains(expected), "{result}");
    }
    let next = app.provider.wait_for_request("worker", 3).await;
    assert_eq!(
        next.tool_results().last().map(String::as_str),
        Some("usable\n")
    );
    waits.sort_unstable();
    eprintln!("the slowest answer of {}: {:?}", waits.len(), waits.last());
    // A machine that runs other tests may delay some, but not most.
    let most = Duration::from_millis(100).max(before[25] * 10);
    assert!(waits[waits.len() / 2] < most, "{before:?}");
}

#[tokio::test]
async fn a_cancelled_fork_bomb_ends() {
    let app = worker(ALLOWS_BOMBS).spawn().await;
    if !has_python(&app) {
        return;
    }
    let mark = mark();
    let bomb = json!({"command": fork_bomb(&mark)});
    app.provider
        .will("worker", [calls([("run_command", bomb)])]);
    let run = app.start("worker", "go").await;
    grown(&mark).await;
    assert_eq!(run.cancel("enough").await.status(), "cancelled");
    gone(&mark).await;
}

#[tokio::test]
async fn a_fork_bomb_ends_with_a_daemon_that_is_killed() {
    let mut app = worker(ALLOWS_BOMBS).spawn().await;
    if !has_python(&app) {
        return;
    }
    let mark = mark();
    let bomb = json!({"command": fork_bomb(&mark)});
    app.provider
        .will("worker", [calls([("run_command", bomb)])]);
    app.start("worker", "go").await;
    grown(&mark).await;
    app.daemon.kill().await;
    gone(&mark).await;
}

#[tokio::test]
async fn each_isolation_ends_a_fork_bomb() {
    let app = worker("").spawn().await;
    if !has_python(&app) {
        return;
    }
    for is_nobody in [false, true] {
        if is_nobody && !(is_root() && Path::new("/usr/bin/setpriv").exists()) {
            continue;
        }
        for isolation in [
            "pid-namespace",
            "user-namespace",
            "signal-scope",
            "control-group",
        ] {
            let mark = mark();
            let bomb = fork_bomb(&mark);
            let Some(child) = launch(&app, is_nobody, isolation, &bomb).await else {
                continue;
            };
            grown(&mark).await;
            end(child, &mark).await;
        }
    }
}

#[tokio::test]
async fn the_kernel_ends_a_fork_bomb_whose_supervisor_is_killed() {
    let app = worker("").spawn().await;
    if !has_python(&app) {
        return;
    }
    for killed_subcommand in ["__command", "__init"] {
        let mark = mark();
        let bomb = fork_bomb(&mark);
        let Some(child) = launch(&app, false, "user-namespace", &bomb).await else {
            return;
        };
        grown(&mark).await;
        let supervisors = alive(&format!("axed\0{killed_subcommand}"));
        let bombs = alive(&mark);
        let ours = supervisors.into_iter().find(|pid| bombs.contains(pid));
        let killed = match (killed_subcommand, child.id()) {
            // The shell has become this one, under another name.
            ("__command", Some(pid)) => pid.to_string(),
            _ => ours.expect("a supervisor").to_string(),
        };
        let kill = Command::new("kill").args(["-9", &killed]).status().await;
        assert!(kill.expect("a kill").success());
        gone(&mark).await;
    }
}

#[tokio::test]
async fn the_number_of_processes_is_limited_for_every_user() {
    let app = worker("max_command_processes = 40").spawn().await;
    if !has_python(&app) {
        return;
    }
    let command = "/usr/bin/python3 -c 'import os, time\nstarted = 0\n\
                   try:\n\
                   \x20   while started < 200:\n\
                   \x20       if os.fork() == 0: time.sleep(50); os._exit(0)\n\
                   \x20       started += 1\n\
                   except OSError: pass\n\
                   time.sleep(50); print(started)'";
    let reported = reported(&app, &[command]).await;
    assert!(
        reported[0].contains("it had more than 40 processes"),
        "{}",
        reported[0]
    );
}

#[tokio::test]
async fn a_command_that_uses_too_much_memory_is_ended() {
    // The process that becomes the command has the limit too, with 100 MB of code if it was built for tests.
    let app = worker("max_command_memory = \"400 MiB\"").spawn().await;
    if !has_python(&app) {
        return;
    }
    let mark = mark();
    let alone = "/usr/bin/python3 -c 'print(len(bytearray(600 << 20)))'";
    let together = format!(
        "/usr/bin/python3 -c 'import os, time\nfor _ in range(10):\n\
         \x20   if os.fork() == 0: kept = bytearray(os.urandom(1 << 20) * 60); time.sleep(50); os._exit(0)\n\
         if all(os.wait()[1] == 0 for _ in range(10)): print(\"survived\")' {mark}"
    );
    let shared = "/usr/bin/python3 -c 'import mmap, os, time\nsize = 800 << 20\n\
                  kept = mmap.mmap(-1, size); print(\"mapped\", flush=True)\n\
                  for start in range(0, size, 4096): kept[start] = 1\n\
                  time.sleep(10); print(\"survived\")'";
    let reported = reported(&app, &[alone, &together, shared]).await;
    assert!(reported[0].contains("MemoryError"), "{}", reported[0]);
    assert!(reported[2].contains("mapped"), "{}", reported[2]);
    // A control group ends the process that needs the memory, and not the others.
    for ended in &reported[1..] {
        assert!(!ended.contains("survived"), "{ended}");
    }
    assert!(!is_alive(&mark));
}

#[tokio::test]
async fn open_files_are_limited() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let reported = reported(&app, &["ulimit -n; ulimit -c; ulimit -n 4096"]).await;
    assert!(reported[0].contains("\n1024\n0\n"), "{}", reported[0]);
    assert!(
        reported[0].starts_with("error: exit code"),
        "{}",
        reported[0]
    );
}
