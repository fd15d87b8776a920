//! Feedback links: each lets everybody who has it score one run under one name, without a key. A link is what it is for and a signature:
//! nothing is stored of it.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::Mac;
use jiff::Timestamp;
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::domain::score::is_score_name;
use crate::store::link_secret::LinkSecret;
use crate::web::tickets;

/// What a signature is for: one for something else is invalid.
const PURPOSE: &[u8] = b"feedback on a run";
const SIGNATURE_BYTES: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedbackLink {
    pub run: RunId,
    /// The name of the score.
    pub name: String,
    /// In whole seconds.
    pub expires_at: Timestamp,
}

impl FeedbackLink {
    /// The secret part of the link's path.
    pub fn token(&self, secret: &LinkSecret) -> String {
        let mut bytes = self.run.0.as_bytes().to_vec();
        bytes.extend(self.expires_at.as_second().to_be_bytes());
        bytes.extend(self.name.as_bytes());
        let mut mac = tickets::signature(secret, PURPOSE);
        mac.update(&bytes);
        bytes.extend(mac.finalize().into_bytes());
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// `None` if this secret has not signed it.
    pub fn read(token: &str, secret: &LinkSecret) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (signed, signature) =
            bytes.split_at_checked(bytes.len().checked_sub(SIGNATURE_BYTES)?)?;
        let mut mac = tickets::signature(secret, PURPOSE);
        mac.update(signed);
        mac.verify_slice(signature).ok()?;
        let (run, rest) = signed.split_first_chunk::<16>()?;
        let (seconds, name) = rest.split_first_chunk::<8>()?;
        let name = std::str::from_utf8(name)
            .ok()
            .filter(|name| is_score_name(name))?;
        Some(Self {
            run: RunId(Uuid::from_bytes(*run)),
            name: name.to_owned(),
            expires_at: Timestamp::from_second(i64::from_be_bytes(*seconds)).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use secrecy::SecretBox;

    use super::FeedbackLink;
    use crate::domain::run::RunId;

    #[test]
    fn a_link_is_read_as_it_was_signed_and_not_when_it_was_changed() {
        let secret = SecretBox::new(Box::new([7; 32]));
        let link = FeedbackLink {
            run: RunId::new(),
            name: "thumbs".to_owned(),
            expires_at: Timestamp::from_second(1_800_000_000).expect("a time"),
        };
        let token = link.token(&secret);
        assert_eq!(FeedbackLink::read(&token, &secret), Some(link));
        let other = SecretBox::new(Box::new([8; 32]));
        assert_eq!(FeedbackLink::read(&token, &other), None);
        for at in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'B' { b'C' } else { b'B' };
            let changed = String::from_utf8(changed).expect("a text");
            assert_eq!(FeedbackLink::read(&changed, &secret), None, "{at}");
            assert_eq!(FeedbackLink::read(&token[..at], &secret), None, "{at}");
        }
    }
}
