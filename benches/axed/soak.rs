//! The soak: clients work against the daemon while its store fails in one way after another, and nothing may be lost, doubled or
//! stuck, without a restart. `AXED_SOAK_MINUTES` says how long.

mod api;
mod check;
mod clients;
mod faults;
mod ledger;
mod provider;
mod watch;

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::process::Process;
use crate::soak::api::Api;
use crate::soak::clients::{AGENTS, Client, SHELL};
use crate::soak::faults::{FAULTS, Fault, ROOM, Victim};
use crate::soak::ledger::Ledger;
use crate::soak::provider::Requests;
use crate::soak::watch::{PROMPT, Watch};

/// Clients at work.
const CLIENTS: usize = 250;
/// Work before the first fault.
const WARM_UP: Duration = Duration::from_secs(10);
/// Work after each fault, once the daemon is ready again.
const WORK: Duration = Duration::from_secs(8);
/// How soon `/readyz` must be 200 again after a fault.
const READY: Duration = Duration::from_secs(10);
/// How soon everything accepted must have ended after the last fault.
const SETTLE: Duration = Duration::from_secs(90);

/// Fewer slots than clients: some runs are queued while others, suspended, keep their slots.
const CONFIG: &str = "\
[server]
default_timeout = 600
[runs]
max_running = 60
[tools]
allow_commands = true
allow_unconfined = true
";

/// Runs the soak in a process of its own, in which the data directory is a file system of its own where this machine permits
/// that; whether everything held.
pub fn start() -> bool {
    let home = tempfile::tempdir().expect("a directory");
    let data = home.path().join("data");
    std::fs::create_dir(&data).expect("a directory");
    let status = match in_namespace(&data, Command::new("true")) {
        Ok(status) if status.success() => in_namespace(&data, this_binary(home.path(), "mounted")),
        _ => this_binary(home.path(), "plain").status(),
    };
    status.expect("the soak").success()
}

fn this_binary(home: &Path, data: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--bench", "--role", "soak", "--data", data, "--home"]);
    command.arg(home);
    command
}

/// Runs a command in a mount namespace of its own, where a file system is mounted at `data`.
fn in_namespace(data: &Path, inner: Command) -> std::io::Result<ExitStatus> {
    let mount =
        format!("mount -t tmpfs -o size={ROOM},mode=0700 tmpfs \"$1\" && shift && exec \"$@\"");
    let mut command = Command::new("unshare");
    command
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            &mount,
            "sh",
        ])
        .arg(data)
        .arg(inner.get_program())
        .args(inner.get_args())
        .envs(
            inner
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
    command.status()
}

/// The soak itself, with all files in `home`; whether everything held.
pub async fn work(home: &Path, is_mounted: bool) -> bool {
    let minutes: f64 = variable("AXED_SOAK_MINUTES").map_or(15.0, |text| {
        text.parse().expect("AXED_SOAK_MINUTES: a number")
    });
    raise_open_files();
    let requests = Requests::default();
    let provider = provider::start(requests.clone());
    let agents = AGENTS
        .into_iter()
        .chain([SHELL])
        .map(|(name, rest)| (name, format!("model = \"bench/{name}\"\n{rest}")));
    let agents: Vec<(&str, String)> = agents.collect();
    std::fs::create_dir(home.join("work")).expect("a directory");
    let daemon = Process::axed_at(home, &provider, CONFIG, &agents);
    let soak = Soak {
        ledger: Ledger::default(),
        requests,
        watch: Watch::start(&daemon.address),
        victim: Victim {
            pid: daemon.pid(),
            data: home.join("data"),
            is_mounted,
        },
        begun: daemon.begun(),
        first_kib: 0,
        daemon,
    };
    let held = soak
        .whole(Duration::from_secs_f64(minutes * 60.0), &home.join("work"))
        .await;
    if let Some(kept) = variable("AXED_SOAK_KEEP") {
        // For whoever looks into it: the record and the log.
        let _ = Command::new("cp").arg("-r").arg(home).arg(kept).status();
    }
    held
}

struct Soak {
    daemon: Process,
    victim: Victim,
    watch: Watch,
    ledger: Ledger,
    requests: Requests,
    /// When the daemon began, in the kernel's ticks.
    begun: u64,
    /// Its memory after the warm-up.
    first_kib: u64,
}

/// What was counted when a phase began.
struct Before {
    accepted: usize,
    ended: usize,
    refused: usize,
    repeated: usize,
    at: Instant,
}

impl Soak {
    async fn whole(mut self, time: Duration, work: &Path) -> bool {
        println!(
            "\nsoak: {CLIENTS} clients, {} s, faults in the store",
            time.as_secs()
        );
        if !self.victim.is_mounted {
            println!("  no file system can be mounted here: the full disk is left out");
        }
        println!(
            "  {:<16}{:>5}{:>8}{:>8}{:>7}{:>8}{:>9}{:>8}{:>6}",
            "phase", "s", "runs", "ended", "503", "again", "livez ms", "ready s", "MiB"
        );
        let begin = Instant::now();
        let api = Api::new(&self.daemon.address);
        let stop = CancellationToken::new();
        let clients = TaskTracker::new();
        for number in 0..CLIENTS {
            let api = Api::new(&self.daemon.address);
            let client = Client::new(number, api, self.requests.clone(), self.ledger.clone());
            clients.spawn(client.work(stop.clone()));
        }
        clients.close();
        let before = self.before();
        tokio::time::sleep(WARM_UP).await;
        self.first_kib = self.daemon.resident_kib();
        self.row("warm-up", &before, None);
        for fault in FAULTS.into_iter().cycle() {
            let needs = fault.time() + WORK;
            if begin.elapsed() + needs > time {
                break;
            }
            if fault.is_possible(&self.victim) {
                self.fault(fault).await;
            }
        }
        let before = self.before();
        stop.cancel();
        if tokio::time::timeout(SETTLE, clients.wait()).await.is_err() {
            self.complain_of_open(&api).await;
        }
        self.row("until all ended", &before, None);
        self.finish(&api, work).await
    }

