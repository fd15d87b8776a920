//! Processes under measurement: started, read for their address and memory, killed at the end.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Pid;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket};

/// Built by `cargo build --release --manifest-path benches/rig/Cargo.toml`.
const RIG: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/benches/rig/target/release/rig-handler"
);

/// A server that listens.
pub struct Process {
    /// `host:port`.
    pub address: String,
    child: Child,
    // Removed after the process has ended; `None` if another one continues in it.
    home: Option<TempDir>,
}

impl Process {
    /// This binary as a provider.
    pub fn provider(delay: Duration) -> Self {
        let delay = delay.as_millis().to_string();
        Self::this_binary(&["--role", "provider", "--delay-ms", &delay])
    }

    /// This binary as the bare handler.
    pub fn bare(provider: &Self) -> Self {
        Self::this_binary(&["--role", "bare", "--provider", &provider.address])
    }

    /// The handler with rig's agents; `None` if it is not built.
    pub fn rig(provider: &Self) -> Option<Self> {
        let program = Path::new(RIG);
        program.exists().then(|| {
            let mut command = Command::new(program);
            command.arg(&provider.address);
            Self::spawn(command, tempfile::tempdir().expect("a directory"))
        })
    }

    /// The daemon, with the agents of the measurements.
    pub fn axed(provider: &Self) -> Self {
        Self::axed_with(provider, "", &[])
    }

    /// The daemon with more configuration and these further agents, by name and by the rest of their file.
    pub fn axed_with(provider: &Self, config: &str, agents: &[(&str, &str)]) -> Self {
        let home = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| write(&home.path().join(path), text);
        write(
            "axed.toml",
            &format!(
                "[providers.bench]\nkind = \"openai\"\nbase_url = \"http://{}\"\n{config}\n",
                provider.address
            ),
        );
        write(
            "agents/solo.toml",
            "name = \"solo\"\nmodel = \"bench/solo\"\n",
        );
        write(
            "agents/leaf.toml",
            "name = \"leaf\"\nmodel = \"bench/leaf\"\n",
        );
        write(
            "agents/root.toml",
            "name = \"root\"\nmodel = \"bench/root\"\nsub_agents = [\"leaf\"]\n",
        );
        for (name, rest) in agents {
            let path = format!("agents/{name}.toml");
            write(&path, &format!("name = \"{name}\"\n{rest}\n"));
        }
        Self::axed_in(home)
    }

    /// Kills it as a crash does; another process may continue in its directory.
    pub fn kill(mut self) -> TempDir {
        self.home.take().expect("a home")
    }

    /// The daemon in the directory of one that was killed.
    pub fn axed_in(home: TempDir) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
        command
            .args(["serve", "--config", "axed.toml", "--agents", "agents"])
            .args(["--data", "data", "--listen", "127.0.0.1:0"])
            .current_dir(home.path())
            .env_clear()
            .env("HOME", home.path());
        Self::spawn(command, home)
    }

    /// The daemon in a directory that outlives it, which may write no file above the limit that is set for it later.
    pub fn axed_at(home: &Path, provider: &str, config: &str, agents: &[(&str, String)]) -> Self {
        let provider =
            format!("[providers.bench]\nkind = \"openai\"\nbase_url = \"http://{provider}\"");
        write(&home.join("axed.toml"), &format!("{provider}\n{config}\n"));
        for (name, rest) in agents {
            let path = home.join(format!("agents/{name}.toml"));
            write(&path, &format!("name = \"{name}\"\n{rest}\n"));
        }
        let mut command = Command::new("/bin/sh");
        // Without this a write above that limit would end the process instead of failing.
        command
            .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
            .args([env!("CARGO_BIN_EXE_axed"), "serve"])
            .args(["--config", "axed.toml", "--agents", "agents"])
            .args(["--data", "data", "--listen", "127.0.0.1:0"])
            .current_dir(home)
            .env_clear()
            .env("HOME", home);
        Self::spawn_logged(command, &home.join("stderr.log"), None)
    }

    fn this_binary(arguments: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(arguments);
        Self::spawn(command, tempfile::tempdir().expect("a directory"))
    }

    fn spawn(command: Command, home: TempDir) -> Self {
        let log = home.path().join("stderr.log");
        Self::spawn_logged(command, &log, Some(home))
    }

    fn spawn_logged(mut command: Command, log: &Path, home: Option<TempDir>) -> Self {
        // To a file: an unread pipe would block the writer, and a failure must be explained.
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(log).expect("a log"))
            .spawn()
            .expect("start a process");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout"))
            .read_line(&mut line)
            .expect("read stdout");
        let Some((_, address)) = line.trim().split_once("listening on http://") else {
            let stderr = fs::read_to_string(log).unwrap_or_default();
            panic!("{command:?} did not start: {line}{stderr}");
        };
        Self {
            address: address.to_owned(),
            child,
            home,
        }
    }

    /// Its id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// When it began, in the kernel's ticks: another process of the same id began at another time.
    pub fn start_ticks(&self) -> u64 {
        let ticks = self.stat().split_whitespace().nth(19).map(str::parse);
        ticks.and_then(Result::ok).expect("a number")
    }

    /// Memory it holds now.
    pub fn resident_kib(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Most memory that it ever held.
    pub fn peak_kib(&self) -> u64 {
        self.status("VmHWM:")
    }

    /// Processor time that it and its ended children have used, in seconds, to a hundredth.
    pub fn cpu(&self) -> f64 {
        let stat = self.stat();
        let ticks = stat.split_whitespace().skip(11).take(4);
        ticks
            .map(|ticks| ticks.parse::<f64>().expect("a number"))
            .sum::<f64>()
            / 100.0
    }

    /// What the kernel shows of it behind its name.
    fn stat(&self) -> String {
        let stat =
            fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("a Linux machine");
        let (_, after_name) = stat.rsplit_once(')').expect("a name");
        after_name.to_owned()
    }

    fn status(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).expect("a Linux machine");
        let value = status.lines().find_map(|line| line.strip_prefix(field));
        let digits = value.and_then(|value| value.trim().strip_suffix(" kB"));
        digits.and_then(|text| text.parse().ok()).expect("a number")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A listener on a free port; prints its address for the process that started this one.
pub fn listen() -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any).expect("a free port");
    // A crowd connects at once: whom the backlog does not take tries again after a second, and that is not measured here.
    let listener = socket.listen(8192).expect("listen");
    let address = listener.local_addr().expect("an address");
    println!("listening on http://{address}");
    std::io::stdout().flush().expect("write stdout");
    listener
}

/// Files and sockets that this process, and what it starts, may have open.
pub fn open_files() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let soft = line
        .and_then(|line| line.split_whitespace().next())
        .unwrap_or("0");
    soft.parse().unwrap_or(u64::MAX)
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
    fs::write(path, text).expect("write a file");
}
