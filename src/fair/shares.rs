//! Divides a capacity: half is split into one share per configured key, which no other key may take; the other half is
//! common.

#[derive(Debug)]
pub struct Shares {
    /// The share of each key.
    share: usize,
    common_capacity: usize,
    common_used: usize,
}

impl Shares {
    /// Splits half of `capacity` between `keys`, at least `min_share` for each.
    pub fn new(capacity: usize, keys: usize, min_share: usize) -> Self {
        let half = capacity / 2;
        let share = match (capacity, half.checked_div(keys)) {
            (0, _) | (_, None) => 0,
            (_, Some(share)) => share.max(min_share),
        };
        Self {
            share,
            common_capacity: capacity - share.saturating_mul(keys).min(half),
            common_used: 0,
        }
    }

    /// The share of a key; only configured keys have one.
    pub fn share(&self, is_configured: bool) -> usize {
        match is_configured {
            true => self.share,
            false => 0,
        }
    }

    /// Whether a key with this share that uses `used` may take one more.
    pub fn has_capacity(&self, share: usize, used: usize) -> bool {
        used < share || self.common_used < self.common_capacity
    }

    /// Takes one more for a key with this share that used `used` before, even beyond the capacity.
    pub fn add(&mut self, share: usize, used: usize) {
        if used >= share {
            self.common_used += 1;
        }
    }

    /// Gives one back for a key with this share that used `used` before.
    pub fn remove(&mut self, share: usize, used: usize) {
        if used > share {
            self.common_used -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Shares;

    #[test]
    fn half_is_split_between_keys_and_half_is_common() {
        let parts = |capacity, keys, min_share| {
            let shares = Shares::new(capacity, keys, min_share);
            (shares.share, shares.common_capacity)
        };
        assert_eq!(parts(100, 0, 1), (0, 100));
        assert_eq!(parts(100, 2, 1), (25, 50));
        // What cannot be split evenly stays common.
        assert_eq!(parts(100, 3, 1), (16, 52));
        assert_eq!(parts(4, 10, 1), (1, 2));
        assert_eq!(parts(4, 10, 0), (0, 4));
        assert_eq!(parts(1, 2, 1), (1, 1));
        assert_eq!(parts(0, 2, 1), (0, 0));
    }

    #[test]
    fn a_key_uses_its_share_first_and_frees_it_last() {
        let mut shares = Shares::new(4, 2, 1);
        let share = shares.share(true);
        for used in 0..3 {
            assert!(shares.has_capacity(share, used));
            shares.add(share, used);
        }
        assert!(!shares.has_capacity(share, 3));
        // The other key has its own share; a key that is not configured has none.
        assert!(shares.has_capacity(share, 0) && !shares.has_capacity(0, 0));
        shares.remove(share, 3);
        assert!(shares.has_capacity(0, 0));
    }
}
