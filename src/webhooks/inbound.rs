//! Checks the signatures of webhooks that others send. Sources: Standard Webhooks (github.com/standard-webhooks/standard-webhooks,
//! "Verifying signatures"), GitHub ("Validating webhook deliveries"), Stripe ("Verify webhook signatures manually").

use hmac::{Hmac, KeyInit, Mac};
use jiff::{SignedDuration, Timestamp};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use crate::domain::trigger::TriggerKind;
use crate::signed_http::signature::SigningSecret;

/// How far the time of a signature may be from the daemon's clock.
const TOLERANCE: SignedDuration = SignedDuration::from_mins(5);
/// Signatures of one request that are compared: a sender that changes its secret signs with both.
const MAX_SIGNATURES: usize = 8;
/// As in requests with an `Idempotency-Key`.
const MAX_ID: usize = 255;

/// The headers that a request is signed with.
#[derive(Debug)]
pub enum SignedHeaders<'h> {
    Standard {
        id: &'h str,
        timestamp: i64,
        signatures: &'h str,
    },
    Github {
        id: &'h str,
        signature: &'h str,
    },
    Stripe {
        timestamp: i64,
        signatures: Vec<&'h str>,
    },
}

impl<'h> SignedHeaders<'h> {
    /// `None` if a header is missing or invalid, or the time of the signature is too far from `now`.
    pub fn read(
        kind: TriggerKind,
        header: impl Fn(&'static str) -> Option<&'h str>,
        now: Timestamp,
    ) -> Option<Self> {
        let headers = match kind {
            TriggerKind::Standard => Self::Standard {
                id: checked_id(header("webhook-id")?)?,
                timestamp: parse_time(header("webhook-timestamp")?, now)?,
                signatures: header("webhook-signature")?,
            },
            TriggerKind::Github => Self::Github {
                id: checked_id(header("x-github-delivery")?)?,
                signature: header("x-hub-signature-256")?.strip_prefix("sha256=")?,
            },
            TriggerKind::Stripe => {
                let fields = || {
                    header("stripe-signature")
                        .into_iter()
                        .flat_map(stripe_fields)
                };
                let timestamp = fields().find(|(name, _)| *name == "t")?.1;
                let signatures = fields().filter(|(name, _)| *name == "v1");
                Self::Stripe {
                    timestamp: parse_time(timestamp, now)?,
                    signatures: signatures.map(|(_, value)| value).collect(),
                }
            }
        };
        Some(headers)
    }

    /// Whether the body has one of the signatures. Compares in constant time.
    pub fn are_of(&self, secret: &SecretString, body: &[u8]) -> bool {
        match self {
            Self::Standard {
                id,
                timestamp,
                signatures,
            } => {
                let Ok(secret) = SigningSecret::parse(secret) else {
                    return false;
                };
                let prefix = format!("{id}.{timestamp}.");
                let signatures = signatures.split(' ').take(MAX_SIGNATURES);
                let mut signatures = signatures.filter_map(|it| it.strip_prefix("v1,"));
                signatures.any(|it| secret.has_signed(&[prefix.as_bytes(), body], it))
            }
            Self::Github { signature, .. } => is_hex_mac(secret, &[body], signature),
            Self::Stripe {
                timestamp,
                signatures,
            } => {
                let prefix = format!("{timestamp}.");
                let mut signatures = signatures.iter().take(MAX_SIGNATURES);
                signatures.any(|it| is_hex_mac(secret, &[prefix.as_bytes(), body], it))
            }
        }
    }

    /// The sender's id of the event; Stripe has it in the body.
    pub fn event_id(&self, body: &serde_json::Value) -> Option<String> {
        match self {
            Self::Standard { id, .. } | Self::Github { id, .. } => Some((*id).to_owned()),
            Self::Stripe { .. } => checked_id(body.get("id")?.as_str()?).map(str::to_owned),
        }
    }
}

fn checked_id(id: &str) -> Option<&str> {
    let is_valid = (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|it| it.is_ascii_graphic());
    is_valid.then_some(id)
}

/// Unix seconds that are close to `now`.
fn parse_time(text: &str, now: Timestamp) -> Option<i64> {
    let second: i64 = text.parse().ok()?;
    let distance = now.duration_since(Timestamp::from_second(second).ok()?);
    (distance.abs() <= TOLERANCE).then_some(second)
}

fn stripe_fields(header: &str) -> impl Iterator<Item = (&str, &str)> {
    let fields = header.split(',').filter_map(|it| it.split_once('='));
    fields.map(|(name, value)| (name.trim(), value.trim()))
}

/// Whether a text is the hexadecimal HMAC of these bytes.
fn is_hex_mac(secret: &SecretString, parts: &[&[u8]], signature: &str) -> bool {
    let secret = secret.expose_secret().as_bytes();
    // HMAC takes a key of any length, so this never fails.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else {
        return false;
    };
    parts.iter().for_each(|part| mac.update(part));
    let Some(signature) = from_hex(signature).filter(|_| !secret.is_empty()) else {
        return false;
    };
    mac.verify_slice(&signature).is_ok()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    if bytes.len() != 64 || !text.is_ascii() {
        return None;
    }
    let pairs = bytes.chunks(2);
    pairs
        .map(|pair| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use secrecy::SecretString;

    use super::SignedHeaders;
    use crate::domain::trigger::TriggerKind;

    fn accepts(
        kind: TriggerKind,
        headers: &[(&str, &str)],
        secret: &str,
        body: &str,
        now: i64,
    ) -> bool {
        let now = Timestamp::from_second(now).expect("a time");
        let header = |name: &'static str| {
            let found = headers.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| *value)
        };
        let signed = SignedHeaders::read(kind, header, now);
        signed.is_some_and(|it| it.are_of(&SecretString::from(secret), body.as_bytes()))
    }

    /// The example of GitHub's documentation.
    #[test]
    fn githubs_example_is_accepted() {
        let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        let headers = [
            ("x-github-delivery", "72d3162e"),
            ("x-hub-signature-256", signature),
        ];
        let accepts = |secret, body| accepts(TriggerKind::Github, &headers, secret, body, 0);
        assert!(accepts("It's a Secret to Everybody", "Hello, World!"));
        assert!(!accepts("It's a Secret to Everybody", "Hello, World?"));
        assert!(!accepts("It's another", "Hello, World!"));
    }

    /// The example of the Standard Webhooks specification.
    #[test]
    fn the_example_of_standard_webhooks_is_accepted_within_five_minutes() {
        let headers = [
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("webhook-timestamp", "1614265330"),
            (
                "webhook-signature",
                "v2,x v1,eHg= v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            ),
        ];
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let accepts = |at, body| accepts(TriggerKind::Standard, &headers, secret, body, at);
        let body = r#"{"test": 2432232314}"#;
        for (offset, is_accepted) in [
            (0, true),
            (300, true),
            (-300, true),
            (301, false),
            (-301, false),
        ] {
            assert_eq!(
                accepts(1_614_265_330 + offset, body),
                is_accepted,
                "{offset}"
            );
        }
        assert!(!accepts(1_614_265_330, r#"{"test": 2432232315}"#));
    }
}
