//! The numbers of a response's events: the number of the last committed event of the run × 2^20, plus a place. The place says how
//! much of the response a client has, so that it can reconnect with the number, also to another process.

/// Between the numbers of two committed events.
const NUMBERS_PER_EVENT: u64 = 1 << 20;
/// The run's first event, which the response begins after.
pub const FIRST_EVENT: u64 = 1;

pub const CREATED: u64 = 0;
pub const IN_PROGRESS: u64 = 1;

/// An item of a text that is recorded comes after the event of its reply.
pub const ADDED: u64 = 2;
pub const PART_ADDED: u64 = 3;
pub const WHOLE_TEXT: u64 = 4;
pub const TEXT_DONE: u64 = 5;
pub const PART_DONE: u64 = 6;
pub const DONE: u64 = 7;

/// The item of a reply that is being written begins after the event of the reply before it.
pub const LIVE_ADDED: u64 = 8;
pub const LIVE_PART_ADDED: u64 = 9;
/// Plus the bytes of the text so far.
const LIVE_TEXT: u64 = 10;
/// The longest text that is sent in pieces; a longer one follows as a whole.
pub const MAX_LIVE_TEXT: usize = 900_000;

/// Plus [`FRAMES_PER_CALL`] for each call of the client before.
const CALLS: u64 = 1_000_000;
const FRAMES_PER_CALL: u64 = 4;
pub const FINAL: u64 = NUMBERS_PER_EVENT - 1;

pub fn live_text(bytes: usize) -> u64 {
    LIVE_TEXT + bytes.min(MAX_LIVE_TEXT) as u64
}

pub fn call_frame(call: usize, frame: u64) -> u64 {
    (CALLS + call as u64 * FRAMES_PER_CALL + frame).min(FINAL - 1)
}

/// Gives out numbers in ascending order.
#[derive(Debug)]
pub struct Numbers {
    last_event: u64,
    last: Option<u64>,
}

impl Numbers {
    /// After the number of `cursor`.
    pub fn new(cursor: Option<Cursor>) -> Self {
        Self {
            last_event: cursor.map_or(FIRST_EVENT, |cursor| cursor.event.max(FIRST_EVENT)),
            last: cursor.map(|cursor| cursor.number),
        }
    }

    pub fn committed(&mut self, event: u64) {
        self.last_event = self.last_event.max(event);
    }

    pub fn last_event(&self) -> u64 {
        self.last_event
    }

    /// The last number that was given out, or that the client has.
    pub fn last(&self) -> u64 {
        self.last.unwrap_or_default()
    }

    /// The number for a place after an event, or the next one.
    pub fn after(&mut self, event: u64, place: u64) -> u64 {
        let wanted = event
            .saturating_mul(NUMBERS_PER_EVENT)
            .saturating_add(place);
        let next = self.last.map_or(0, |last| last.saturating_add(1));
        let number = wanted.max(next);
        self.last = Some(number);
        number
    }
}

/// The number that a client reconnects with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    number: u64,
    pub event: u64,
    place: u64,
}

impl Cursor {
    pub fn new(number: u64) -> Self {
        Self {
            number,
            event: number / NUMBERS_PER_EVENT,
            place: number % NUMBERS_PER_EVENT,
        }
    }

    /// Whether the client has the event that a frame at this place after the first event is.
    pub fn has_first(self, place: u64) -> bool {
        (self.event, self.place) >= (FIRST_EVENT, place)
    }

    /// The first frame that the client lacks of the item of a recorded reply; after [`DONE`] if it has the item. `reply` is the
    /// number of the reply's event, `previous` that of the reply before.
    pub fn next_frame(self, previous: u64, reply: u64) -> u64 {
        if self.event > reply {
            return DONE + 1;
        }
        if self.event == reply {
            return (self.place + 1).clamp(ADDED, DONE + 1);
        }
        match self.live_position(previous) {
            None => ADDED,
            Some(LivePosition {
                has_part: false, ..
            }) => PART_ADDED,
            Some(_) => TEXT_DONE,
        }
    }

    /// What the client has of a text whose reply was not recorded, if it has its item.
    pub fn live_position(self, previous: u64) -> Option<LivePosition> {
        let is_live = self.event >= previous && (LIVE_ADDED..CALLS).contains(&self.place);
        is_live.then(|| LivePosition {
            has_part: self.place >= LIVE_PART_ADDED,
            bytes: usize::try_from(self.place.saturating_sub(LIVE_TEXT)).unwrap_or(usize::MAX),
        })
    }

    pub fn has_call_frame(self, call: usize, frame: u64) -> bool {
        self.place >= call_frame(call, frame)
    }

    pub fn is_final(self) -> bool {
        self.place == FINAL
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivePosition {
    pub has_part: bool,
    pub bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::{
        ADDED, Cursor, DONE, FINAL, LIVE_ADDED, LivePosition, Numbers, PART_ADDED, TEXT_DONE,
        live_text,
    };

    #[test]
    fn numbers_ascend() {
        let mut numbers = Numbers::new(None);
        assert_eq!(numbers.after(1, 0), 1 << 20);
        numbers.committed(2);
        assert_eq!(numbers.after(numbers.last_event(), 9), (2 << 20) + 9);
        assert_eq!(
            numbers.after(2, 8),
            (2 << 20) + 10,
            "a text that replaces one"
        );
        let mut resumed = Numbers::new(Some(Cursor::new(u64::MAX)));
        assert_eq!(resumed.after(3, FINAL), u64::MAX);
    }

    #[test]
    fn a_cursor_says_what_the_client_has() {
        let at = |event: u64, place: u64| Cursor::new((event << 20) + place);
        // The reply before is event 4, the reply event 9.
        for (cursor, next) in [
            (at(1, 1), ADDED),
            (at(4, DONE), ADDED),
            (at(4, LIVE_ADDED), PART_ADDED),
            (at(7, live_text(30)), TEXT_DONE),
            (at(9, TEXT_DONE), TEXT_DONE + 1),
            (at(9, DONE), DONE + 1),
            (at(9, live_text(3)), DONE + 1),
            (at(10, 0), DONE + 1),
            (at(3, live_text(30)), ADDED),
        ] {
            assert_eq!(cursor.next_frame(4, 9), next, "{cursor:?}");
        }
        assert_eq!(
            at(9, live_text(3)).live_position(9),
            Some(LivePosition {
                has_part: true,
                bytes: 3
            })
        );
        assert_eq!(at(9, DONE).live_position(9), None);
        assert_eq!(at(9, FINAL).live_position(9), None);
        assert!(at(9, FINAL).is_final());
    }
}
