//! How long to wait before a failed request is sent again: full jitter, and the service's own wish. Pure.

use std::time::Duration;

use crate::domain::agent::{Backoff, Retry};

/// The wait before try `attempt` (1 is the first retry): uniform between 0 and the policy's bound, or what the service
/// asks for where that is known. `random` is a number in 0..1.
pub fn retry_delay(
    policy: &Retry,
    attempt: u32,
    retry_after: Option<Duration>,
    random: f64,
) -> Duration {
    // A service that names a time knows better than our guess; the caller bounds it by what is left of the deadline.
    retry_after.unwrap_or_else(|| max_backoff(policy, attempt).mul_f64(random.clamp(0.0, 1.0)))
}

/// The longest wait that the policy allows before try `attempt`.
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
    use crate::domain::agent::{Backoff, Retry};

    fn longest(backoff: Backoff, attempt: u32) -> u128 {
        let policy = Retry {
            backoff,
            ..Retry::default()
        };
        retry_delay(&policy, attempt, None, 1.0).as_millis()
    }

    #[test]
    fn the_bound_grows_as_the_policy_says() {
        let over = |backoff| [1, 2, 3, 4, u32::MAX].map(|attempt| longest(backoff, attempt));
        assert_eq!(over(Backoff::Exponential), [500, 1000, 2000, 4000, 30_000]);
        assert_eq!(over(Backoff::Linear), [500, 1000, 1500, 2000, 30_000]);
        assert_eq!(over(Backoff::Fixed), [500; 5]);
    }

    #[test]
    fn the_wait_is_spread_from_nothing_to_the_bound() {
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