    /// One fault, and the work after it.
    async fn fault(&self, fault: Fault) {
        let before = self.before();
        fault.inject(&self.victim, &self.watch).await;
        let over = Instant::now();
        let seen = self.row(&fault.name(), &before, None);
        let was_unready = seen.ready.iter().any(|(_, status)| *status == 503);
        self.ledger.expect(was_unready || !fault.is_seen(), || {
            format!("/readyz never was 503 during the fault {:?}", fault.name())
        });
        let before = self.before();
        let ready = loop {
            if let Some(at) = self.watch.ready_after(over) {
                break Some(at);
            }
            if over.elapsed() > READY * 3 {
                break None;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let took = ready.map(|at| at - over);
        self.ledger
            .expect(took.is_some_and(|took| took < READY), || {
                format!(
                    "/readyz was 200 {took:?} after the fault {:?}",
                    fault.name()
                )
            });
        tokio::time::sleep(WORK).await;
        let seen = self.row("at work", &before, took);
        let ready = ready.unwrap_or(over);
        let again = seen
            .ready
            .iter()
            .find(|(at, status)| *at > ready && *status != 200);
        self.ledger.expect(again.is_none(), || {
            format!(
                "/readyz was {again:?} again after the fault {:?} was over",
                fault.name()
            )
        });
    }

    fn before(&self) -> Before {
        Before {
            accepted: self.ledger.counted("accepted"),
            ended: self.ledger.counted("ended"),
            refused: self.ledger.counted("refused"),
            repeated: self.requests.repeated(),
            at: Instant::now(),
        }
    }

    /// Prints a phase, and checks what must hold in each.
    fn row(&self, phase: &str, before: &Before, ready: Option<Duration>) -> watch::Seen {
        let seen = self.watch.take();
        let kib = self.daemon.resident_kib();
        let ready = ready.map_or_else(
            || "-".to_owned(),
            |took| format!("{:.1}", took.as_secs_f64()),
        );
        println!(
            "  {phase:<16}{:>5.0}{:>8}{:>8}{:>7}{:>8}{:>9.1}{ready:>8}{:>6}",
            before.at.elapsed().as_secs_f64(),
            self.ledger.counted("accepted") - before.accepted,
            self.ledger.counted("ended") - before.ended,
            self.ledger.counted("refused") - before.refused,
            self.requests.repeated().saturating_sub(before.repeated),
            seen.livez.as_secs_f64() * 1000.0,
            kib / 1024,
        );
        self.ledger.expect(seen.too_late() == 0, || {
            format!(
                "/livez took more than {PROMPT:?} {} times in the phase {phase:?}, {:?} at most; a bare server took {:?}",
                seen.too_late(), seen.livez, seen.bare
            )
        });
        let most = self.first_kib * 3 / 2 + (64 << 10);
        self.ledger.expect(self.first_kib == 0 || kib < most, || {
            format!(
                "{} MiB of memory after the phase {phase:?}, {} after the warm-up",
                kib >> 10,
                self.first_kib >> 10
            )
        });
        self.ledger.expect(self.daemon.begun() == self.begun, || {
            format!("the daemon is another one after the phase {phase:?}")
        });
        seen
    }

    async fn complain_of_open(&self, api: &Api) {
        for (id, what) in self.ledger.open() {
            let run = api.get(&format!("/runs/{id}")).await;
            let status = run.map(|run| run["status"].clone());
            self.ledger.complain(format!(
                "{id} of {what} has not ended after {SETTLE:?}: {status:?}"
            ));
        }
    }

    /// Checks the record as a whole, and prints what was counted and what is wrong.
    async fn finish(self, api: &Api, work: &Path) -> bool {
        let known = match check::record(api, &self.ledger).await {
            Ok(known) => known,
            Err(error) => {
                self.ledger.complain(error);
                0
            }
        };
        let performed = check::performed(work, &self.ledger);
        for gauge in ["axed_runs_running", "axed_runs_queued"] {
            let metrics = crate::load::get(&self.daemon.address, "/metrics").await;
            let value = metrics
                .lines()
                .find_map(|line| line.strip_prefix(gauge)?.strip_prefix(' '));
            self.ledger.expect(value == Some("0"), || {
                format!("{gauge} is {value:?} when nothing is at work")
            });
        }
        let checked = Command::new(env!("CARGO_BIN_EXE_axed"))
            .args(["data", "check", "--data"])
            .arg(&self.victim.data)
            .output()
            .expect("axed data check");
        self.ledger.expect(checked.status.success(), || {
            format!(
                "axed data check: {}",
                String::from_utf8_lossy(&checked.stdout)
            )
        });
        println!();
        for (what, count) in self.ledger.counts() {
            println!("  {what:<52} {count:>8}");
        }
        for (what, count) in [
            ("runs on the record, children too", known),
            ("calls that left a trace, each once", performed),
            ("requests to the provider", self.requests.count() as usize),
            (
                "of these for a turn whose reply was not recorded",
                self.requests.repeated(),
            ),
        ] {
            println!("  {what:<52} {count:>8}");
        }
        let (complaints, count) = self.ledger.complaints();
        if count == 0 {
            println!("\nnothing lost, doubled or stuck, without a restart");
            return true;
        }
        println!("\n{count} things are WRONG:");
        for complaint in complaints {
            println!("  - {complaint}");
        }
        false
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the soak is configured by its environment alone"
)]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Thousands of connections at once: as many files as may be open.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
}
