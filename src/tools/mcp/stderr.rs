//! What a server's process writes on its standard error: logged, and its last lines kept for whoever has to say why it
//! ended.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::ChildStderr;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::domain::message::shorten;
use crate::tools::mcp::secrets::Secrets;

/// Most bytes of a line of a server's standard error.
const MAX_LINE: usize = 500;
/// Lines of it that are logged in a [`WINDOW`].
const MAX_LOGGED: usize = 20;
const WINDOW: Duration = Duration::from_secs(10);
/// Lines that are kept.
const MAX_KEPT: usize = 5;
/// Most characters of a line that is kept.
const MAX_KEPT_LINE: usize = 200;

/// The last lines of one process, without secrets. Cheap to clone: all clones share them.
#[derive(Clone, Default)]
pub struct Tail {
    lines: Arc<Mutex<VecDeque<String>>>,
    ended: CancellationToken,
}

impl Tail {
    /// The reason, followed by the last lines if there are any.
    pub fn explain(&self, why: &str) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return why.to_owned();
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        format!(
            "{why}; the last lines of its standard error: {}",
            lines.join(" | ")
        )
    }

    /// Resolves when everything that was written has been read.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }

    fn keep(&self, line: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_KEPT {
            lines.pop_front();
        }
        lines.push_back(shorten(line, MAX_KEPT_LINE));
    }
}

/// Logs what a server writes on its standard error, within bounds, and keeps its last lines. Returns at its end.
pub async fn read(name: String, mut stderr: ChildStderr, secrets: Secrets, tail: Tail) {
    let _ended = tail.ended.clone().drop_guard();
    let mut reader = LineReader {
        name,
        secrets,
        tail,
        since: None,
        logged: 0,
    };
    let mut buffer = [0; 4096];
    let mut line = Vec::new();
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        for byte in &buffer[..read] {
            match byte {
                b'\n' => reader.end_line(&mut line),
                byte if line.len() < MAX_LINE => line.push(*byte),
                _ => {}
            }
        }
    }
    reader.end_line(&mut line);
}

struct LineReader {
    name: String,
    secrets: Secrets,
    tail: Tail,
    /// When the current [`WINDOW`] began.
    since: Option<Instant>,
    logged: usize,
}

impl LineReader {
    fn end_line(&mut self, line: &mut Vec<u8>) {
        let bytes = std::mem::take(line);
        let text = String::from_utf8_lossy(&bytes);
        let text = self
            .secrets
            .hide(text.trim())
            .replace(char::is_control, "\u{fffd}");
        if text.is_empty() {
            return;
        }
        self.tail.keep(&text);
        if self.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            self.since = Some(Instant::now());
            self.logged = 0;
        }
        self.logged += 1;
        let name = &self.name;
        match self.logged.cmp(&MAX_LOGGED) {
            std::cmp::Ordering::Less => tracing::info!("MCP server {name} writes: {text}"),
            std::cmp::Ordering::Equal => {
                tracing::info!("MCP server {name} writes too much; some of it is left out");
            }
            std::cmp::Ordering::Greater => {}
        }
    }
}
