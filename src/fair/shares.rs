//! Room of which every configured key has a part that no other may take, while half of it is for whoever comes first.

/// The room and who has taken of it.
#[derive(Debug)]
pub struct Shares {
    /// Of each key.
    part: usize,
    /// What is left for whoever comes first.
    common: usize,
    /// Of that, what is taken.
    taken: usize,
}

impl Shares {
    /// So much room for so many keys: half of it is shared out between them, at least `least` for each.
    pub fn new(room: usize, keys: usize, least: usize) -> Self {
        let half = room / 2;
        let part = match (room, half.checked_div(keys)) {
            (0, _) | (_, None) => 0,
            (_, Some(part)) => part.max(least),
        };
        Self {
            part,
            common: room - part.saturating_mul(keys).min(half),
            taken: 0,
        }
    }

    /// The part of a key, where it is configured.
    pub fn part(&self, is_configured: bool) -> usize {
        match is_configured {
            true => self.part,
            false => 0,
        }
    }

    /// Whether there is room for one more of a key that has this part and has taken so much.
    pub fn has_room(&self, part: usize, taken: usize) -> bool {
        taken < part || self.taken < self.common
    }

    /// One more of a key that has this part and had taken so much before, whether there is room or not.
    pub fn add(&mut self, part: usize, taken: usize) {
        if taken >= part {
            self.taken += 1;
        }
    }

    /// One less of a key that has this part and had taken so much before.
    pub fn remove(&mut self, part: usize, taken: usize) {
        if taken > part {
            self.taken -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Shares;

    #[test]
    fn half_is_shared_out_and_the_rest_is_for_whoever_comes_first() {
        let parts = |room, keys, least| {
            let shares = Shares::new(room, keys, least);
            (shares.part, shares.common)
        };
        assert_eq!(parts(100, 0, 1), (0, 100));
        assert_eq!(parts(100, 2, 1), (25, 50));
        // What cannot be shared out evenly stays common.
        assert_eq!(parts(100, 3, 1), (16, 52));
        assert_eq!(parts(4, 10, 1), (1, 2));
        assert_eq!(parts(4, 10, 0), (0, 4));
        assert_eq!(parts(1, 2, 1), (1, 1));
        assert_eq!(parts(0, 2, 1), (0, 0));
    }

    #[test]
    fn a_key_takes_its_part_first_and_gives_it_back_last() {
        let mut shares = Shares::new(4, 2, 1);
        let part = shares.part(true);
        for taken in 0..3 {
            assert!(shares.has_room(part, taken));
            shares.add(part, taken);
        }
        assert!(!shares.has_room(part, 3));
        // The other key has its own, and who is not configured has none.
        assert!(shares.has_room(part, 0) && !shares.has_room(0, 0));
        shares.remove(part, 3);
        assert!(shares.has_room(0, 0));
    }
}
