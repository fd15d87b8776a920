//! Tickets: short-lived secrets that open the events of one run, for clients that cannot send a header, such as a browser's
//! `EventSource`. A ticket is the time of its end and a signature: nothing is stored of it, so their number needs no bound.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretBox};
use sha2::Sha256;

use crate::config::ClientKey;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::store::tickets::TicketSecret;

/// How long a ticket is valid.
pub const LIFETIME: Duration = Duration::from_secs(60);

/// Prefix of every ticket, so that people and secret scanners recognise one.
const PREFIX: &str = "axed_ticket_";
/// What a signature is for, so that one for something else is none.
const PURPOSE: &[u8] = b"events of a run";

/// What this process signs tickets with, unless other nodes accept them too.
#[derive(Debug)]
pub struct ProcessSecret {
    /// Made when it is first needed. A restart ends its tickets.
    secret: OnceLock<[u8; 32]>,
    started: Instant,
}

#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the system has no random numbers for a ticket: {0}")]
    NoRandomness(getrandom::Error),
}

impl Default for ProcessSecret {
    fn default() -> Self {
        Self {
            secret: OnceLock::new(),
            started: Instant::now(),
        }
    }
}

impl ProcessSecret {
    /// What tickets for runs of this store are signed with now.
    pub async fn current(&self, store: &dyn RunStore) -> Result<TicketSecret, SecretError> {
        if let Some(cluster) = store.cluster() {
            return Ok(cluster.ticket_secret().await?);
        }
        let mut random = [0; 32];
        if self.secret.get().is_none() {
            getrandom::fill(&mut random).map_err(SecretError::NoRandomness)?;
        }
        let secret = self.secret.get_or_init(|| random);
        Ok(TicketSecret {
            secret: SecretBox::from(Box::from(&secret[..])),
            now: self.started.elapsed(),
        })
    }
}

impl TicketSecret {
    /// A new ticket of `key` for the events of `run`.
    pub fn issue(&self, run: RunId, key: Option<&ClientKey>) -> String {
        let expires = (self.now + LIFETIME).as_millis() as u64;
        let expires = expires.to_be_bytes();
        let signature = self.sign(run, key, &expires).finalize().into_bytes();
        let bytes = [&expires[..], &signature[..]].concat();
        format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The key that requested a valid ticket for this run; the inner `None` if there are no keys. Every key is compared, so that the
    /// time does not tell which one matched. A key with another secret than then is another key.
    pub fn redeem<'k>(
        &self,
        run: RunId,
        text: &str,
        keys: &'k [Arc<ClientKey>],
    ) -> Option<Option<&'k Arc<ClientKey>>> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(PREFIX)?).ok()?;
        let (expires, signature) = bytes.split_first_chunk()?;
        let is_signed = |key| {
            let expected = self.sign(run, key, expires);
            expected.verify_slice(signature).is_ok()
        };
        let mut matched = None;
        for key in keys {
            if is_signed(Some(key)) {
                matched = Some(Some(key));
            }
        }
        if keys.is_empty() && is_signed(None) {
            matched = Some(None);
        }
        matched.filter(|_| self.now < Duration::from_millis(u64::from_be_bytes(*expires)))
    }

    fn sign(&self, run: RunId, key: Option<&ClientKey>, expires: &[u8; 8]) -> Hmac<Sha256> {
        let secret = self.secret.expose_secret();
        let mut mac =
            Hmac::new_from_slice(secret).unwrap_or_else(|_| Hmac::new(&Default::default()));
        mac.update(PURPOSE);
        mac.update(run.0.as_bytes());
        mac.update(expires);
        if let Some(key) = key {
            mac.update(key.sha256.as_bytes());
        }
        mac
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use secrecy::SecretBox;

    use super::LIFETIME;
    use crate::config::ClientKey;
    use crate::config::key_hash::KeyHash;
    use crate::domain::run::RunId;
    use crate::store::tickets::TicketSecret;

    fn secret_at(now: Duration) -> TicketSecret {
        TicketSecret {
            secret: SecretBox::from(Box::from(&b"of all nodes"[..])),
            now,
        }
    }

    fn key(name: &str, token: &str) -> Arc<ClientKey> {
        Arc::new(ClientKey {
            name: name.to_owned(),
            sha256: KeyHash::digest(token.as_bytes()),
            scopes: Vec::new(),
            agents: None,
            webhook_secret_env: None,
        })
    }

    #[test]
    fn a_ticket_is_valid_for_its_run_for_a_minute() {
        let (run, now) = (RunId::new(), Duration::from_secs(7));
        let ticket = secret_at(now).issue(run, None);
        let is_valid = |run, text: &str, now| secret_at(now).redeem(run, text, &[]).is_some();
        assert!(is_valid(run, &ticket, now));
        assert!(is_valid(run, &ticket, now), "a client may connect again");
        assert!(!is_valid(RunId::new(), &ticket, now));
        let last = now + LIFETIME - Duration::from_millis(1);
        assert!(is_valid(run, &ticket, last) && !is_valid(run, &ticket, now + LIFETIME));
        let mut other = secret_at(now);
        other.secret = SecretBox::from(Box::from(&b"of other nodes"[..]));
        assert!(other.redeem(run, &ticket, &[]).is_none());
        for at in 0..ticket.len() {
            let mut changed = ticket.clone().into_bytes();
            changed[at] = if changed[at] == b'B' { b'C' } else { b'B' };
            let changed = String::from_utf8(changed).expect("a text");
            assert!(!is_valid(run, &changed, now), "{changed}");
            assert!(!is_valid(run, &ticket[..at], now), "{at}");
        }
    }

    #[test]
    fn a_ticket_has_the_rights_of_its_key() {
        let (run, now) = (RunId::new(), Duration::ZERO);
        let keys = [key("ada", "1"), key("bob", "2")];
        let ticket = secret_at(now).issue(run, Some(&keys[1]));
        let redeem = |keys: &[Arc<ClientKey>]| {
            let key = secret_at(now).redeem(run, &ticket, keys)?;
            Some(key.map(|key| key.name.clone()))
        };
        assert_eq!(redeem(&keys), Some(Some("bob".to_owned())));
        assert_eq!(redeem(&[key("bob", "3")]), None, "the key was replaced");
        assert_eq!(redeem(&[]), None);
    }
}
