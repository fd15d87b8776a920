//! The daemon as a process, started as a user starts it. Its output is kept; it is killed on drop.

use std::path::Path;
use std::process::{Command as Blocking, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock};

use reqwest::Client;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::app::client;
use crate::support::within_timeout;

/// The binary under test.
pub const AXED: &str = env!("CARGO_BIN_EXE_axed");

/// A daemon that listens.
pub struct Daemon {
    /// `http://<addr>`, from its first line.
    pub url: String,
    pub client: LazyLock<Client>,
    child: Child,
    log: Log,
    _readers: JoinSet<()>,
}

/// Everything that a process wrote to stderr, and to stdout after its first line.
#[derive(Clone, Default)]
struct Log {
    text: Arc<watch::Sender<String>>,
    is_unread: Arc<watch::Sender<bool>>,
}

impl Log {
    async fn collect(self, output: impl AsyncRead + Unpin) {
        let mut lines = BufReader::new(output).lines();
        let mut is_unread = self.is_unread.subscribe();
        while let Ok(Some(line)) = lines.next_line().await {
            let reading = is_unread.wait_for(|is_unread| !is_unread);
            reading.await.expect("the log is kept");
            self.text.send_modify(|log| {
                log.push_str(&line);
                log.push('\n');
            });
        }
    }

    fn text(&self) -> String {
        self.text.borrow().clone()
    }
}

/// A command of the binary in `home`, with nothing of this process's environment.
pub fn axed_command(home: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(AXED);
    command
        .args(arguments)
        .current_dir(home)
        .env_clear()
        .env("HOME", home)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

impl Daemon {
    /// Starts one and waits for the line with its address.
    pub async fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start axed");
        let log = Log::default();
        let mut readers = JoinSet::new();
        readers.spawn(log.clone().collect(child.stderr.take().expect("stderr")));
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
        let mut line = String::new();
        within_timeout("the line with the address", stdout.read_line(&mut line))
            .await
            .expect("read stdout");
        let Some(url) = line.trim().strip_prefix("axed listening on ") else {
            // It has closed its output; stderr has the reason.
            while readers.join_next().await.is_some() {}
            panic!(
                "axed did not start; it printed {line:?} and\n{}",
                log.text()
            );
        };
        readers.spawn(log.clone().collect(stdout));
        Self {
            url: url.to_owned(),
            child,
            log,
            client: LazyLock::new(client),
            _readers: readers,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id().expect("a process that was not waited for")
    }

    /// Sends it a signal by name.
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Kills it and waits for its end.
    pub async fn kill(&mut self) {
        within_timeout("the daemon's death", self.child.kill())
            .await
            .expect("kill axed");
    }

    /// Whether nobody reads its output from now on.
    pub fn leave_log_unread(&self, is_unread: bool) {
        self.log.is_unread.send_replace(is_unread);
    }

    /// Waits until the log contains `text`.
    pub async fn wait_for_log(&self, text: &str) {
        let mut log = self.log.text.subscribe();
        within_timeout(
            &format!("{text:?} in the log"),
            log.wait_for(|log| log.contains(text)),
        )
        .await
        .expect("the log is kept");
    }

    /// Waits for its end.
    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        within_timeout("the daemon's end", self.child.wait())
            .await
            .expect("wait for axed")
    }

    /// The log so far.
    pub fn log(&self) -> String {
        self.log.text()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("---- what {} logged ----\n{}", self.url, self.log());
        }
    }
}

fn signal(pid: u32, name: &str) {
    let sent = Blocking::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status()
        .expect("run kill");
    assert!(sent.success(), "signal {name} to {pid}");
}
