//! Encrypts logins with AES-256-GCM. Every encryption has a new random nonce; what is not secret is authenticated with it.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};

/// Hashed with a key to name it.
const KEY_LABEL: &[u8] = b"axed login key\0";

/// A key for logins.
pub struct LoginCipher {
    key: RandomizedNonceKey,
    /// Tells keys apart without revealing them.
    pub key_id: String,
}

impl LoginCipher {
    /// The cipher for a key of 64 hexadecimal digits; `None` if the text is not that.
    pub fn new(text: &SecretString) -> Option<Self> {
        let text = text.expose_secret().trim();
        let is_hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digits = is_hex.then(|| text.as_bytes().chunks_exact(2))?;
        let bytes = digits.filter_map(|pair| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        });
        let bytes: Vec<u8> = bytes.collect();
        let digest = Sha256::new().chain_update(KEY_LABEL).chain_update(&bytes);
        let digest = digest.finalize();
        Some(Self {
            key: RandomizedNonceKey::new(&AES_256_GCM, &bytes).ok()?,
            key_id: digest[..8].iter().map(|it| format!("{it:02x}")).collect(),
        })
    }

    /// The nonce and the encrypted text; `None` if the system has no random numbers.
    pub fn seal(&self, header: &[u8], mut text: Vec<u8>) -> Option<Vec<u8>> {
        let sealed = self
            .key
            .seal_in_place_append_tag(Aad::from(header), &mut text);
        let mut sealed = sealed.ok()?.as_ref().to_vec();
        sealed.append(&mut text);
        Some(sealed)
    }

    /// The text; `None` if it, the header or the key is not the one of the encryption.
    pub fn open(&self, header: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, text) = sealed.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut text = text.to_vec();
        let opened = self.key.open_in_place(nonce, Aad::from(header), &mut text);
        Some(opened.ok()?.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use secrecy::SecretString;

    use super::LoginCipher;

    fn cipher(text: &str) -> Option<LoginCipher> {
        LoginCipher::new(&SecretString::from(text))
    }

    #[test]
    fn only_the_same_key_and_header_open_a_text() {
        let key = cipher(&format!(" {}\n", "0aF1".repeat(16))).expect("a key");
        let sealed = key.seal(b"header", b"secret".to_vec()).expect("sealed");
        assert!(!sealed.windows(6).any(|it| it == b"secret"));
        assert_eq!(
            key.open(b"header", &sealed).as_deref(),
            Some(&b"secret"[..])
        );
        assert_ne!(
            key.seal(b"header", b"secret".to_vec()),
            Some(sealed.clone())
        );
        let other = cipher(&"1aF1".repeat(16)).expect("a key");
        assert_ne!(other.key_id, key.key_id);
        assert_eq!(other.open(b"header", &sealed), None);
        assert_eq!(key.open(b"Header", &sealed), None);
        for end in 0..sealed.len() {
            assert_eq!(key.open(b"header", &sealed[..end]), None);
        }
        for at in 0..sealed.len() {
            let mut damaged = sealed.clone();
            damaged[at] ^= 1;
            assert_eq!(key.open(b"header", &damaged), None);
        }
    }

    #[test]
    fn a_key_is_64_hexadecimal_digits() {
        for bad in ["", "0a", &"g".repeat(64), &"a".repeat(63), &"é".repeat(32)] {
            assert!(cipher(bad).is_none(), "{bad}");
        }
    }
}
