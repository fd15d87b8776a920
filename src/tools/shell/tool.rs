//! `run_command`: runs a shell command in the workdir under a supervisor. Output is bounded. A timeout or a dropped
//! call closes the supervisor's pipe, which ends the whole process tree.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use cap_std::fs::Dir;
use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config;
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec, truncate_to_bytes};
use crate::fair::fair_semaphore::{FairSemaphore, Permit};
use crate::tools::shell::limits::{Confinement, Isolation, Limits, Mode};
#[cfg(target_os = "linux")]
use crate::tools::shell::sandbox;
use crate::tools::shell::supervisor;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};
use crate::workdirs::reserved::{ReservedError, ReservedPaths};

pub const NAME: &str = "run_command";

const DESCRIPTION: &str = "Run a command in the working directory by /bin/sh -c and return what it prints, its standard error \
                     among it. It gets no input. Nothing that it starts lives on when it ends, so start no service in \
                     the background. Files last only in the working directory; $HOME and $TMPDIR are a folder that \
                     goes when the command ends.";

/// Commands of all runs at once. More wait in a fair queue by key; a command's timeout begins when it starts.
const MAX_CONCURRENT_COMMANDS: usize = 64;
/// Bytes of a result that are kept free for a notice.
const NOTICE_BYTES: usize = 512;
/// The kernel takes 131,071 bytes in one argument.
const MAX_COMMAND_BYTES: usize = 120_000;
const MAX_REPORT_BYTES: u64 = 4096;
/// The variable with the key of the call, for commands that call services.
const CALL_KEY: &str = "AXED_CALL_KEY";
/// The pause after each read of output that is dropped, so that a command that prints without end takes little of the
/// daemon's time.
const DROPPED_OUTPUT_PAUSE: Duration = Duration::from_millis(1);
/// How long a call waits until all of its processes are killed. Only one that hangs in the kernel takes longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Arguments {
    /// The command, as a shell reads it, such as "cargo test 2>&1 | tail -n 50". At most 120000 bytes.
    #[schemars(length(min = 1, max = 100_000))]
    command: String,
    /// Seconds that it may take; then it is ended with everything that it started.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 86_400))]
    timeout: u64,
}

fn default_timeout() -> u64 {
    60
}

/// Why no agent is offered the tool although the configuration allows it.
#[derive(Debug, thiserror::Error)]
pub enum DisabledReason {
    #[error(
        "run_command is not offered: this system has no Landlock (Linux 6.2), which confines commands; \
         tools.allow_unconfined = true offers it without"
    )]
    NoLandlock,
    #[error(
        "run_command is not offered: this system cannot end all processes of a command at once, so some could outlive \
         their call; it needs user namespaces, Linux 6.12, or a control group that is delegated to this daemon \
         (docs/tools/commands.md); tools.allow_unconfined = true offers it without"
    )]
    NoIsolation,
    #[cfg(target_os = "linux")]
    #[error("run_command is not offered: {0}")]
    Sandbox(#[from] sandbox::SandboxError),
    #[error("run_command is not offered: the schema of its arguments is invalid: {0}")]
    Schema(String),
}

