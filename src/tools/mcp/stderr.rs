//! Logs the standard error of a server process, and keeps the last lines to explain why the process ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::ChildStderr;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::message::shorten;
use crate::tools::mcp::secrets::Secrets;

/// Most bytes of a line that is logged.
const MAX_LINE_BYTES: usize = 500;
/// Lines that are logged in a [`LOG_WINDOW`].
const MAX_LOGGED_LINES: usize = 20;
const LOG_WINDOW: Duration = Duration::from_secs(10);
const MAX_TAIL_LINES: usize = 5;
const MAX_TAIL_LINE_CHARS: usize = 200;

/// The last lines of one process, without secrets. Clones share them.
#[derive(Clone, Default)]
pub struct StderrTail {
    lines: Arc<Mutex<VecDeque<String>>>,
    eof: CancellationToken,
}

impl StderrTail {
    /// The reason, followed by the last lines if there are any.
    pub fn explain(&self, reason: &str) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return reason.to_owned();
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        format!(
            "{reason}; the last lines of its standard error: {}",
            lines.join(" | ")
        )
    }

    /// Resolves when all output has been read.
    pub async fn wait_eof(&self) {
        self.eof.cancelled().await;
    }

    fn push(&self, line: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(shorten(line, MAX_TAIL_LINE_CHARS));
    }
}

/// Logs the standard error of a server within bounds, and keeps its last lines. Returns when the output ends.
pub async fn log_stderr(name: String, mut stderr: ChildStderr, secrets: Secrets, tail: StderrTail) {
    let _eof_guard = tail.eof.clone().drop_guard();
    let mut logger = StderrLogger {
        name,
        secrets,
        tail,
        window_start: None,
        logged_in_window: 0,
    };
    let mut buffer = [0; 4096];
    let mut line = Vec::new();
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        for byte in &buffer[..read] {
            match byte {
                b'\n' => logger.end_line(&mut line),
                byte if line.len() < MAX_LINE_BYTES => line.push(*byte),
                _ => {}
            }
        }
    }
    logger.end_line(&mut line);
}

struct StderrLogger {
    name: String,
    secrets: Secrets,
    tail: StderrTail,
    /// When the current [`LOG_WINDOW`] began.
    window_start: Option<Instant>,
    logged_in_window: usize,
}

impl StderrLogger {
    fn end_line(&mut self, line: &mut Vec<u8>) {
        let bytes = std::mem::take(line);
        let text = String::from_utf8_lossy(&bytes);
        let text = self
            .secrets
            .redact(text.trim())
            .replace(char::is_control, "\u{fffd}");
        if text.is_empty() {
            return;
        }
        self.tail.push(&text);
        if self
            .window_start
            .is_none_or(|since| since.elapsed() >= LOG_WINDOW)
        {
            self.window_start = Some(Instant::now());
            self.logged_in_window = 0;
        }
        self.logged_in_window += 1;
        let name = &self.name;
        match self.logged_in_window.cmp(&MAX_LOGGED_LINES) {
            std::cmp::Ordering::Less => tracing::info!("MCP server {name} writes: {text}"),
            std::cmp::Ordering::Equal => {
                tracing::info!("MCP server {name} writes too much; some of it is left out");
            }
            std::cmp::Ordering::Greater => {}
        }
    }
}
