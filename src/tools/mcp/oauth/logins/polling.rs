//! The device authorization grant (RFC 8628): the operator enters a code in a browser, while this process polls the token
//! endpoint.

use std::time::Duration;

use tokio::time::Instant;

use crate::tools::mcp::oauth::grant::{GrantClient, GrantError, Issued};
use crate::tools::mcp::oauth::logins::device_code::DeviceCode;

/// What each `slow_down` adds.
const SLOW_DOWN: Duration = Duration::from_secs(5);
/// The longest interval that failures lead to.
const MAX_INTERVAL: Duration = Duration::from_secs(60);

/// What the token endpoint's error means for the next poll.
#[derive(Debug, PartialEq, Eq)]
enum PollResult {
    /// Poll again after this time.
    Again(Duration),
    /// There will be no token, because of this error code.
    Ended(String),
}

/// Section 3.5 of RFC 8628.
fn next_poll(error: &GrantError, interval: Duration) -> PollResult {
    match error {
        GrantError::Refused { code, .. } => match code.as_str() {
            "authorization_pending" => PollResult::Again(interval),
            "slow_down" => PollResult::Again(interval + SLOW_DOWN),
            _ => PollResult::Ended(code.clone()),
        },
        GrantError::Failed(_) => PollResult::Again(interval.max((interval * 2).min(MAX_INTERVAL))),
    }
}

/// Polls until the operator has decided or the code expires.
///
/// # Errors
/// Why there is no token. The text is a sentence of its own.
pub async fn wait_for_token(client: &GrantClient<'_>, code: &DeviceCode) -> Result<Issued, String> {
    let deadline = Instant::now() + code.lifetime;
    let mut interval = code.interval;
    let mut last_failure = None;
    let expired = |failure: Option<String>| {
        let mut text = "the code has expired before it was entered; log in again".to_owned();
        if let Some(failure) = failure {
            text = format!("{text} (the last request failed: {failure})");
        }
        text
    };
    loop {
        let next = Instant::now() + interval;
        if next >= deadline {
            tokio::time::sleep_until(deadline).await;
            return Err(expired(last_failure));
        }
        tokio::time::sleep_until(next).await;
        let error = match client.device_token(&code.device_code).await {
            Ok(issued) => return Ok(issued),
            Err(error) => error,
        };
        interval = match next_poll(&error, interval) {
            PollResult::Again(interval) => interval,
            PollResult::Ended(code) => {
                return Err(match code.as_str() {
                    "access_denied" => "access was denied in the browser".to_owned(),
                    "expired_token" => expired(None),
                    _ => error.to_string(),
                });
            }
        };
        last_failure = match error {
            GrantError::Failed(why) => Some(why),
            GrantError::Refused { .. } => None,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{PollResult, next_poll};
    use crate::tools::mcp::oauth::grant::GrantError;

    #[test]
    fn polls_get_slower_as_the_server_demands() {
        let refused = |code: &str| GrantError::Refused {
            code: code.to_owned(),
            text: String::new(),
        };
        let seconds = Duration::from_secs;
        for (error, expected) in [
            (
                refused("authorization_pending"),
                PollResult::Again(seconds(2)),
            ),
            (refused("slow_down"), PollResult::Again(seconds(7))),
            (
                refused("access_denied"),
                PollResult::Ended("access_denied".to_owned()),
            ),
            (
                GrantError::Failed(String::new()),
                PollResult::Again(seconds(4)),
            ),
        ] {
            assert_eq!(next_poll(&error, seconds(2)), expected, "{error:?}");
        }
    }
}
