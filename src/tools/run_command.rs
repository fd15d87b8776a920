//! `run_command`: lets a shell perform a command in the workdir, hears its output as far as there is room for it, and
//! lets go of the supervisor, which ends everything, when the time is up or nobody waits any more.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
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
use tokio::time::timeout;

use crate::config;
use crate::domain::message::{ToolCall, ToolSpec, beginning};
use crate::domain::schema::Schema;
use crate::fair::turns::Turns;
use crate::tools::run_command::supervise::Mode;
use crate::tools::{Context, Effect, Output, Tool};
use crate::workdirs::reserved::{Refused, Reserved};

#[cfg(target_os = "linux")]
mod confine;
mod descendants;
#[cfg(target_os = "linux")]
mod filter;
pub mod supervise;

/// What models call it by.
pub const NAME: &str = "run_command";

const ABOUT: &str = "Run a command in the working directory by /bin/sh -c and return what it prints, its standard error \
                     among it. It gets no input. Nothing that it starts lives on when it ends, so start no service in \
                     the background. Files last only in the working directory; $HOME and $TMPDIR are a folder that \
                     goes when the command ends.";

/// Commands at work at once, those of all runs. More wait for their turn, by key; their time begins when they begin.
const MOST_AT_ONCE: usize = 64;
/// Bytes of a result that are kept free for a notice.
const NOTICE: usize = 512;
/// Most bytes of a report.
const MOST_REPORT: u64 = 4096;
/// How long the end of all processes may take once it is asked for. Only one that the kernel itself holds takes longer.
const GRACE: Duration = Duration::from_secs(5);

/// The arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Arguments {
    /// The command, as a shell reads it, such as "cargo test 2>&1 | tail -n 50".
    #[schemars(length(min = 1, max = 100_000))]
    command: String,
    /// Seconds that it may take; then it is ended with everything that it started.
    #[serde(default = "usual_timeout")]
    #[schemars(range(min = 1, max = 86_400))]
    timeout: u64,
}

fn usual_timeout() -> u64 {
    60
}

/// The tool, where the configuration allows it and this system can confine it, or need not. No confined command reaches
/// what is reserved.
///
/// # Errors
/// Why no agent is offered it although the configuration allows it.
pub fn offer(
    config: &config::Tools,
    reserved: &Reserved,
    keys: &[String],
) -> Result<Option<RunCommand>, String> {
    let Some(commands) = &config.commands else {
        return Ok(None);
    };
    let mode = match (is_confinable(), commands.allow_unconfined) {
        (true, _) if commands.network => Mode::Networked,
        (true, _) => Mode::Confined,
        (false, true) => {
            tracing::warn!(
                "This system has no Landlock (Linux 6.2): commands of models run unconfined, with the rights of this \
                 daemon, because tools.allow_unconfined says so"
            );
            Mode::Unconfined
        }
        (false, false) => {
            return Err(
                "run_command is not offered: this system has no Landlock (Linux 6.2), which confines commands; \
                 tools.allow_unconfined = true offers it without"
                    .to_owned(),
            );
        }
    };
    if mode != Mode::Unconfined {
        check_system(reserved).map_err(|why| format!("run_command is not offered: {why}"))?;
    }
    Ok(Some(RunCommand {
        schema: Schema::of::<Arguments>()?,
        mode,
        environment: commands.environment.clone(),
        reserved: reserved.paths(),
        max_result: config.max_result,
        turns: Turns::new(MOST_AT_ONCE, keys),
    }))
}

/// Whether what is reserved can be left out of what every command reads of the system.
#[cfg(target_os = "linux")]
fn check_system(reserved: &Reserved) -> Result<(), String> {
    confine::readable(&reserved.now()).map(drop)
}

#[cfg(not(target_os = "linux"))]
fn check_system(_: &Reserved) -> Result<(), String> {
    Ok(())
}

#[cfg(target_os = "linux")]
fn is_confinable() -> bool {
    confine::is_available()
}

#[cfg(not(target_os = "linux"))]
fn is_confinable() -> bool {
    false
}

/// The tool.
pub struct RunCommand {
    schema: Schema,
    mode: Mode,
    environment: BTreeMap<String, SecretString>,
    /// The daemon's own files and directories.
    reserved: Vec<PathBuf>,
    max_result: usize,
    turns: Turns,
}

impl Tool for RunCommand {
    fn spec(&self) -> ToolSpec {
        ToolSpec::new(NAME, ABOUT, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        Effect::Changes
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn uses_workdir(&self) -> bool {
        true
    }

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        context: Context<'a>,
    ) -> BoxFuture<'a, Result<Output, String>> {
        Box::pin(async move {
            let asked: Arguments = call.read()?;
            let workdir = context.workdir()?;
            // A command reads and writes everything in its workdir, so nothing of the daemon's may be there.
            let is_confined = self.confines();
            let opened = tokio::task::spawn_blocking(move || match is_confined {
                true => workdir.for_command(),
                false => workdir.for_any_command(),
            });
            let opened = opened.await.map_err(|error| error.to_string())?;
            let workdir = opened.map_err(|error| match Refused::of(&error) {
                Some(_) => "commands cannot be run here: the workdir contains the server's own files, or lies among them \
                            (configuration, agents, scripts or data). The agent needs a workdir of its own"
                    .to_owned(),
                None => format!("the workdir cannot be looked at: {error}"),
            })?;
            let _turn = self.turns.take(context.key).await;
            let running = self.start(workdir, &asked.command)?;
            let result = running
                .result(Duration::from_secs(asked.timeout), self.room())
                .await;
            result.map(Output::from)
        })
    }
}

