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
use crate::soak::faults::{DATA_SIZE, FAULTS, Fault, FaultTarget};
use crate::soak::ledger::Ledger;
use crate::soak::provider::Requests;
use crate::soak::watch::{HealthMonitor, LIVEZ_LIMIT};

/// Active clients.
const CLIENTS: usize = 250;
/// Work before the first fault.
const WARM_UP: Duration = Duration::from_secs(10);
/// Work after each fault, once the daemon is ready again.
const WORK_TIME: Duration = Duration::from_secs(8);
/// How soon `/readyz` must be 200 again after a fault.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon everything accepted must have ended after the last fault.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(90);

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
    let mount = format!(
        "mount -t tmpfs -o size={DATA_SIZE},mode=0700 tmpfs \"$1\" && shift && exec \"$@\""
    );
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
pub async fn run(home: &Path, is_mounted: bool) -> bool {
    let minutes: f64 = env_var("AXED_SOAK_MINUTES").map_or(15.0, |text| {
        text.parse().expect("AXED_SOAK_MINUTES: a number")
    });
    raise_open_files();
    let requests = Requests::default();
    let provider = provider::start(requests.clone());
    let agents = AGENTS
        .into_iter()
        .chain([SHELL])
        .map(|(name, toml)| (name, format!("model = \"bench/{name}\"\n{toml}")));
    let agents: Vec<(&str, String)> = agents.collect();
    std::fs::create_dir(home.join("work")).expect("a directory");
    let daemon = Process::axed_at(home, &provider, CONFIG, &agents);
    let soak = Soak {
        ledger: Ledger::default(),
        requests,
        watch: HealthMonitor::start(&daemon.address),
        target: FaultTarget {
            pid: daemon.pid(),
            data: home.join("data"),
            is_mounted,
        },
        start_ticks: daemon.start_ticks(),
        baseline_kib: 0,
        daemon,
    };
    let passed = soak
        .run_phases(Duration::from_secs_f64(minutes * 60.0), &home.join("work"))
        .await;
    if let Some(keep_dir) = env_var("AXED_SOAK_KEEP") {
        // For later inspection: the record and the log.
        let _ = Command::new("cp")
            .arg("-r")
            .arg(home)
            .arg(keep_dir)
            .status();
    }
    passed
}

struct Soak {
    daemon: Process,
    target: FaultTarget,
    watch: HealthMonitor,
    ledger: Ledger,
    requests: Requests,
    /// When the daemon began, in the kernel's ticks.
    start_ticks: u64,
    /// Its memory after the warm-up.
    baseline_kib: u64,
}

/// What was counted when a phase began.
struct PhaseStart {
    accepted: usize,
    ended: usize,
    refused: usize,
    repeated: usize,
    started: Instant,
}

impl Soak {
    async fn run_phases(mut self, duration: Duration, work: &Path) -> bool {
        println!(
            "\nsoak: {CLIENTS} clients, {} s, faults in the store",
            duration.as_secs()
        );
        if !self.target.is_mounted {
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
            clients.spawn(client.run(stop.clone()));
        }
        clients.close();
        let phase_start = self.phase_start();
        tokio::time::sleep(WARM_UP).await;
        self.baseline_kib = self.daemon.resident_kib();
        self.print_phase("warm-up", &phase_start, None);
        for fault in FAULTS.into_iter().cycle() {
            let needed = fault.time() + WORK_TIME;
            if begin.elapsed() + needed > duration {
                break;
            }
            if fault.is_possible(&self.target) {
                self.inject_fault(fault).await;
            }
        }
        let phase_start = self.phase_start();
        stop.cancel();
        if tokio::time::timeout(SETTLE_TIMEOUT, clients.wait())
            .await
            .is_err()
        {
            self.report_unfinished(&api).await;
        }
        self.print_phase("until all ended", &phase_start, None);
        self.finish(&api, work).await
    }

