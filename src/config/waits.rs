//! `[wait]`: the events of the world outside that runs wait for.

use std::time::Duration;

use crate::settings::kinds::{Seconds, Whole};
use crate::settings::section::section;

section! {
    /// `[wait]`: events at `POST /events`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Waits {
        /// How long an event counts for waits that begin after it, in seconds.
        pub lookback: Duration = Duration::from_secs(60), Seconds(0);
        /// The most events that are kept of one key.
        pub max_events: u64 = 10_000, Whole(1..=10_000_000);
    }
}
