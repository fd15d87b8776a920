//! Tickets: short-lived secrets that open the events of one run, for clients that cannot send a header, such as a browser's
//! `EventSource`. They are kept in memory only, so a restart ends them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;

use crate::config::ClientKey;
use crate::config::key_hash::KeyHash;
use crate::domain::run::RunId;

/// How long a ticket is valid.
pub const LIFETIME: Duration = Duration::from_secs(60);
/// Maximum valid tickets of one key; also of all clients together if no keys are configured.
pub const MAX_PER_KEY: usize = 1000;

/// Prefix of every ticket, so that people and secret scanners recognise one.
const PREFIX: &str = "axed_ticket_";

/// The valid tickets of this process.
#[derive(Debug, Default)]
pub struct Tickets(Mutex<VecDeque<Ticket>>);

#[derive(Debug)]
struct Ticket {
    hash: KeyHash,
    run: RunId,
    key: Option<Arc<ClientKey>>,
    expires: Instant,
}

#[derive(Debug)]
pub enum IssueError {
    /// The key has [`MAX_PER_KEY`] valid tickets; the oldest ends after this time.
    TooMany {
        retry_after: Duration,
    },
    NoRandomness(getrandom::Error),
}

impl Tickets {
    /// A new ticket of `key` for the events of `run`.
    pub fn issue(
        &self,
        run: RunId,
        key: Option<&Arc<ClientKey>>,
        now: Instant,
    ) -> Result<String, IssueError> {
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(IssueError::NoRandomness)?;
        let text = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(random));
        let name = key.map(|key| &key.name);
        let mut tickets = self.0.lock();
        // All have the same lifetime, so they expire in the order of their issue.
        let expired = tickets.partition_point(|ticket| ticket.expires <= now);
        tickets.drain(..expired);
        let mut of_key = tickets
            .iter()
            .filter(|ticket| ticket.key.as_ref().map(|key| &key.name) == name);
        if let Some(oldest) = of_key.next()
            && of_key.count() + 1 >= MAX_PER_KEY
        {
            let retry_after = oldest.expires - now;
            return Err(IssueError::TooMany { retry_after });
        }
        tickets.push_back(Ticket {
            hash: KeyHash::digest(text.as_bytes()),
            run,
            key: key.cloned(),
            expires: now + LIFETIME,
        });
        Ok(text)
    }

    /// The key that requested a valid ticket for this run; the inner `None` if no keys are configured. Every ticket of
    /// the run is compared, so that the time does not tell which one matched.
    pub fn redeem(&self, run: RunId, text: &str, now: Instant) -> Option<Option<Arc<ClientKey>>> {
        let hash = KeyHash::digest(text.as_bytes());
        let tickets = self.0.lock();
        let valid = tickets.iter().filter(|ticket| ticket.expires > now);
        let mut matched = None;
        for ticket in valid.filter(|ticket| ticket.run == run) {
            if ticket.hash.matches(&hash).into() {
                matched = Some(ticket.key.clone());
            }
        }
        matched
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{IssueError, LIFETIME, MAX_PER_KEY, Tickets};
    use crate::domain::run::RunId;

    #[test]
    fn a_ticket_is_valid_for_its_run_for_a_minute() {
        let (tickets, run, now) = (Tickets::default(), RunId::new(), Instant::now());
        let ticket = tickets.issue(run, None, now).expect("a ticket");
        let other = tickets.issue(run, None, now).expect("another");
        assert_ne!(ticket, other);
        let is_valid = |run, text: &str, now| tickets.redeem(run, text, now).is_some();
        assert!(is_valid(run, &ticket, now) && is_valid(run, &other, now));
        assert!(is_valid(run, &ticket, now), "a client may connect again");
        assert!(!is_valid(RunId::new(), &ticket, now));
        assert!(!is_valid(run, &ticket[1..], now));
        let last = now + LIFETIME - Duration::from_nanos(1);
        assert!(is_valid(run, &ticket, last) && !is_valid(run, &ticket, now + LIFETIME));
    }

    #[test]
    fn the_number_of_valid_tickets_is_bounded() {
        let (tickets, now) = (Tickets::default(), Instant::now());
        for _ in 0..MAX_PER_KEY {
            tickets.issue(RunId::new(), None, now).expect("a ticket");
        }
        let refused = tickets.issue(RunId::new(), None, now);
        let refused = refused.expect_err("one too many");
        assert!(matches!(refused, IssueError::TooMany { retry_after } if retry_after == LIFETIME));
        tickets
            .issue(RunId::new(), None, now + LIFETIME)
            .expect("a ticket");
        assert_eq!(tickets.0.lock().len(), 1);
    }
}
