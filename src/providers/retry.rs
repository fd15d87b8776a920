//! Calculates the wait before a failed request is sent again: backoff with full jitter, or the service's `retry-after`. Pure.
//!
//! The `backon` crate does not replace this: it has no linear backoff, and its jitter only lengthens a wait.

use std::time::Duration;

use crate::domain::agent::retry::{Backoff, Retry};

/// The wait before retry `attempt`, counted from 1: `retry_after` if the service sent it, else uniformly distributed
/// between 0 and the policy's bound. `random` is in 0..1.
pub fn retry_delay(
    policy: &Retry,
    attempt: u32,
    retry_after: Option<Duration>,
    random: f64,
) -> Duration {
    // The service knows best when it is ready again. The caller limits the wait to the time until the deadline.
    retry_after.unwrap_or_else(|| max_backoff(policy, attempt).mul_f64(random.clamp(0.0, 1.0)))
}

fn max_backoff(policy: &Retry, attempt: u32) -> Duration {
    let factor = match policy.backoff {
        Backoff::Exponential => 2u32.saturating_pow(attempt.saturating_sub(1)),
        Backoff::Linear => attempt,
        Backoff::Fixed => 1,
    };
    policy
        .initial_delay
        .saturating_mul(factor)
        .min(policy.max_delay)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::retry_delay;
    use crate::domain::agent::retry::{Backoff, Retry};

    fn longest(backoff: Backoff, attempt: u32) -> u128 {
        let policy = Retry {
            backoff,
            ..Retry::default()
        };
        retry_delay(&policy, attempt, None, 1.0).as_millis()
    }

    #[test]
    fn the_bound_grows_by_policy() {
        let over = |backoff| [1, 2, 3, 4, u32::MAX].map(|attempt| longest(backoff, attempt));
        assert_eq!(over(Backoff::Exponential), [500, 1000, 2000, 4000, 30_000]);
        assert_eq!(over(Backoff::Linear), [500, 1000, 1500, 2000, 30_000]);
        assert_eq!(over(Backoff::Fixed), [500; 5]);
    }

    #[test]
    fn the_wait_is_between_zero_and_the_bound() {
        let policy = Retry::default();
        let at = |random| retry_delay(&policy, 2, None, random).as_millis();
        assert_eq!([at(0.0), at(0.25), at(1.0)], [0, 250, 1000]);
    }

    #[test]
    fn retry_after_wins_over_backoff() {
        let retry_after = Duration::from_secs(77);
        assert_eq!(
            retry_delay(&Retry::default(), 1, Some(retry_after), 0.1),
            retry_after
        );
    }
}