/// Builds the tool if the configuration allows it. Sandboxed commands cannot reach the reserved paths.
///
/// # Errors
/// The configuration allows it, but this system cannot sandbox commands.
pub fn from_config(
    config: &config::Tools,
    reserved: &ReservedPaths,
    keys: &[String],
) -> Result<Option<RunCommand>, DisabledReason> {
    let Some(commands) = &config.commands else {
        return Ok(None);
    };
    let mode = match (is_confinable(), commands.allow_unconfined) {
        (true, _) if commands.network => Mode::SandboxedWithNetwork,
        (true, _) => Mode::Sandboxed,
        (false, true) => {
            tracing::warn!(
                "This system has no Landlock (Linux 6.2): commands of models run unconfined, with the rights of this \
                 daemon, because tools.allow_unconfined says so"
            );
            Mode::Unconfined
        }
        (false, false) => {
            return Err(DisabledReason::NoLandlock);
        }
    };
    if mode != Mode::Unconfined {
        check_system(reserved)?;
    }
    let limits = Limits {
        processes: commands.max_processes,
        memory: commands.max_memory as u64,
    };
    let isolation = probe_isolation(Confinement {
        mode,
        limits,
        isolation: None,
    });
    match (isolation, commands.allow_unconfined) {
        (Some(isolation), _) => {
            tracing::debug!(
                "Processes of commands are isolated by {}",
                isolation.as_str()
            );
        }
        (None, true) => tracing::warn!(
            "This system cannot end all processes of a command at once (docs/tools/commands.md): commands of models may \
             leave processes behind, because tools.allow_unconfined says so"
        ),
        (None, false) => return Err(DisabledReason::NoIsolation),
    }
    Ok(Some(RunCommand {
        schema: Schema::for_type::<Arguments>().map_err(DisabledReason::Schema)?,
        confinement: Confinement {
            mode,
            limits,
            isolation: Some(isolation.unwrap_or(Isolation::None)),
        },
        environment: commands.environment.clone(),
        reserved: reserved.paths(),
        max_result: config.max_result,
        permits: FairSemaphore::new(MAX_CONCURRENT_COMMANDS, keys),
        running: TaskTracker::new(),
    }))
}

/// How this system isolates the processes of a command: what a supervisor says that is started for no command.
fn probe_isolation(confinement: Confinement) -> Option<Isolation> {
    let output = std::process::Command::new(supervisor::current_binary().ok()?)
        .arg0("axed")
        .args([supervisor::SUPERVISE_SUBCOMMAND, &confinement.to_string()])
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    Isolation::parse(str::from_utf8(&output.stdout).ok()?)
}

/// Whether reserved paths can be left out of what every command may read.
#[cfg(target_os = "linux")]
fn check_system(reserved: &ReservedPaths) -> Result<(), DisabledReason> {
    sandbox::readable_paths(&reserved.snapshot())?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn check_system(_: &ReservedPaths) -> Result<(), DisabledReason> {
    Ok(())
}

#[cfg(target_os = "linux")]
fn is_confinable() -> bool {
    sandbox::is_available()
}

#[cfg(not(target_os = "linux"))]
fn is_confinable() -> bool {
    false
}

pub struct RunCommand {
    schema: Schema,
    confinement: Confinement,
    environment: BTreeMap<String, SecretString>,
    /// The daemon's own files and directories.
    reserved: Vec<PathBuf>,
    max_result: usize,
    permits: FairSemaphore,
    /// Commands, each until all of its processes are gone. Their supervisors see to that if the daemon ends first.
    running: TaskTracker,
}

impl Tool for RunCommand {
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(NAME, DESCRIPTION, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        Effect::Mutating
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn uses_workdir(&self) -> bool {
        true
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: Arguments = call.parse_arguments()?;
            let workdir = context.workdir()?;
            // A command reads and writes everything in its workdir, so the workdir must not contain the daemon's own
            // files.
            let is_sandboxed = self.is_sandboxed();
            let opened = tokio::task::spawn_blocking(move || match is_sandboxed {
                true => workdir.command_dir(),
                false => workdir.unconfined_command_dir(),
            });
            let opened = opened.await.map_err(|error| error.to_string())?;
            let workdir = opened.map_err(|error| match ReservedError::from_io_error(&error) {
                Some(_) => "commands cannot be run here: the workdir contains the server's own files, or lies among them \
                            (configuration, agents, datasets, scripts or data). The agent needs a workdir of its own"
                    .to_owned(),
                None => format!("the workdir cannot be read: {error}"),
            })?;
            let permit = context.acquire(&self.permits).await;
            let running = self.spawn(workdir, &arguments.command, &context.call_key(call))?;
            let cancelled = CancellationToken::new();
            let _cancel_on_drop = cancelled.clone().drop_guard();
            let (sender, result) = oneshot::channel();
            let time_limit = Duration::from_secs(arguments.timeout);
            let max_bytes = self.max_output_bytes();
            self.running.spawn(async move {
                running
                    .wait(time_limit, max_bytes, &cancelled, sender, permit)
                    .await;
            });
            let result = result.await;
            result
                .unwrap_or_else(|_| Err("the daemon is ending".to_owned()))
                .map(ToolOutput::from)
        })
    }
}

