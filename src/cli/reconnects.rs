//! Reconnects to a daemon while a command waits for a run: the daemon may be restarted, or another one may take its place.

use std::io::IsTerminal;
use std::time::Duration;

use serde_json::Value;

use crate::cli::client::{Client, ClientError, ReceivedEvent};
use crate::cli::output;

/// How often it is tried without success, and the pause before each attempt.
const MAX_ATTEMPTS: u32 = 15;
const PAUSE: Duration = Duration::from_secs(2);

/// The attempts since the last success.
#[derive(Default)]
pub struct Reconnects {
    attempts: u32,
    /// Until something has answered, an error is final: the address may be wrong.
    has_answered: bool,
    is_silent: bool,
}

impl Reconnects {
    /// For a daemon that has answered before.
    pub fn to_known_daemon() -> Self {
        Self {
            has_answered: true,
            ..Self::default()
        }
    }

    /// Prints nothing: another wait for the same daemon reports that it is away.
    pub fn silent() -> Self {
        Self {
            is_silent: true,
            ..Self::to_known_daemon()
        }
    }

    pub fn on_success(&mut self) {
        self.attempts = 0;
        self.has_answered = true;
    }

    /// Calls `on_event` for every event of a run's tree after the one with this number, until the last one. Opens a stream that
    /// breaks off again.
    ///
    /// # Errors
    /// As for [`Self::pause_after`].
    pub async fn follow(
        &mut self,
        client: &Client,
        id: &str,
        after: u64,
        mut on_event: impl FnMut(&ReceivedEvent),
    ) -> anyhow::Result<()> {
        let mut last = after;
        let mut has_ended = false;
        loop {
            let before = last;
            let followed = client.follow(id, last, |received| {
                last = received.number().unwrap_or(last);
                let is_own = received.json["run_id"] == id;
                let event = received.event.as_ref().filter(|_| is_own);
                has_ended |= event.is_some_and(|event| event.kind.name().is_terminal());
                on_event(received);
            });
            let followed = followed.await;
            if has_ended {
                return Ok(());
            }
            if last > before {
                self.on_success();
            }
            match followed {
                Ok(()) => self.pause_after_end(id).await?,
                Err(error) => self.pause_after(error).await?,
            }
        }
    }

    /// The run's record at the latest after `wait` seconds at a daemon, or at its end.
    ///
    /// # Errors
    /// As for [`Self::pause_after`].
    pub async fn get_run(
        &mut self,
        client: &Client,
        id: &str,
        mut wait: u64,
    ) -> Result<Value, ClientError> {
        loop {
            match client.get_run(id, wait).await {
                Ok(run) => {
                    self.on_success();
                    return Ok(run);
                }
                Err(error) => self.pause_after(error).await?,
            }
            // A proxy that keeps no request so long lets this one pass.
            wait = 0;
        }
    }

    /// Pauses after an error.
    ///
    /// # Errors
    /// The error, if another attempt has no chance or there were enough.
    pub async fn pause_after(&mut self, error: ClientError) -> Result<(), ClientError> {
        let is_away = match &error {
            ClientError::Unreachable { .. } => true,
            // Those of a proxy without a daemon behind it, and of a daemon that stops.
            ClientError::ErrorResponse { status, .. } => matches!(status, 502..=504),
            _ => false,
        };
        if !is_away || !self.has_answered || self.attempts == MAX_ATTEMPTS {
            return Err(error);
        }
        self.pause(&format!("the daemon is away ({error})")).await;
        Ok(())
    }

    /// Pauses after an event stream of the run that ended before the run.
    async fn pause_after_end(&mut self, run: &str) -> anyhow::Result<()> {
        if self.attempts == MAX_ATTEMPTS {
            anyhow::bail!("the event stream of {run} breaks off again and again");
        }
        self.has_answered = true;
        self.pause("the event stream broke off").await;
        Ok(())
    }

    async fn pause(&mut self, why: &str) {
        if self.attempts == 0 && !self.is_silent {
            if std::io::stderr().is_terminal() {
                // There may be a status line, or a question.
                output::eprint_status(format_args!(""));
            }
            output::eprint_line(format_args!("axed: {why}; connecting again"));
        }
        self.attempts += 1;
        tokio::time::sleep(PAUSE).await;
    }
}
