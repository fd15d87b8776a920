//! An MCP server that runs as a child process: its lifetime and its pipes.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::config::environment::Environment;
use crate::tools::mcp::close_state::CloseReason;
use crate::tools::mcp::requests::PendingRequests;
use crate::tools::mcp::stderr::StderrTail;

/// The variables that every server inherits from the daemon. They contain none of its keys.
const INHERITED_VARIABLES: [&str; 9] = [
    "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
];
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Messages that wait for the server to read them.
const MAX_UNREAD_MESSAGES: usize = 1024;
/// How long a server may take to exit after its input closed, and again after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long reading the last output of a process may take after its end.
const FINAL_OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A running server process with its pipes. Dropping it kills the process group.
pub struct ServerProcess {
    rpc: AsyncRwTransport<RoleClient, BoundedLines, ChildStdin>,
    child: Child,
    process_group: Option<Pid>,
    unread_messages: Arc<AtomicUsize>,
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
    let lines = BoundedLines {
        stdout,
        line_bytes: 0,
        close_reason: Arc::clone(&close_reason),
    };
    // `BoundedLines` ends the connection if a line is too long. This limit would only drop the line, and the request
    // that waits for it would wait on.
    let rpc = AsyncRwTransport::new(lines, stdin).with_max_line_length(usize::MAX);
    let process = ServerProcess {
        rpc,
        child,
        process_group,
        unread_messages: Arc::default(),
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
        let guard = UnreadGuard::acquire(&self.unread_messages);
        let sending = self.rpc.send(message);
        async move {
            match guard {
                Some(_guard) => sending.await,
                None => Err(io::Error::other("it does not read what it is sent")),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if self.unread_messages.load(Ordering::Relaxed) >= MAX_UNREAD_MESSAGES {
            // The server may send requests without reading our answers.
            self.set_close_reason("it does not read what it is sent".to_owned());
            return None;
        }
        let received = tokio::select! {
            biased;
            received = self.rpc.receive() => received,
            // A descendant of the server may keep its output open.
            _ = self.child.wait() => timeout(FINAL_OUTPUT_TIMEOUT, self.rpc.receive()).await.ok().flatten(),
        };
        if received.is_none() {
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
        let received = received?;
        match self.requests.match_response(&received) {
            Ok(()) => Some(received),
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

/// Counts a message that the server has not read yet.
struct UnreadGuard(Arc<AtomicUsize>);

impl UnreadGuard {
    fn acquire(unread_messages: &Arc<AtomicUsize>) -> Option<Self> {
        let guard = Self(Arc::clone(unread_messages));
        (unread_messages.fetch_add(1, Ordering::Relaxed) < MAX_UNREAD_MESSAGES).then_some(guard)
    }
}

impl Drop for UnreadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A server's output, which fails if a line is too long.
struct BoundedLines {
    stdout: ChildStdout,
    line_bytes: usize,
    close_reason: CloseReason,
}

impl AsyncRead for BoundedLines {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stdout).poll_read(context, buffer))?;
        let new = &buffer.filled()[before..];
        self.line_bytes = match new.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => new.len() - at - 1,
            None => self.line_bytes + new.len(),
        };
        if self.line_bytes > MAX_MESSAGE_BYTES {
            let why = format!("it sent a message of more than {MAX_MESSAGE_BYTES} bytes");
            let _ = self.close_reason.set(why.clone());
            return Poll::Ready(Err(io::Error::other(why)));
        }
        Poll::Ready(Ok(()))
    }
}
