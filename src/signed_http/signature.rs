//! Signs messages by the Standard Webhooks specification (github.com/standard-webhooks/standard-webhooks, "Signature
//! scheme"): HMAC-SHA256 over `id.timestamp.body`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretBox, SecretString};
use sha2::Sha256;

/// The prefix of a secret in Base64.
const SECRET_PREFIX: &str = "whsec_";

/// Why a secret is invalid. The text is the second half of a sentence: the caller puts the name of the secret's source
/// before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("begins with {SECRET_PREFIX}, but the rest is not Base64")]
    NotBase64,
    #[error("contains an empty secret")]
    Empty,
}

/// The secret that the sender and the receiver share.
pub struct SigningSecret(SecretBox<Vec<u8>>);

impl SigningSecret {
    /// `whsec_` followed by Base64 is decoded; any other text is used as it is.
    pub fn parse(text: &SecretString) -> Result<Self, SecretError> {
        let text = text.expose_secret();
        let bytes = match text.strip_prefix(SECRET_PREFIX) {
            Some(encoded) => STANDARD
                .decode(encoded)
                .map_err(|_| SecretError::NotBase64)?,
            None => text.as_bytes().to_vec(),
        };
        match bytes.is_empty() {
            true => Err(SecretError::Empty),
            false => Ok(Self(SecretBox::new(Box::new(bytes)))),
        }
    }

    /// The value of the `webhook-signature` header. `timestamp` is in seconds.
    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let signature = self.mac(format!("{id}.{timestamp}.{body}").as_bytes());
        format!("v1,{}", STANDARD.encode(signature))
    }

    /// Whether a signature in Base64 is that of these bytes. Compares in constant time.
    pub fn has_signed(&self, parts: &[&[u8]], signature: &str) -> bool {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()) else {
            return false;
        };
        parts.iter().for_each(|part| mac.update(part));
        let signature = STANDARD.decode(signature);
        signature.is_ok_and(|signature| mac.verify_slice(&signature).is_ok())
    }

    fn mac(&self, text: &[u8]) -> Vec<u8> {
        // HMAC takes a key of any length, so this never fails.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()) else {
            return Vec::new();
        };
        mac.update(text);
        mac.finalize().into_bytes().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use secrecy::SecretString;

    use super::{SecretError, SigningSecret};

    fn parse_secret(text: &str) -> Result<SigningSecret, SecretError> {
        SigningSecret::parse(&SecretString::from(text.to_owned()))
    }

    /// The example is from the specification's reference libraries.
    #[test]
    fn the_signature_matches_the_specifications_example() {
        let secret = parse_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("a secret");
        assert_eq!(
            secret.sign(
                "msg_p5jXN8AQM9LWM0D4loKWxJek",
                1_614_265_330,
                r#"{"test": 2432232314}"#
            ),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        );
    }

    #[test]
    fn invalid_secrets_are_rejected_without_being_quoted() {
        for bad in ["whsec_", "whsec_no base64!", ""] {
            let message = parse_secret(bad).err().expect("an error").to_string();
            assert!(!message.contains("no base64!"), "{message}");
        }
        assert_eq!(
            parse_secret("MfKQ").expect("a secret").sign("a", 1, ""),
            parse_secret("whsec_TWZLUQ==")
                .expect("a secret")
                .sign("a", 1, "")
        );
    }
}
