//! `run_command` from outside: what a command can do, and what it cannot.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::count;
use crate::support::provider::answer::{calls, says};
use crate::support::within_timeout;

const ALLOWED: &str = "[tools]\nallow_commands = true\n";

/// An agent that may run commands in `work`.
fn worker(more: &str) -> Setup {
    TestApp::setup()
        .agent("worker", "workdir = \"work\"\ntools = [\"run_command\"]")
        .config(&format!("{ALLOWED}{more}"))
        .file("work/a.txt", "alpha\n")
}

/// Whether this system confines commands; says so where it does not, and the story is left out.
fn is_confined(app: &TestApp) -> bool {
    let is_offered = !app.daemon.log().contains("has no Landlock");
    if !is_offered {
        eprintln!("SKIPPED: this system has no Landlock of Linux 6.2, nothing is confined here");
    }
    is_offered
}

/// The results that the model gets of these calls, made one after another.
async fn told_of(app: &TestApp, sent: &[Value]) -> Vec<String> {
    let before = app.provider.requests().len();
    for call in sent {
        app.provider
            .will("worker", [calls([("run_command", call.clone())])]);
    }
    app.provider.will("worker", [says("done")]);
    assert_eq!(app.run("worker", "go").await.output(), "done");
    let seen = app
        .provider
        .wait_for_request("worker", before + sent.len() + 1)
        .await;
    let marked = seen
        .tool_results()
        .into_iter()
        .zip(seen.tool_result_errors());
    marked
        .map(|(text, is_error)| match is_error {
            true => format!("error: {text}"),
            false => text,
        })
        .collect()
}

async fn reported(app: &TestApp, commands: &[&str]) -> Vec<String> {
    let sent: Vec<Value> = commands.iter().map(|it| json!({"command": it})).collect();
    told_of(app, &sent).await
}

