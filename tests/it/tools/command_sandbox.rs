//! What the sandbox of `run_command` denies.

use crate::support::app::TestApp;
use crate::support::provider::answer::{calls, says};
use crate::tools::run_command::{ALLOWED, is_alive, is_confined, mark, reported, worker, written};
use serde_json::json;
use std::fs;
use std::path::Path;

#[tokio::test]
async fn a_command_cannot_read_the_daemons_files_or_environment() {
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
            "AXED_CALL_KEY",
            "PATH",
            "HOME",
            "LANG",
            "TZ",
            "TMPDIR",
            "PASSED",
            "PWD",
            "OLDPWD",
            "SHLVL",
            "_",
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
async fn a_command_writes_only_in_its_workdir() {
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
async fn a_command_cannot_reach_its_users_processes_or_memory() {
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
async fn a_command_inherits_no_open_file() {
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

/// What a supervisor's command prints, started by this shell script in the workdir.
pub async fn supervised(app: &TestApp, script: &str) -> String {
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
async fn a_command_has_no_network() {
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
async fn the_network_can_be_allowed_without_local_sockets() {
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

/// A command that tries kinds of sockets and prints which it got.
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
async fn a_workdir_with_the_daemons_files_has_no_commands() {
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
fn without_landlock_commands_run_unconfined_if_allowed_and_end_completely() {
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
