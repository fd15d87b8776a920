//! A server that is a process of ours: its life and its pipes.

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

use crate::config::load::Environment;
use crate::tools::mcp::link::Why;
use crate::tools::mcp::requests::Requests;
use crate::tools::mcp::stderr::Tail;

/// What every server gets of the daemon's environment: not its keys.
const PASSED: [&str; 9] = [
    "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
];
/// Most bytes of one message.
const MOST_BYTES: usize = 16 << 20;
/// Messages that wait for a server to read them.
const MOST_UNREAD: usize = 1024;
/// How long a server may take to end by itself when its input ends, and again when it is told to.
const GRACE: Duration = Duration::from_secs(2);
/// How long what a process wrote last may take to be read after its end.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A running server with its pipes. Dropped, it is killed with everything that it started.
pub struct Process {
    rpc: AsyncRwTransport<RoleClient, Lines, ChildStdin>,
    child: Child,
    group: Option<Pid>,
    unread: Arc<AtomicUsize>,
    requests: Requests,
    why: Why,
    tail: Tail,
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
    why: Why,
    tail: Tail,
) -> Result<(Process, ChildStderr), String> {
    let passed = PASSED
        .iter()
        .filter_map(|name| Some((name, environment.get(*name)?)));
    let failed = |error: io::Error| not_started(command, &error);
    let mut child = Command::new(command)
        .args(args)
        .env_clear()
        .envs(passed)
        .envs(env)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let group = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
        return Err("it was started without pipes".to_owned());
    };
    let lines = Lines {
        stdout,
        length: 0,
        why: Arc::clone(&why),
    };
    // The reader above it ends the connection at a line that is too long. This bound would only drop the line, and
    // whoever waits for the answer in it would wait on.
    let rpc = AsyncRwTransport::new(lines, stdin).with_max_line_length(usize::MAX);
    let process = Process {
        rpc,
        child,
        group,
        unread: Arc::default(),
        requests: Requests::default(),
        why,
        tail,
    };
    Ok((process, stderr))
}

impl Process {
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // Nobody may be left.
            let _ = kill_process_group(group, signal);
        }
    }

    fn ended(&self, why: String) {
        let _ = self.why.set(why);
    }
}

impl Transport<RoleClient> for Process {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        self.requests.sent(&message);
        let waits = Waits::begin(&self.unread);
        let sent = self.rpc.send(message);
        async move {
            match waits {
                Some(_waits) => sent.await,
                None => Err(io::Error::other("it does not read what it is sent")),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if self.unread.load(Ordering::Relaxed) >= MOST_UNREAD {
            // It may be asking on and on without reading our answers.
            self.ended("it does not read what it is sent".to_owned());
            return None;
        }
        let received = tokio::select! {
            biased;
            received = self.rpc.receive() => received,
            // Somebody whom it started may hold its output open.
            _ = self.child.wait() => timeout(LAST_WORDS, self.rpc.receive()).await.ok().flatten(),
        };
        if received.is_none() {
            let why = match timeout(LAST_WORDS, self.child.wait()).await {
                Ok(Ok(status)) => {
                    // What it wrote last says more; somebody whom it started may hold that open, too.
                    let _ = timeout(LAST_WORDS, self.tail.ended()).await;
                    format!("its process ended ({status})")
                }
                _ => "its process closed its output".to_owned(),
            };
            self.ended(self.tail.explain(&why));
        }
        let received = received?;
        match self.requests.received(&received) {
            Ok(()) => Some(received),
            Err(why) => {
                self.ended(why);
                None
            }
        }
    }

    /// As the protocol wants it: the end of its input, then SIGTERM, then SIGKILL; the last for whomever it started, too.
    async fn close(&mut self) -> io::Result<()> {
        // Somebody may be stuck in a write to it, which only its end can end.
        let _ = timeout(GRACE, self.rpc.close()).await;
        if timeout(GRACE, self.child.wait()).await.is_err() {
            self.signal(Signal::TERM);
            let _ = timeout(GRACE, self.child.wait()).await;
        }
        self.signal(Signal::KILL);
        self.group = None;
        self.child.wait().await.map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Why a program was not started, and what to do.
fn not_started(command: &str, error: &io::Error) -> String {
    let has_path = command.contains('/');
    let why = match error.kind() {
        io::ErrorKind::NotFound if !has_path => {
            "was not found in the PATH of the daemon; install it, or write its whole path"
                .to_owned()
        }
        io::ErrorKind::NotFound if Path::new(command).exists() => {
            "cannot be started: what its first line names to run it (#!) does not exist".to_owned()
        }
        io::ErrorKind::NotFound => "does not exist".to_owned(),
        io::ErrorKind::PermissionDenied => "may not be executed by the daemon's user".to_owned(),
        _ => format!("cannot be started: {error}"),
    };
    format!("its program {command} {why}")
}

/// A message that waits to be read.
struct Waits(Arc<AtomicUsize>);

impl Waits {
    fn begin(unread: &Arc<AtomicUsize>) -> Option<Self> {
        let waits = Self(Arc::clone(unread));
        (unread.fetch_add(1, Ordering::Relaxed) < MOST_UNREAD).then_some(waits)
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A server's output, which fails at a line that is too long.
struct Lines {
    stdout: ChildStdout,
    length: usize,
    why: Why,
}

impl AsyncRead for Lines {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stdout).poll_read(context, buffer))?;
        let new = &buffer.filled()[before..];
        self.length = match new.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => new.len() - at - 1,
            None => self.length + new.len(),
        };
        if self.length > MOST_BYTES {
            let why = format!("it sent a message of more than {MOST_BYTES} bytes");
            let _ = self.why.set(why.clone());
            return Poll::Ready(Err(io::Error::other(why)));
        }
        Poll::Ready(Ok(()))
    }
}