    /// One fault, and the work after it.
    async fn inject_fault(&self, fault: Fault) {
        let phase_start = self.phase_start();
        fault.inject(&self.target, &self.watch).await;
        let fault_ended = Instant::now();
        let observed = self.print_phase(&fault.name(), &phase_start, None);
        let was_unready = observed.readyz.iter().any(|(_, status)| *status == 503);
        self.ledger.expect(was_unready || !fault.is_reported(), || {
            format!("/readyz never was 503 during the fault {:?}", fault.name())
        });
        let phase_start = self.phase_start();
        let ready = loop {
            if let Some(at) = self.watch.ready_after(fault_ended) {
                break Some(at);
            }
            if fault_ended.elapsed() > READY_TIMEOUT * 3 {
                break None;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let took = ready.map(|at| at - fault_ended);
        self.ledger
            .expect(took.is_some_and(|took| took < READY_TIMEOUT), || {
                format!(
                    "/readyz was 200 {took:?} after the fault {:?}",
                    fault.name()
                )
            });
        tokio::time::sleep(WORK_TIME).await;
        let observed = self.print_phase("at work", &phase_start, took);
        let ready = ready.unwrap_or(fault_ended);
        let relapse = observed
            .readyz
            .iter()
            .find(|(at, status)| *at > ready && *status != 200);
        self.ledger.expect(relapse.is_none(), || {
            format!(
                "/readyz was {relapse:?} again after the fault {:?} was over",
                fault.name()
            )
        });
    }

    fn phase_start(&self) -> PhaseStart {
        PhaseStart {
            accepted: self.ledger.count_of("accepted"),
            ended: self.ledger.count_of("ended"),
            refused: self.ledger.count_of("refused"),
            repeated: self.requests.repeated(),
            started: Instant::now(),
        }
    }

    /// Prints a phase, and checks what must hold in each.
    fn print_phase(
        &self,
        phase: &str,
        phase_start: &PhaseStart,
        ready: Option<Duration>,
    ) -> watch::Observations {
        let observed = self.watch.take();
        let kib = self.daemon.resident_kib();
        let ready = ready.map_or_else(
            || "-".to_owned(),
            |took| format!("{:.1}", took.as_secs_f64()),
        );
        println!(
            "  {phase:<16}{:>5.0}{:>8}{:>8}{:>7}{:>8}{:>9.1}{ready:>8}{:>6}",
            phase_start.started.elapsed().as_secs_f64(),
            self.ledger.count_of("accepted") - phase_start.accepted,
            self.ledger.count_of("ended") - phase_start.ended,
            self.ledger.count_of("refused") - phase_start.refused,
            self.requests
                .repeated()
                .saturating_sub(phase_start.repeated),
            observed.max_livez.as_secs_f64() * 1000.0,
            kib / 1024,
        );
        self.ledger.expect(observed.late_count() == 0, || {
            format!(
                "/livez took more than {LIVEZ_LIMIT:?} {} times in the phase {phase:?}, {:?} at most; a bare server took {:?}",
                observed.late_count(), observed.max_livez, observed.max_bare
            )
        });
        let max_kib = self.baseline_kib * 3 / 2 + (64 << 10);
        self.ledger
            .expect(self.baseline_kib == 0 || kib < max_kib, || {
                format!(
                    "{} MiB of memory after the phase {phase:?}, {} after the warm-up",
                    kib >> 10,
                    self.baseline_kib >> 10
                )
            });
        self.ledger
            .expect(self.daemon.start_ticks() == self.start_ticks, || {
                format!("the daemon is another one after the phase {phase:?}")
            });
        observed
    }

    async fn report_unfinished(&self, api: &Api) {
        for (id, what) in self.ledger.unfinished() {
            let run = api.get(&format!("/runs/{id}")).await;
            let status = run.map(|run| run["status"].clone());
            self.ledger.report_problem(format!(
                "{id} of {what} has not ended after {SETTLE_TIMEOUT:?}: {status:?}"
            ));
        }
    }

    /// Checks the record as a whole, and prints what was counted and what is wrong.
    async fn finish(self, api: &Api, work: &Path) -> bool {
        let run_count = match check::check_record(api, &self.ledger).await {
            Ok(run_count) => run_count,
            Err(error) => {
                self.ledger.report_problem(error);
                0
            }
        };
        let side_effects = check::check_side_effects(work, &self.ledger);
        for gauge in ["axed_runs_running", "axed_runs_queued"] {
            let metrics = crate::load::get(&self.daemon.address, "/metrics").await;
            let value = metrics
                .lines()
                .find_map(|line| line.strip_prefix(gauge)?.strip_prefix(' '));
            self.ledger.expect(value == Some("0"), || {
                format!("{gauge} is {value:?} when nothing is at work")
            });
        }
        let output = Command::new(env!("CARGO_BIN_EXE_axed"))
            .args(["data", "check", "--data"])
            .arg(&self.target.data)
            .output()
            .expect("axed data check");
        self.ledger.expect(output.status.success(), || {
            format!(
                "axed data check: {}",
                String::from_utf8_lossy(&output.stdout)
            )
        });
        println!();
        for (what, count) in self.ledger.counts() {
            println!("  {what:<52} {count:>8}");
        }
        for (what, count) in [
            ("runs on the record, children too", run_count),
            ("calls that left a trace, each once", side_effects),
            ("requests to the provider", self.requests.count() as usize),
            (
                "of these for a turn whose reply was not recorded",
                self.requests.repeated(),
            ),
        ] {
            println!("  {what:<52} {count:>8}");
        }
        let (problems, count) = self.ledger.problems();
        if count == 0 {
            println!("\nnothing lost, doubled or stuck, without a restart");
            return true;
        }
        println!("\n{count} things are WRONG:");
        for problem in problems {
            println!("  - {problem}");
        }
        false
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the soak is configured by its environment alone"
)]
fn env_var(name: &str) -> Option<String> {
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
