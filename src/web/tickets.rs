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
use crate::store::link_secret::LinkSecret;
use crate::store::run_store::RunStore;

/// How long a ticket is valid.
pub const LIFETIME: Duration = Duration::from_secs(60);

/// Prefix of every ticket, so that people and secret scanners recognise one.
const PREFIX: &str = "axed_ticket_";
/// What a signature is for: one for something else is invalid.
const PURPOSE: &[u8] = b"events of a run";

/// Issues tickets and checks them.
#[derive(Debug)]
pub struct TicketSigner {
    /// Read or made when it is first needed. Unless nodes share it, a restart ends its tickets.
    secret: OnceLock<LinkSecret>,
    started: Instant,
}

#[derive(Debug, thiserror::Error)]
pub enum TicketError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the system has no random numbers for a ticket: {0}")]
    NoRandomness(getrandom::Error),
}

impl Default for TicketSigner {
    fn default() -> Self {
        Self {
            secret: OnceLock::new(),
            started: Instant::now(),
        }
    }
}

impl TicketSigner {
    /// A new ticket of `key` for the events of `run`.
    pub async fn issue(
        &self,
        store: &dyn RunStore,
        run: RunId,
        key: Option<&ClientKey>,
    ) -> Result<String, TicketError> {
        let secret = self.secret(store).await?;
        Ok(issue(secret, run, key, self.now(store).await?))
    }

    /// The key that requested a valid ticket for this run; the inner `None` if there are no keys. Reads nothing for a
    /// ticket that nobody has signed.
    pub async fn redeem<'k>(
        &self,
        store: &dyn RunStore,
        run: RunId,
        text: &str,
        keys: &'k [Arc<ClientKey>],
    ) -> Result<Option<Option<&'k Arc<ClientKey>>>, TicketError> {
        let Some(ticket) = Ticket::parse(text) else {
            return Ok(None);
        };
        let Some(key) = ticket.signer(self.secret(store).await?, run, keys) else {
            return Ok(None);
        };
        let is_valid = self.now(store).await? < ticket.end();
        Ok(is_valid.then_some(key))
    }

    async fn secret(&self, store: &dyn RunStore) -> Result<&LinkSecret, TicketError> {
        if let Some(secret) = self.secret.get() {
            return Ok(secret);
        }
        let secret = match store.cluster() {
            Some(_) => store.link_secret().await?,
            // Its times are since the start of the process.
            None => {
                let mut random = Box::new([0; 32]);
                getrandom::fill(&mut random[..]).map_err(TicketError::NoRandomness)?;
                SecretBox::new(random)
            }
        };
        Ok(self.secret.get_or_init(|| secret))
    }

    async fn now(&self, store: &dyn RunStore) -> Result<Duration, StoreError> {
        match store.cluster() {
            Some(cluster) => cluster.database_time().await,
            None => Ok(self.started.elapsed()),
        }
    }
}

fn issue(secret: &LinkSecret, run: RunId, key: Option<&ClientKey>, now: Duration) -> String {
    let end = (now + LIFETIME).as_millis() as u64;
    let end = end.to_be_bytes();
    let signature = sign(secret, run, key, &end).finalize().into_bytes();
    let bytes = [&end[..], &signature[..]].concat();
    format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
}

/// A text with the form of a ticket.
struct Ticket {
    end: [u8; 8],
    signature: [u8; 32],
}

impl Ticket {
    fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix(PREFIX)?).ok()?;
        let (end, signature) = bytes.split_first_chunk()?;
        Some(Self {
            end: *end,
            signature: signature.try_into().ok()?,
        })
    }

    /// Whose ticket for this run it is; the inner `None` if there are no keys. Every key is compared, so that the time does not
    /// tell which one matched. A key with another hash than then is another key.
    fn signer<'k>(
        &self,
        secret: &LinkSecret,
        run: RunId,
        keys: &'k [Arc<ClientKey>],
    ) -> Option<Option<&'k Arc<ClientKey>>> {
        let is_signed = |key| {
            let expected = sign(secret, run, key, &self.end);
            expected.verify_slice(&self.signature).is_ok()
        };
        let mut matched = None;
        for key in keys {
            if is_signed(Some(&**key)) {
                matched = Some(Some(key));
            }
        }
        if keys.is_empty() && is_signed(None) {
            matched = Some(None);
        }
        matched
    }

    fn end(&self) -> Duration {
        Duration::from_millis(u64::from_be_bytes(self.end))
    }
}

fn sign(secret: &LinkSecret, run: RunId, key: Option<&ClientKey>, end: &[u8; 8]) -> Hmac<Sha256> {
    let mut mac = signature(secret, PURPOSE);
    mac.update(run.0.as_bytes());
    mac.update(end);
    if let Some(key) = key {
        mac.update(key.sha256.as_bytes());
    }
    mac
}

/// Signs what follows, for one purpose.
pub fn signature(secret: &LinkSecret, purpose: &[u8]) -> Hmac<Sha256> {
    let secret = secret.expose_secret();
    // HMAC takes a key of any length, so this never fails.
    let mut mac = Hmac::new_from_slice(secret).unwrap_or_else(|_| Hmac::new(&Default::default()));
    mac.update(purpose);
    mac
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use secrecy::SecretBox;

    use super::{LIFETIME, Ticket, issue};
    use crate::config::ClientKey;
    use crate::config::key_hash::KeyHash;
    use crate::domain::run::RunId;
    use crate::store::link_secret::LinkSecret;

    fn secret(byte: u8) -> LinkSecret {
        SecretBox::new(Box::new([byte; 32]))
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
    fn a_ticket_is_signed_for_its_run_and_ends_after_a_minute() {
        let (run, now) = (RunId::new(), Duration::from_millis(7_001));
        let text = issue(&secret(1), run, None, now);
        let is_signed = |secret: &LinkSecret, run, text: &str| {
            Ticket::parse(text).is_some_and(|it| it.signer(secret, run, &[]).is_some())
        };
        assert!(is_signed(&secret(1), run, &text));
        assert!(!is_signed(&secret(1), RunId::new(), &text));
        assert!(!is_signed(&secret(2), run, &text));
        let end = Ticket::parse(&text).map(|it| it.end());
        assert_eq!(end, Some(now + LIFETIME));
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'B' { b'C' } else { b'B' };
            let changed = String::from_utf8(changed).expect("a text");
            assert!(!is_signed(&secret(1), run, &changed), "{changed}");
            assert!(!is_signed(&secret(1), run, &text[..at]), "{at}");
        }
    }

    #[test]
    fn a_ticket_has_the_rights_of_its_key() {
        let run = RunId::new();
        let keys = [key("ada", "1"), key("bob", "2")];
        let text = issue(&secret(1), run, Some(&keys[1]), Duration::ZERO);
        let ticket = Ticket::parse(&text).expect("a ticket");
        let signer = |keys: &[Arc<ClientKey>]| {
            let key = ticket.signer(&secret(1), run, keys)?;
            Some(key.map(|key| key.name.clone()))
        };
        assert_eq!(signer(&keys), Some(Some("bob".to_owned())));
        assert_eq!(signer(&[key("bob", "3")]), None, "the key was replaced");
        assert_eq!(signer(&[]), None);
    }
}
