//! Signs messages as Standard Webhooks has it (github.com/standard-webhooks/standard-webhooks, spec, "Signature scheme"):
//! HMAC-SHA256 over `id.timestamp.body`. Knows no HTTP.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretBox, SecretString};
use sha2::Sha256;

/// How a secret begins that is written as base64.
const SECRET_PREFIX: &str = "whsec_";

/// What a receiver shares with us.
pub struct SigningSecret(SecretBox<Vec<u8>>);

impl SigningSecret {
    /// `whsec_` with base64 behind it is the bytes that it stands for, everything else the text as it is. The error
    /// follows the name of the place that it was found in.
    pub fn parse(text: &SecretString) -> Result<Self, String> {
        let text = text.expose_secret();
        let bytes = match text.strip_prefix(SECRET_PREFIX) {
            Some(encoded) => STANDARD.decode(encoded).map_err(|_| {
                format!("begins with {SECRET_PREFIX}, but what follows is not base64")
            })?,
            None => text.as_bytes().to_vec(),
        };
        match bytes.is_empty() {
            true => Err("holds an empty secret".to_owned()),
            false => Ok(Self(SecretBox::new(Box::new(bytes)))),
        }
    }

    /// The value of `webhook-signature`; `at` is `webhook-timestamp`, in seconds.
    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let signature = self.mac(format!("{id}.{timestamp}.{body}").as_bytes());
        format!("v1,{}", STANDARD.encode(signature))
    }

    fn mac(&self, text: &[u8]) -> Vec<u8> {
        // HMAC takes a key of any length, so this is never empty.
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

    use super::SigningSecret;

    fn parse_secret(text: &str) -> Result<SigningSecret, String> {
        SigningSecret::parse(&SecretString::from(text.to_owned()))
    }

    /// The example of the specification's own libraries.
    #[test]
    fn the_specifications_example_is_signed_as_there() {
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
    fn a_secret_that_is_none_is_refused_without_being_shown() {
        for bad in ["whsec_", "whsec_no base64!", ""] {
            let message = parse_secret(bad).err().expect("no secret");
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
