//! Which version a root run of an agent with a rollout gets.

use sha2::{Digest, Sha256};

use crate::settings::choice::choice;

choice! {
    /// The version that a root run of an agent with a rollout got.
    pub enum Variant {
        /// The agent's current version.
        Current = "current",
        /// The candidate of its rollout.
        Candidate = "candidate",
    }
}

/// Whether a session, or a run without one, is in the share of the candidate. Each share contains the smaller ones.
pub fn is_candidates(key: &[u8], percent: f64) -> bool {
    // Scorers sample by the digest of the run's id alone: of the candidate's runs they would score another share than of the others.
    let digest = Sha256::new_with_prefix("rollout")
        .chain_update(key)
        .finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    (u64::from_be_bytes(first) as f64) < percent / 100.0 * u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::is_candidates;

    #[test]
    fn shares_are_kept_and_contain_the_smaller_ones() {
        let keys: Vec<String> = (0..10_000)
            .map(|number| format!("session {number}"))
            .collect();
        let taken = |percent| -> Vec<&String> {
            let keys = keys.iter();
            keys.filter(|key| is_candidates(key.as_bytes(), percent))
                .collect()
        };
        let (tenth, fifth) = (taken(10.0), taken(20.0));
        assert!((800..1_200).contains(&tenth.len()), "{}", tenth.len());
        assert!(tenth.iter().all(|key| fifth.contains(key)));
        assert_eq!((taken(0.0).len(), taken(100.0).len()), (0, keys.len()));
    }
}