/// Waits until no process has this in its command line.
async fn gone(mark: &str) {
    within_timeout(&format!("the end of {mark}"), async {
        while is_alive(mark) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn is_alive(mark: &str) -> bool {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let mut lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.any(|line| String::from_utf8_lossy(&line).contains(mark))
}

/// Waits for a file that a command writes.
async fn written(path: &Path) {
    within_timeout(&format!("{}", path.display()), async {
        while !path.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A number of seconds that no other story sleeps, to know our processes by.
fn mark() -> String {
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
    let reported = told_of(
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
async fn nothing_outlives_the_call() {
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
async fn a_daemon_of_its_own_making_ends_with_it() {
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
async fn a_command_that_takes_too_long_is_ended_whole() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let mark = mark();
    let reported = told_of(
        &app,
        &[
            json!({"command": format!("echo begun; trap '' TERM; setsid sleep {mark} & sleep {mark}"), "timeout": 1}),
            json!({"command": "yes", "timeout": 1}),
        ],
    )
    .await;
    assert_eq!(
        reported[0],
        "error: timed out after 1 s. It was ended with everything that it had started.\nbegun\n"
    );
    assert!(!is_alive(&mark));
    assert!(reported[1].starts_with("error: timed out after 1 s."));
    assert!(reported[1].len() <= 256 << 10);
    assert!(
        reported[1].contains("the output was longer"),
        "{}",
        &reported[1][reported[1].len() - 300..]
    );
}

#[tokio::test]
async fn long_output_is_cut_with_a_notice_and_the_command_goes_on() {
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
async fn a_killed_daemon_takes_its_commands_along() {
    let mut app = worker("").spawn().await;
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
    within_timeout("the command's own processes", async {
        while !is_alive(&format!("sleep\0{mark}")) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
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
async fn a_command_sees_nothing_of_the_daemon() {
    let app = worker("pass_env = [\"PASSED\"]")
        .environment("DAEMON_SECRET", "s3cret-value")
        .environment("ANTHROPIC_API_KEY", "s3cret-value")
        .environment("PASSED", "passed-value")
        .file("other/secret.txt", "s3cret-value")
        .spawn()
        .await;
    if !is_confined(&app) {
        return;
    }
    let home = app.path("");
    let home = home.display();
    let pid = app.daemon.pid();
    std::os::unix::fs::symlink(app.path("other"), app.path("work/link")).expect("a link");
    let spied = [
        "env".to_owned(),
        format!("cat /proc/{pid}/environ"),
        "cat /proc/$PPID/environ; cat /proc/$PPID/cmdline".to_owned(),
        format!("cat /proc/{pid}/maps; ls /proc/{pid}/fd"),
        "cat ../config/axed.toml".to_owned(),
        format!("cat {home}/config/axed.toml; ls {home}/data; cat {home}/data/*"),
        "ls ../agents; cat ../agents/*".to_owned(),
        "cat link/secret.txt".to_owned(),
        "cat ../other/secret.txt; ls ..".to_owned(),
        "cat /etc/shadow /root/.bashrc /root/.profile; ls /root /home /tmp /var/log".to_owned(),
        "ln -s ../config c; cat c/axed.toml; ln ../config/axed.toml hard; cat hard".to_owned(),
    ];
    let spied: Vec<&str> = spied.iter().map(String::as_str).collect();
    let reported = reported(&app, &spied).await;
    assert!(
        reported[0].contains("PASSED=passed-value"),
        "{}",
        reported[0]
    );
    assert!(reported[0].contains("PATH="), "{}", reported[0]);
    let names = reported[0].lines().filter_map(|line| line.split_once('='));
    for (name, _) in names {
        let expected = [
            "PATH", "HOME", "LANG", "TZ", "TMPDIR", "PASSED", "PWD", "OLDPWD", "SHLVL", "_",
        ];
        assert!(expected.contains(&name), "{name}");
    }
    for (command, reported) in spied.iter().zip(&reported).skip(1) {
        assert!(
            reported.starts_with("error: exit code"),
            "{command}: {reported}"
        );
        let denied = reported.contains("denied") || reported.contains("not permitted");
        assert!(denied, "{command}: {reported}");
        for secret in [
            "s3cret",
            "key-of-anthropic",
            "workdir =",
            "root:",
            ".toml\n",
        ] {
            assert!(!reported.contains(secret), "{command}: {reported}");
        }
    }
}

#[tokio::test]
async fn a_command_changes_nothing_outside() {
    let app = worker("").file("other/kept.txt", "kept").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let pid = app.daemon.pid();
    std::os::unix::fs::symlink(app.path("other"), app.path("work/link")).expect("a link");
    let name = format!("axed-story-{}", mark());
    let tried = [
        format!("echo x > /tmp/{name}"),
        format!("echo x > /var/tmp/{name}"),
        format!("echo x > /dev/shm/{name}"),
        "echo x > ../other/new.txt".to_owned(),
        "echo x > ../other/kept.txt".to_owned(),
        "echo x > link/kept.txt".to_owned(),
        "truncate -s 0 ../other/kept.txt".to_owned(),
        "rm -f link/kept.txt".to_owned(),
        "mv ../other/kept.txt .".to_owned(),
        "ln ../other/kept.txt mine".to_owned(),
        "rm -rf ../agents".to_owned(),
        format!("echo x > /usr/{name}"),
        format!("kill -STOP {pid}"),
        format!("kill -9 {pid}"),
        "kill -9 $PPID".to_owned(),
        format!("prlimit --pid {pid} --nofile=3"),
        "cp /bin/sh s; chmod u+s s".to_owned(),
        "mknod d c 1 3".to_owned(),
        "mount -t tmpfs none .".to_owned(),
        "unshare -Ur true".to_owned(),
    ];
    let tried: Vec<&str> = tried.iter().map(String::as_str).collect();
    let reported = reported(&app, &tried).await;
    for (command, reported) in tried.iter().zip(&reported) {
        assert!(reported.starts_with("error: e"), "{command}: {reported}");
    }
    let kept = fs::read_to_string(app.path("other/kept.txt")).expect("a file");
    assert_eq!(kept, "kept");
    assert!(app.path("agents/worker.toml").exists());
    assert!(!app.path("other/new.txt").exists());
    for folder in ["/tmp", "/var/tmp", "/dev/shm", "/usr"] {
        assert!(!Path::new(folder).join(&name).exists(), "{folder}");
    }
}

#[tokio::test]
async fn a_command_reaches_nothing_that_its_user_has_besides_files() {
    let app = worker("").spawn().await;
    if !is_confined(&app) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    // Numbers of queues and memory can be guessed. Without a filter these do not exist.
    let code = "import ctypes, os\n\
                c = ctypes.CDLL(None, use_errno=True)\n\
                buffer = ctypes.create_string_buffer(4096)\n\
                def t(name, *it):\n\
                \x20   ctypes.set_errno(0); getattr(c, name)(*it); print(name, os.strerror(ctypes.get_errno()))\n\
                far = 2**31 - 1\n\
                t('msgctl', far, 2, buffer); t('msgrcv', far, buffer, 8, 0, 2048); t('msgsnd', far, buffer, 8, 2048)\n\
                t('shmctl', far, 2, buffer); t('semctl', far, 0, 12); t('semop', far, buffer, 1)\n\
                now = os.getpriority(os.PRIO_PROCESS, 0)\n\
                t('setpriority', os.PRIO_USER, 0, min(now + 1, 19)); t('syscall', IOPRIO, 3, 0, 2 << 13 | 4)\n\
                print(os.getpriority(os.PRIO_PROCESS, 0) - now)";
    let code = code.replace(
        "IOPRIO",
        match cfg!(target_arch = "x86_64") {
            true => "251",
            false => "30",
        },
    );
    let reported = reported(&app, &[&format!("/usr/bin/python3 -c \"{code}\"")]).await;
    let expected = [
        "msgctl",
        "msgrcv",
        "msgsnd",
        "shmctl",
        "semctl",
        "semop",
        "setpriority",
        "syscall",
    ];
    let mut expected = expected
        .map(|it| format!("{it} Operation not permitted\n"))
        .concat();
    expected.push_str("0\n");
    assert_eq!(reported[0], expected);
}

// The process that starts the daemon may leave files open for it, and Landlock does not restrict open files.
#[tokio::test]
async fn a_command_is_given_no_open_file_of_the_daemon() {
    let app = worker("").file("other/kept.txt", "kept").spawn().await;
    if !is_confined(&app) {
        return;
    }
    let printed = supervised(
        &app,
        "exec \"$AXED\" __command confined 'echo got; cat <&7; echo x >&8' 7<../other/kept.txt 8>>../other/kept.txt <.",
    )
    .await;
    assert!(
        printed.starts_with("got\n") && !printed.contains("kept"),
        "{printed}"
    );
    let kept = fs::read_to_string(app.path("other/kept.txt")).expect("a file");
    assert_eq!(kept, "kept");
}

#[tokio::test]
async fn the_temporary_folder_goes_however_deep_it_is() {
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

/// What a supervisor's command prints, started by this shell script in the workdir.
async fn supervised(app: &TestApp, script: &str) -> String {
    let output = tokio::process::Command::new("/bin/sh")
        .args(["-c", script])
        .env("AXED", env!("CARGO_BIN_EXE_axed"))
        .current_dir(app.path("work"))
        .output()
        .await
        .expect("a supervisor");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn a_command_reaches_no_network() {
    let app = worker("").spawn().await;
    if !is_confined(&app) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let reported = reported(&app, &[&sockets(&app)]).await;
    assert_eq!(
        reported[0],
        "tcp no\ntcp6 no\nudp no\nraw no\nlocal no\nvsock no\nnetlink no\npacket no\ndatagrams no\npair yes\ndaemon no\ndns no\n"
    );
}

#[tokio::test]
async fn the_network_can_be_allowed_and_local_sockets_stay_shut() {
    let app = worker("network = true").spawn().await;
    if !is_confined(&app) || !Path::new("/usr/bin/python3").exists() {
        return;
    }
    let reported = reported(&app, &[&sockets(&app)]).await;
    for line in [
        "tcp yes",
        "udp yes",
        "local no",
        "vsock no",
        "packet no",
        "daemon yes",
    ] {
        assert!(
            reported[0].contains(&format!("{line}\n")),
            "{}",
            reported[0]
        );
    }
    assert!(reported[0].contains("\nraw no\n"), "{}", reported[0]);
}

/// A command that tries kinds of sockets and says which it got.
fn sockets(app: &TestApp) -> String {
    let port = app
        .daemon
        .url
        .rsplit(':')
        .next()
        .expect("a port")
        .to_owned();
    let code = format!(
        "import socket as s\n\
         def t(name, f):\n\
         \x20   try: f(); print(name, 'yes')\n\
         \x20   except OSError: print(name, 'no')\n\
         t('tcp', lambda: s.socket(s.AF_INET, s.SOCK_STREAM))\n\
         t('tcp6', lambda: s.socket(s.AF_INET6, s.SOCK_STREAM))\n\
         t('udp', lambda: s.socket(s.AF_INET, s.SOCK_DGRAM))\n\
         t('raw', lambda: s.socket(s.AF_INET, s.SOCK_RAW, 1))\n\
         t('local', lambda: s.socket(s.AF_UNIX, s.SOCK_STREAM))\n\
         t('vsock', lambda: s.socket(40, s.SOCK_STREAM))\n\
         t('netlink', lambda: s.socket(s.AF_NETLINK, s.SOCK_RAW, 0))\n\
         t('packet', lambda: s.socket(s.AF_PACKET, s.SOCK_RAW, 0))\n\
         t('datagrams', lambda: s.socketpair(s.AF_UNIX, s.SOCK_DGRAM))\n\
         t('pair', lambda: s.socketpair())\n\
         t('daemon', lambda: s.create_connection(('127.0.0.1', {port}), 5))\n\
         t('dns', lambda: s.getaddrinfo('name.invalid', 80))"
    );
    format!("/usr/bin/python3 -c \"{code}\"")
}

#[tokio::test]
async fn a_workdir_with_the_daemons_own_files_takes_no_command() {
    let app = TestApp::setup()
        .agent("worker", "tools = [\"run_command\", \"read_file\"]")
        .config(ALLOWED)
        .spawn()
        .await;
    if !is_confined(&app) {
        return;
    }
    let reported = reported(&app, &["cat config/axed.toml"]).await;
    assert!(
        reported[0].contains("the workdir contains the server's own files"),
        "{}",
        reported[0]
    );
}

#[tokio::test]
async fn a_swapped_workdir_changes_nothing() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    fs::create_dir(app.path("other")).expect("a directory");
    app.provider.will(
        "worker",
        [
            calls([("run_command", json!({"command": "touch first"}))]),
            calls([("run_command", json!({"command": "touch second"}))]),
            says("done"),
        ],
    );
    // The run opened its workdir at the first call; what the path means later is nothing to it.
    let run = app.start("worker", "go").await;
    written(&app.path("work/first")).await;
    let swapped = fs::rename(app.path("work"), app.path("moved"))
        .and_then(|()| std::os::unix::fs::symlink(app.path("other"), app.path("work")));
    swapped.expect("a swap");
    assert_eq!(run.wait_for_end().await.output(), "done");
    assert!(app.path("moved/second").exists());
    assert!(!app.path("other/second").exists());
}

#[tokio::test]
async fn twenty_commands_run_at_once() {
    let app = worker("").spawn().await;
    if !is_confined(&app) {
        return;
    }
    // Each waits for all others, so they must be at work together.
    let command = |number| {
        let command = format!(
            "touch n{number}; while [ $(ls | grep -c '^n') -lt 20 ]; do sleep 0.02; done; echo {number}"
        );
        ("run_command", json!({"command": command}))
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
async fn where_commands_are_off_an_agent_that_lists_them_is_valid_and_not_offered_them() {
    let app = TestApp::setup()
        .agent(
            "worker",
            "workdir = \"work\"\ntools = [\"run_command\", \"read_file\"]",
        )
        .file("work/a.txt", "alpha")
        .spawn()
        .await;
    app.daemon
        .wait_for_log("Agent worker lists run_command, which this server does not offer")
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

/// Performs a story as on a system without Landlock: this thread and the daemon that it starts are answered as there.
#[cfg(target_os = "linux")]
fn without_landlock(story: impl Future<Output = ()> + Send + 'static) {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

    let thread = std::thread::spawn(|| {
        let arch = TargetArch::try_from(std::env::consts::ARCH).expect("an architecture");
        let refused = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
        let rules = [(libc::SYS_landlock_create_ruleset, Vec::new())].into();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch);
        let program = BpfProgram::try_from(filter.expect("a filter")).expect("a program");
        apply_filter(&program).expect("the filter is applied");
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().expect("a runtime");
        runtime.block_on(story);
    });
    thread.join().expect("the story holds");
}

#[cfg(target_os = "linux")]
#[test]
fn without_landlock_commands_are_not_offered() {
    without_landlock(async {
        let app = worker("").spawn().await;
        app.daemon
            .wait_for_log("run_command is not offered: this system has no Landlock")
            .await;
        app.provider.will("worker", [says("done")]);
        app.run("worker", "go").await;
        assert!(
            app.provider
                .wait_for_request("worker", 1)
                .await
                .tool_names()
                .is_empty()
        );
    });
}

#[cfg(target_os = "linux")]
#[test]
fn without_landlock_they_run_unconfined_where_that_is_allowed_and_still_end_whole() {
    without_landlock(async {
        let app = worker("allow_unconfined = true")
            .environment("DAEMON_SECRET", "s3cret-value")
            .file("other/b.txt", "beta\n")
            .spawn()
            .await;
        app.daemon
            .wait_for_log("commands of models run unconfined")
            .await;
        let mark = mark();
        let hidden = format!("setsid sh -c 'setsid sleep {mark} &' & cat ../other/b.txt");
        let reported = reported(&app, &[&hidden, "env", "exit 4"]).await;
        assert_eq!(reported[0], "beta\n");
        assert!(!is_alive(&mark));
        assert!(!reported[1].contains("s3cret"), "{}", reported[1]);
        assert_eq!(reported[2], "error: exit code 4");
    });
}
