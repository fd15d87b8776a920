//! A client key's SHA-256: all that the configuration knows of a key.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

/// SHA-256 of a client key. `Display` prints it in hex; `Debug` hides it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    pub fn digest(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// Compares in constant time.
    pub fn matches(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// `None` if the text is not 64 hex digits.
    pub fn parse_hex(hex: &str) -> Option<Self> {
        let mut hash = [0; 32];
        let hex = hex.trim();
        if hex.len() != 2 * hash.len() || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, digits) in hash.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Self(hash))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::KeyHash;

    #[test]
    fn a_digest_is_read_as_it_is_shown() {
        let hash = KeyHash::digest(b"abc");
        let shown = hash.to_string();
        assert_eq!(
            shown,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(KeyHash::parse_hex(&shown), Some(hash));
        assert_eq!(KeyHash::parse_hex(&shown.to_uppercase()), Some(hash));
        assert!(bool::from(hash.matches(&KeyHash::digest(b"abc"))));
        assert!(!bool::from(hash.matches(&KeyHash::digest(b"abd"))));
        assert_eq!(format!("{hash:?}"), "KeyHash(…)");
        for bad in [
            "",
            "axed_ab",
            &shown[1..],
            &format!("{shown}0"),
            &"ä".repeat(32),
        ] {
            assert_eq!(KeyHash::parse_hex(bad), None, "{bad}");
        }
    }
}