impl RunCommand {
    /// Whether commands are kept away from the daemon's own files.
    pub fn is_sandboxed(&self) -> bool {
        self.confinement.mode != Mode::Unconfined
    }

    fn max_output_bytes(&self) -> usize {
        self.max_result.saturating_sub(NOTICE_BYTES)
    }

    fn spawn(&self, workdir: Dir, command: &str, key: &str) -> Result<RunningCommand, String> {
        let failed = |error: std::io::Error| format!("the command cannot be started: {error}");
        if command.contains('\0') {
            return Err("the command contains a NUL character, which no shell accepts".to_owned());
        }
        if command.len() > MAX_COMMAND_BYTES {
            return Err(format!(
                "the command has {} bytes, and at most {MAX_COMMAND_BYTES} are possible; write long texts to a file first, \
                 as with write_file",
                command.len()
            ));
        }
        let workdir = OwnedFd::from(workdir);
        let secrets = self.environment.iter();
        let environment = secrets.map(|(name, value)| (name, value.expose_secret()));
        // The child is not killed on drop. Its report pipe closes instead, and then it kills all other processes before
        // it exits.
        let mut child = Command::new(supervisor::current_binary().map_err(failed)?)
            .arg0("axed")
            .args([
                supervisor::SUPERVISE_SUBCOMMAND,
                &self.confinement.to_string(),
                command,
            ])
            .args(&self.reserved)
            .env_clear()
            .envs(environment)
            .env(CALL_KEY, key)
            .stdin(Stdio::from(workdir))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        match (child.stdout.take(), child.stderr.take()) {
            (Some(output), Some(report)) => Ok(RunningCommand {
                child,
                output,
                report,
            }),
            _ => Err("the command was started without pipes".to_owned()),
        }
    }
}

/// A running command. When dropped, it ends with everything that it started.
struct RunningCommand {
    child: Child,
    output: ChildStdout,
    report: ChildStderr,
}

impl RunningCommand {
    /// Sends the result, and holds the permit until all processes are gone.
    async fn wait(
        self,
        time_limit: Duration,
        max_bytes: usize,
        cancelled: &CancellationToken,
        result: oneshot::Sender<Result<String, String>>,
        _permit: Permit,
    ) {
        let Self {
            mut child,
            mut output,
            report,
        } = self;
        let mut captured = CapturedOutput::default();
        let (mut report, mut report_text) = (report.take(MAX_REPORT_BYTES), String::new());
        let finished = timeout(time_limit, async {
            captured.read_to_end(&mut output, max_bytes).await;
            let _ = report.read_to_string(&mut report_text).await;
        });
        let finished = cancelled.run_until_cancelled(finished).await;
        // The supervisor exits when no process is left. Closing the pipe tells it to kill them.
        drop(report);
        if matches!(finished, Some(Ok(()))) {
            let _ = child.wait().await;
            let _ = result.send(read_report(&report_text, &captured, max_bytes));
            return;
        }
        let mut ended = Box::pin(async {
            captured.read_to_end(&mut output, max_bytes).await;
            let _ = child.wait().await;
        });
        let has_ended = timeout(KILL_TIMEOUT, &mut ended).await.is_ok();
        let outcome = match has_ended {
            true => "It was ended with everything that it had started.",
            false => "Something that it started cannot be ended yet.",
        };
        let failure = format!("timed out after {} s. {outcome}", time_limit.as_secs());
        drop(ended);
        let _ = result.send(Err(captured.render(&failure, max_bytes)));
        let _ = child.wait().await;
    }
}

/// The result of a command that ended by itself.
fn read_report(
    report: &str,
    captured: &CapturedOutput,
    max_bytes: usize,
) -> Result<String, String> {
    let failed = |outcome: &str| Err(captured.render(outcome, max_bytes));
    match report.split_once(' ') {
        Some(("exit", "0")) => Ok(captured.render("", max_bytes)),
        Some(("exit", code)) => failed(&format!("exit code {code}")),
        Some(("signal", signal)) => failed(&format!("ended by signal {signal}")),
        Some(("ended", why)) => {
            failed(&format!("ended with everything that it had started: {why}"))
        }
        Some(("failed", why)) => Err(format!("the command cannot be run: {why}")),
        _ => failed("the command's supervisor was killed"),
    }
}