impl RunCommand {
    /// Whether its commands are kept out of what is the daemon's own.
    pub fn confines(&self) -> bool {
        self.mode != Mode::Unconfined
    }

    fn room(&self) -> usize {
        self.max_result.saturating_sub(NOTICE)
    }

    fn start(&self, workdir: Dir, command: &str) -> Result<Running, String> {
        let failed = |error: std::io::Error| format!("the command cannot be started: {error}");
        if command.contains('\0') {
            return Err("the command has a NUL in it, which no shell takes".to_owned());
        }
        let workdir = OwnedFd::from(workdir);
        let secrets = self.environment.iter();
        let environment = secrets.map(|(name, value)| (name, value.expose_secret()));
        // Not killed when it is dropped: its report's pipe ends then, and so it ends all others before itself.
        let mut child = Command::new(supervise::own_binary().map_err(failed)?)
            .arg0("axed")
            .args([supervise::SUPERVISE, self.mode.as_str(), command])
            .args(&self.reserved)
            .env_clear()
            .envs(environment)
            .stdin(Stdio::from(workdir))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        match (child.stdout.take(), child.stderr.take()) {
            (Some(output), Some(report)) => Ok(Running {
                child,
                output,
                report,
            }),
            _ => Err("the command was started without pipes".to_owned()),
        }
    }
}

/// A command at work. Dropped, it ends with everything that it started.
struct Running {
    child: Child,
    output: ChildStdout,
    report: ChildStderr,
}

impl Running {
    async fn result(mut self, most: Duration, room: usize) -> Result<String, String> {
        let mut heard = Heard::default();
        let (mut report, mut told) = (self.report.take(MOST_REPORT), String::new());
        let ended = timeout(most, async {
            heard.hear(&mut self.output, room).await;
            let _ = report.read_to_string(&mut told).await;
        });
        if ended.await.is_err() {
            // The sign for the supervisor.
            drop(report);
            let is_gone = timeout(GRACE, heard.hear(&mut self.output, room))
                .await
                .is_ok();
            let after = match is_gone {
                true => "It was ended with everything that it had started.",
                false => "Something that it started cannot be ended yet.",
            };
            let seconds = most.as_secs();
            let why = format!("timed out after {seconds} s. {after}");
            return Err(heard.told(&why, room));
        }
        let _ = self.child.wait().await;
        match told.split_once(' ') {
            Some(("exit", "0")) => Ok(heard.told("", room)),
            Some(("exit", code)) => Err(heard.told(&format!("exit code {code}"), room)),
            Some(("signal", signal)) => Err(heard.told(&format!("ended by signal {signal}"), room)),
            Some(("failed", why)) => Err(format!("the command cannot be run: {why}")),
            _ => Err(heard.told("the command's supervisor was killed", room)),
        }
    }
}

/// What a command has printed, so far as there is room for it.
#[derive(Default)]
struct Heard {
    start: Vec<u8>,
    dropped: u64,
}

impl Heard {
    /// Reads to the end; what there is no room for is read, too, so that the command goes on.
    async fn hear(&mut self, output: &mut (impl AsyncRead + Unpin), room: usize) {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(read @ 1..) = output.read(&mut buffer).await {
            let kept = read.min(room.saturating_sub(self.start.len()));
            self.start.extend_from_slice(&buffer[..kept]);
            self.dropped = self.dropped.saturating_add((read - kept) as u64);
        }
    }

    /// How it ended, and what it printed.
    fn told(&self, how: &str, room: usize) -> String {
        // Bytes that are no text become longer as text.
        let shown = String::from_utf8_lossy(&self.start);
        let kept = beginning(&shown, room);
        let mut text = how.to_owned();
        if !how.is_empty() && !kept.is_empty() {
            text.push('\n');
        }
        text.push_str(kept);
        if self.dropped > 0 || kept.len() < shown.len() {
            text.push_str(&format!(
                "\n... (the output was longer, {} bytes in all, and was cut; let the command print less, as with tail or \
                 grep, or write to a file)",
                self.dropped.saturating_add(self.start.len() as u64)
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Heard;

    #[tokio::test]
    async fn what_there_is_no_room_for_is_read_and_dropped() {
        let mut heard = Heard::default();
        heard.hear(&mut "häuser".as_bytes(), 2).await;
        let told = heard.told("exit code 1", 100);
        assert!(
            told.starts_with("exit code 1\nh\u{fffd}\n... (the output was longer, 7 bytes in all"),
            "{told}"
        );
    }

    #[test]
    fn bytes_that_are_no_text_do_not_make_it_longer_than_its_bound() {
        let heard = Heard {
            start: vec![0xff; 100],
            dropped: 0,
        };
        let told = heard.told("", 100);
        assert!(told.starts_with(&"\u{fffd}".repeat(33)));
        assert!(told.contains("100 bytes in all"), "{told}");
        assert_eq!(Heard::default().told("", 100), "");
    }
}
