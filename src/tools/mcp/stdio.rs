//! An MCP server that runs as a child process: its lifetime and its pipes.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::config::environment::Environment;
use crate::tools::mcp::close_state::CloseReason;
use crate::tools::mcp::content::replace_unknown_content;
use crate::tools::mcp::lines::{BoundedLines, TransportState};
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
    rpc: AsyncRwTransport<RoleClient, BoundedLines<ChildStdout>, ChildStdin>,
    child: Child,
    process_group: Option<Pid>,
    unread_messages: UnreadMessages,
    requests: PendingRequests,
    state: Arc<TransportState>,
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
    let state = Arc::new(TransportState::default());
    let lines = BoundedLines::new(stdout, Arc::clone(&state), Arc::clone(&close_reason));
    // `BoundedLines` ends the connection if a line is too long. This limit would only drop the line, and the request
    // that waits for it would wait on.
    let rpc = AsyncRwTransport::new(lines, stdin).with_max_line_length(usize::MAX);
    let process = ServerProcess {
        rpc,
        child,
        process_group,
        unread_messages: UnreadMessages::default(),
        requests: PendingRequests::default(),
        state,
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

    fn update_waiting(&self) {
        let is_waiting = self.requests.has_pending();
        self.state.is_waiting.store(is_waiting, Ordering::Relaxed);
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
        self.update_waiting();
        let unread = &self.unread_messages;
        let guard = (!unread.is_full()).then(|| unread.count_one());
        let sending = self.rpc.send(message);
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
        let received = tokio::select! {
            biased;
            received = self.rpc.receive() => received,
            // A descendant of the server may keep its output open.
            _ = self.child.wait() => timeout(FINAL_OUTPUT_TIMEOUT, self.rpc.receive()).await.ok().flatten(),
        };
        if received.is_none() && self.close_reason.get().is_none() {
            let why = match timeout(FINAL_OUTPUT_TIMEOUT, self.child.wait()).await {
                Ok(Ok(status)) => {
                    // The last lines explain more. A descendant may keep standard error open, too.
                    let _ = timeout(FINAL_OUTPUT_TIMEOUT, self.tail.wait_eof()).await;
                    format!("its process ended ({status})")
                }
                _ => "its process closed its output".to_owned(),
            };
            self.set_close_reason(self.tail.explain(&why));
        }
        let mut received = received?;
        self.state.has_received.store(true, Ordering::Relaxed);
        let matched = self.requests.match_response(&received);
        self.update_waiting();
        match matched {
            Ok(()) => {
                replace_unknown_content(&mut received);
                Some(received)
            }
            Err(why) => {
                self.set_close_reason(why);
                None
            }
        }
    }

    /// Closes in the order of the protocol: close the input, then SIGTERM, then SIGKILL for the whole group.
    async fn close(&mut self) -> io::Result<()> {
        // A write to the server may block until the process ends.
        let _ = timeout(EXIT_TIMEOUT, self.rpc.close()).await;
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