/// The bounded output of a command.
#[derive(Default)]
struct CapturedOutput {
    head: Vec<u8>,
    dropped_bytes: u64,
}

impl CapturedOutput {
    /// Reads to the end. Output over the limit is read and dropped, so the command does not block.
    async fn read_to_end(&mut self, output: &mut (impl AsyncRead + Unpin), max_bytes: usize) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = output.read(&mut buffer).await {
            let kept_len = read.min(max_bytes.saturating_sub(self.head.len()));
            self.head.extend_from_slice(&buffer[..kept_len]);
            self.dropped_bytes = self.dropped_bytes.saturating_add((read - kept_len) as u64);
            if kept_len < read {
                tokio::time::sleep(DROPPED_OUTPUT_PAUSE).await;
            }
        }
    }

    /// The outcome, followed by the output.
    fn render(&self, outcome: &str, max_bytes: usize) -> String {
        // Invalid bytes become longer when they are decoded.
        let decoded = String::from_utf8_lossy(&self.head);
        let bounded = truncate_to_bytes(&decoded, max_bytes);
        let mut text = outcome.to_owned();
        if !outcome.is_empty() && !bounded.is_empty() {
            text.push('\n');
        }
        text.push_str(bounded);
        if self.dropped_bytes > 0 || bounded.len() < decoded.len() {
            text.push_str(&format!(
                "\n... (the output was longer, {} bytes in all, and was cut; let the command print less, as with tail or \
                 grep, or write to a file)",
                self.dropped_bytes.saturating_add(self.head.len() as u64)
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::time::Duration;

    use tokio::process::Command;
    use tokio::sync::oneshot;
    use tokio_util::sync::CancellationToken;

    use super::{CapturedOutput, RunningCommand};
    use crate::fair::fair_semaphore::FairSemaphore;

    #[tokio::test]
    async fn a_cancelled_call_holds_its_permit_until_its_supervisor_has_ended() {
        let directory = tempfile::tempdir().expect("a directory");
        let ended = directory.path().join("ended");
        let mut child = Command::new("/bin/sh")
            .args(["-c", "read line; echo > \"$0\""])
            .arg(&ended)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell");
        let input = child.stdin.take();
        let running = RunningCommand {
            output: child.stdout.take().expect("a pipe"),
            report: child.stderr.take().expect("a pipe"),
            child,
        };
        let semaphore = FairSemaphore::new(1, &[]);
        let permit = semaphore.acquire(None).await;
        let cancelled = CancellationToken::new();
        cancelled.cancel();
        let (sender, _result) = oneshot::channel();
        let wait = running.wait(Duration::from_secs(60), 100, &cancelled, sender, permit);
        let end_supervisor = async {
            for _ in 0..100 {
                tokio::task::yield_now().await;
                assert_eq!(semaphore.available_permits(), 0);
            }
            drop(input);
        };
        let next_call = async {
            let _permit = semaphore.acquire(None).await;
            assert!(ended.exists());
        };
        tokio::join!(wait, end_supervisor, next_call);
    }

    #[tokio::test]
    async fn output_over_the_limit_is_read_and_dropped() {
        let mut captured = CapturedOutput::default();
        captured.read_to_end(&mut "häuser".as_bytes(), 2).await;
        let rendered = captured.render("exit code 1", 100);
        assert!(
            rendered
                .starts_with("exit code 1\nh\u{fffd}\n... (the output was longer, 7 bytes in all"),
            "{rendered}"
        );
    }

    #[test]
    fn invalid_bytes_do_not_exceed_the_limit_when_decoded() {
        let captured = CapturedOutput {
            head: vec![0xff; 100],
            dropped_bytes: 0,
        };
        let rendered = captured.render("", 100);
        assert!(rendered.starts_with(&"\u{fffd}".repeat(33)));
        assert!(rendered.contains("100 bytes in all"), "{rendered}");
        assert_eq!(CapturedOutput::default().render("", 100), "");
    }
}
