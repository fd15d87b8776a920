//! An MCP server that runs as a child process: its lifetime and its pipes.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::Empty;
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::config::environment::Environment;
use crate::tools::mcp::close_state::CloseReason;
use crate::tools::mcp::lines::{LineReader, read_line};
use crate::tools::mcp::message::Message;
use crate::tools::mcp::requests::PendingRequests;
use crate::tools::mcp::stderr::StderrTail;
use crate::tools::mcp::unread::{UNREAD_REASON, UnreadMessages};

/// The variables that every server inherits from the daemon. They contain none of its keys.
pub const INHERITED_VARIABLES: [&str; 9] = [
    "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
];
/// How long a server may take to exit after its input closed, and again after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long reading the last output of a process may take after its end.
const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A running server process with its pipes. Dropping it kills the process group.
pub struct ServerProcess {
    lines: LineReader<ChildStdout>,
    input: AsyncRwTransport<RoleClient, Empty, ChildStdin>,
    /// Messages that were read and not yet received.
    messages: VecDeque<RxJsonRpcMessage<RoleClient>>,
    child: Child,
    process_group: Option<Pid>,
    unread_messages: UnreadMessages,
    requests: PendingRequests,
    close_reason: CloseReason,
    tail: StderrTail,
}

/// Starts a server in a process group of its own.
///
/// # Errors
/// Why it cannot be started.
pub fn start(
    command: &str,
    args: &[String],
    env: Vec<(String, String)>,
    environment: &Environment,
    close_reason: CloseReason,
    tail: StderrTail,
) -> Result<(ServerProcess, ChildStderr), String> {
    let inherited = INHERITED_VARIABLES
        .iter()
        .filter_map(|name| Some((name, environment.get(*name)?)));
    let failed = |error: io::Error| describe_start_error(command, &error);
    let mut child = Command::new(command)
        .args(args)
        .env_clear()
        .envs(inherited)
        .envs(env)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let process_group = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
        return Err("it was started without pipes".to_owned());
    };
    let process = ServerProcess {
        lines: LineReader::new(stdout),
        input: AsyncRwTransport::new(tokio::io::empty(), stdin),
        messages: VecDeque::new(),
        child,
        process_group,
        unread_messages: UnreadMessages::default(),
        requests: PendingRequests::default(),
        close_reason,
        tail,
    };
    Ok((process, stderr))
}

impl ServerProcess {
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.process_group {
            // The group may be empty already.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Keeps the messages in a line of output.
    ///
    /// # Errors
    /// An answer that no request can be waiting for, or that cannot be read, although requests wait.
    fn push_line(&mut self, line: &[u8]) -> Result<(), String> {
        let read = match read_line(line) {
            Ok(read) => read,
            Err(beginning) if self.requests.has_pending() => {
                return Err(format!("its answer is not a JSON-RPC message: {beginning}"));
            }
            Err(_) => return Ok(()),
        };
        for message in read.messages {
            let message = match message {
                Message::Answer(answer) => {
                    let may_be_log = read.may_be_log || !answer.is_marked;
                    self.requests.match_answer(answer, may_be_log)?
                }
                Message::Other(message) => Some(*message).filter(|_| !read.may_be_log),
            };
            self.messages.extend(message);
        }
        Ok(())
    }

    /// Why the output ended.
    async fn explain_end(&mut self) -> String {
        let why = match timeout(FINAL_OUTPUT_TIMEOUT, self.child.wait()).await {
            Ok(Ok(status)) => {
                // The last lines explain more. A descendant may keep standard error open, too.
                let _ = timeout(FINAL_OUTPUT_TIMEOUT, self.tail.wait_eof()).await;
                format!("its process ended ({status})")
            }
            _ => "its process closed its output".to_owned(),
        };
        self.tail.explain(&why)
    }

    fn set_close_reason(&self, reason: String) {
        let _ = self.close_reason.set(reason);
    }
}

impl Transport<RoleClient> for ServerProcess {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        self.requests.track_sent(&message);
        let unread = &self.unread_messages;
        let guard = (!unread.is_full()).then(|| unread.count_one());
        let sending = self.input.send(message);
        async move {
            match guard {
                Some(_guard) => sending.await,
                None => Err(io::Error::other(UNREAD_REASON)),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if self.unread_messages.is_full() {
            self.set_close_reason(UNREAD_REASON.to_owned());
            return None;
        }
        loop {
            if let Some(message) = self.messages.pop_front() {
                return Some(message);
            }
            let line = tokio::select! {
                biased;
                line = self.lines.next_line() => line,
                // A descendant of the server may keep its output open.
                _ = self.child.wait() => {
                    let rest = timeout(FINAL_OUTPUT_TIMEOUT, self.lines.next_line()).await;
                    rest.unwrap_or(Ok(None))
                }
            };
            let why = match line {
                Ok(Some(line)) => match self.push_line(&line) {
                    Ok(()) => continue,
                    Err(why) => why,
                },
                Ok(None) if self.close_reason.get().is_some() => return None,
                Ok(None) => self.explain_end().await,
                Err(error) => error.to_string(),
            };
            self.set_close_reason(why);
            return None;
        }
    }

    /// Closes in the order of the protocol: close the input, then SIGTERM, then SIGKILL for the whole group.
    async fn close(&mut self) -> io::Result<()> {
        // A write to the server may block until the process ends.
        let _ = timeout(EXIT_TIMEOUT, self.input.close()).await;
        if timeout(EXIT_TIMEOUT, self.child.wait()).await.is_err() {
            self.signal(Signal::TERM);
            let _ = timeout(EXIT_TIMEOUT, self.child.wait()).await;
        }
        self.signal(Signal::KILL);
        self.process_group = None;
        self.child.wait().await.map(drop)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Why a program was not started, and what to do about it.
fn describe_start_error(command: &str, error: &io::Error) -> String {
    let has_path = command.contains('/');
    let why = match error.kind() {
        io::ErrorKind::NotFound if !has_path => {
            "was not found in the PATH of the daemon; install it, or write its full path".to_owned()
        }
        io::ErrorKind::NotFound if Path::new(command).exists() => {
            "cannot be started: the interpreter that its first line (#!) names does not exist"
                .to_owned()
        }
        io::ErrorKind::NotFound => "does not exist".to_owned(),
        io::ErrorKind::PermissionDenied => "may not be executed by the daemon's user".to_owned(),
        _ => format!("cannot be started: {error}"),
    };
    format!("its program {command} {why}")
}
