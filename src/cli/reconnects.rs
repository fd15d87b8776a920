//! Attempts to reach a daemon again that a command follows a run at: it may be restarted, or another one may take its place.

use std::time::Duration;

use crate::cli::client::ClientError;
use crate::cli::output;

/// How often it is tried without success, and the pause before each attempt.
const MAX_ATTEMPTS: u32 = 15;
const PAUSE: Duration = Duration::from_secs(2);

/// The attempts since the last success.
#[derive(Default)]
pub struct Reconnects {
    attempts: u32,
    /// Before the first success an error is final: the address may be wrong.
    has_succeeded: bool,
}

impl Reconnects {
    /// A success: later errors are those of a daemon that was there.
    pub fn on_success(&mut self) {
        *self = Self {
            attempts: 0,
            has_succeeded: true,
        };
    }

    /// What the daemon sent; `None` after a pause if it is to be requested again.
    ///
    /// # Errors
    /// As for [`Self::pause_after`].
    pub async fn result<T>(
        &mut self,
        result: Result<T, ClientError>,
    ) -> Result<Option<T>, ClientError> {
        match result {
            Ok(value) => {
                self.on_success();
                Ok(Some(value))
            }
            Err(error) => self.pause_after(error).await.map(|()| None),
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
        if !is_away || !self.has_succeeded || self.attempts == MAX_ATTEMPTS {
            return Err(error);
        }
        self.pause(&error.to_string()).await;
        Ok(())
    }

    /// Pauses after an event stream of the run that ended before the run.
    ///
    /// # Errors
    /// There were enough attempts.
    pub async fn pause_after_end(&mut self, run: &str) -> anyhow::Result<()> {
        if self.attempts == MAX_ATTEMPTS {
            anyhow::bail!("the event stream of {run} breaks off again and again");
        }
        self.has_succeeded = true;
        self.pause("the event stream broke off").await;
        Ok(())
    }

    async fn pause(&mut self, why: &str) {
        if self.attempts == 0 {
            output::eprint_line(format_args!("axed: {why}; connecting again"));
        }
        self.attempts += 1;
        tokio::time::sleep(PAUSE).await;
    }
}
