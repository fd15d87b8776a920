//! `run_command`: lets a shell perform a command in the workdir, hears its output as far as there is room for it, and
//! lets go of the supervisor, which ends everything, when the time is up or nobody waits any more.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use cap_std::fs::{Dir, MetadataExt};
use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::config;
use crate::domain::message::{ToolCall, ToolSpec, beginning};
use crate::domain::schema::Schema;
use crate::tools::run_command::supervise::Mode;
use crate::tools::{Context, Effect, Tool};

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

/// Commands at work at once, those of all runs. More wait for their turn; their time begins when they begin.
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

/// The tool, where the configuration allows it and this system can confine it, or need not.
pub fn offer(config: &config::Tools) -> Option<(&'static str, Arc<dyn Tool>)> {
    let commands = config.commands.as_ref()?;
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
            tracing::warn!(
                "run_command is not offered: this system has no Landlock (Linux 6.2), which confines commands; \
                 tools.allow_unconfined = true offers it without"
            );
            return None;
        }
    };
    let tool = RunCommand {
        schema: Schema::of::<Arguments>().ok()?,
        mode,
        environment: commands.environment.clone(),
        kept_out: commands.kept_out.clone(),
        max_result: config.max_result,
        turns: Semaphore::new(MOST_AT_ONCE),
    };
    Some((NAME, Arc::new(tool)))
}

#[cfg(target_os = "linux")]
fn is_confinable() -> bool {
    confine::is_available()
}

#[cfg(not(target_os = "linux"))]
fn is_confinable() -> bool {
    false
}

struct RunCommand {
    schema: Schema,
    mode: Mode,
    environment: BTreeMap<String, SecretString>,
    kept_out: Vec<PathBuf>,
    max_result: usize,
    turns: Semaphore,
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

    fn perform<'a>(
        &'a self,
        call: &'a ToolCall,
        context: Context<'a>,
    ) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move {
            let asked: Arguments = call.read()?;
            let workdir = context.workdir.dir()?;
            if self.mode != Mode::Unconfined {
                self.check(&workdir)?;
            }
            let _turn = self
                .turns
                .acquire()
                .await
                .map_err(|error| error.to_string())?;
            let running = self.start(&workdir, &asked.command)?;
            running
                .result(Duration::from_secs(asked.timeout), self.room())
                .await
        })
    }
}

impl RunCommand {
    fn room(&self) -> usize {
        self.max_result.saturating_sub(NOTICE)
    }

    /// A command reads and writes everything in its workdir, so nothing of the daemon's may be there.
    fn check(&self, workdir: &Dir) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("the workdir cannot be looked at: {error}");
        let meta = workdir.dir_metadata().map_err(failed)?;
        let own = (meta.dev(), meta.ino());
        // What does not exist holds no secret.
        let kept_out = self
            .kept_out
            .iter()
            .filter_map(|path| path.canonicalize().ok());
        for path in kept_out {
            let is_within = path.ancestors().any(|above| {
                let meta = std::fs::metadata(above);
                meta.is_ok_and(|meta| (meta.dev(), meta.ino()) == own)
            });
            if is_within {
                return Err(format!(
                    "commands cannot be run here: the workdir contains the server's own {}. The agent needs a workdir \
                     of its own",
                    path.file_name().unwrap_or_default().display()
                ));
            }
        }
        Ok(())
    }

    fn start(&self, workdir: &Dir, command: &str) -> Result<Running, String> {
        let failed = |error: std::io::Error| format!("the command cannot be started: {error}");
        if command.contains('\0') {
            return Err("the command has a NUL in it, which no shell takes".to_owned());
        }
        let workdir = OwnedFd::from(workdir.try_clone().map_err(failed)?);
        let secrets = self.environment.iter();
        let environment = secrets.map(|(name, value)| (name, value.expose_secret()));
        // Not killed when it is dropped: its report's pipe ends then, and so it ends all others before itself.
        let mut child = Command::new(supervise::own_binary().map_err(failed)?)
            .arg0("axed")
            .args([supervise::SUPERVISE, self.mode.as_str(), command])
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
