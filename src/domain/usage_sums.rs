//! Sums of the usage of many runs, with a histogram of their durations. All numbers are integers, so sums are exact and can
//! be subtracted again.

/// Sums over runs. Negative numbers occur only between an addition and a subtraction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSums {
    pub runs: i128,
    pub roots: i128,
    pub failed: i128,
    pub cancelled: i128,
    pub input_tokens: i128,
    pub output_tokens: i128,
    pub cache_read_tokens: i128,
    pub cache_write_tokens: i128,
    pub reasoning_tokens: i128,
    pub model_calls: i128,
    pub tool_calls: i128,
    /// Picodollars.
    pub cost: i128,
    /// How many of the summands have a cost.
    pub priced: i128,
    /// Billed requests without reported usage.
    pub unreported: i128,
    pub durations: Durations,
}

/// A histogram of milliseconds: the number of runs by class. Below 64 ms a class is one millisecond; above, each power of two
/// has 32 classes, so that the middle of a class is at most 1/64 away from every value in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations(Vec<(u16, i64)>);

const EXACT_BITS: u32 = 6;
const CLASS_BITS: u32 = EXACT_BITS - 1;
const EXACT: u64 = 1 << EXACT_BITS;
const CLASSES: u64 = 1 << CLASS_BITS;
/// The bits of a number that are read with the arithmetic of 64 bits: nine groups of seven.
const LOW_BITS: u32 = 63;

/// The text is not an encoded sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sum of usage is damaged")]
pub struct DamagedSums;

impl UsageSums {
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.numbers_mut().into_iter().zip(other.numbers()) {
            *sum = sum.saturating_add(more);
        }
        for (class, count) in &other.durations.0 {
            self.durations.add_to_class(*class, *count);
        }
    }

    /// Adds encoded sums. A report adds hundreds of thousands, so they are not decoded into a value of their own. After an
    /// error, only a part is added.
    pub fn add_encoded(&mut self, bytes: &[u8]) -> Result<(), DamagedSums> {
        self.apply_encoded(bytes, 1)
    }

    /// Subtracts encoded sums. After an error, only a part is subtracted.
    pub fn subtract_encoded(&mut self, bytes: &[u8]) -> Result<(), DamagedSums> {
        self.apply_encoded(bytes, -1)
    }

    fn apply_encoded(&mut self, mut bytes: &[u8], sign: i64) -> Result<(), DamagedSums> {
        for sum in self.numbers_mut() {
            // Most numbers of most sums are zero.
            if let [0, rest @ ..] = bytes {
                bytes = rest;
                continue;
            }
            let number = i128::try_from(read_number(&mut bytes)?).map_err(|_| DamagedSums)?;
            *sum = sum.saturating_add(number * i128::from(sign));
        }
        while !bytes.is_empty() {
            let class = u16::try_from(read_number(&mut bytes)?).map_err(|_| DamagedSums)?;
            let count = i64::try_from(read_number(&mut bytes)?).map_err(|_| DamagedSums)?;
            self.durations.add_to_class(class, count * sign);
        }
        Ok(())
    }

    /// Whether nothing is counted.
    pub fn is_empty(&self) -> bool {
        self.numbers().iter().all(|number| *number == 0)
    }

    fn numbers(&self) -> [i128; 14] {
        [
            self.runs,
            self.roots,
            self.failed,
            self.cancelled,
            self.input_tokens,
            self.output_tokens,
            self.cache_read_tokens,
            self.cache_write_tokens,
            self.reasoning_tokens,
            self.model_calls,
            self.tool_calls,
            self.cost,
            self.priced,
            self.unreported,
        ]
    }

    fn numbers_mut(&mut self) -> [&mut i128; 14] {
        [
            &mut self.runs,
            &mut self.roots,
            &mut self.failed,
            &mut self.cancelled,
            &mut self.input_tokens,
            &mut self.output_tokens,
            &mut self.cache_read_tokens,
            &mut self.cache_write_tokens,
            &mut self.reasoning_tokens,
            &mut self.model_calls,
            &mut self.tool_calls,
            &mut self.cost,
            &mut self.priced,
            &mut self.unreported,
        ]
    }

    /// The numbers and then the classes with their counts, as variable-length integers (LEB128).
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        for number in self.numbers() {
            write_number(&mut bytes, number.max(0).unsigned_abs());
        }
        for (class, count) in &self.durations.0 {
            write_number(&mut bytes, u128::from(*class));
            write_number(&mut bytes, u128::from(count.max(&0).unsigned_abs()));
        }
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DamagedSums> {
        let mut sums = Self::default();
        sums.add_encoded(bytes)?;
        Ok(sums)
    }
}

impl Durations {
    /// Counts one run.
    pub fn add(&mut self, milliseconds: u64) {
        self.add_to_class(class_of(milliseconds), 1);
    }

    fn add_to_class(&mut self, class: u16, count: i64) {
        match self.0.binary_search_by_key(&class, |(class, _)| *class) {
            Ok(at) => self.0[at].1 = self.0[at].1.saturating_add(count),
            Err(at) => self.0.insert(at, (class, count)),
        }
    }

    /// The duration in milliseconds that `percent` of the runs do not exceed, within 2 %; `None` without runs.
    pub fn percentile(&self, percent: u8) -> Option<u64> {
        let total: i128 = self.0.iter().map(|(_, count)| i128::from(*count)).sum();
        let rank = (total * i128::from(percent)).div_euclid(100)
            + i128::from((total * i128::from(percent)).rem_euclid(100) > 0);
        let mut below = 0;
        let mut classes = self.0.iter();
        let class = classes.find(|(_, count)| {
            below += i128::from(*count);
            below >= rank.max(1)
        });
        class.map(|(class, _)| middle_of(*class))
    }
}

fn class_of(milliseconds: u64) -> u16 {
    if milliseconds < EXACT {
        return milliseconds as u16;
    }
    let power = milliseconds.ilog2();
    let class = (milliseconds >> (power - CLASS_BITS)) & (CLASSES - 1);
    (EXACT + u64::from(power - EXACT_BITS) * CLASSES + class) as u16
}

fn middle_of(class: u16) -> u64 {
    let class = u64::from(class);
    if class < EXACT {
        return class;
    }
    let power = (class - EXACT) / CLASSES + u64::from(EXACT_BITS);
    let width = 1_u64 << (power.min(63) - u64::from(CLASS_BITS));
    let first = (CLASSES + (class - EXACT) % CLASSES).saturating_mul(width);
    first.saturating_add(width / 2)
}

fn write_number(bytes: &mut Vec<u8>, mut number: u128) {
    while number > u128::from(u64::MAX) {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    // Almost all numbers are small, and shifts of 128 bits are slow.
    let mut low = number as u64;
    while low > 0x7f {
        bytes.push((low & 0x7f) as u8 | 0x80);
        low >>= 7;
    }
    bytes.push(low as u8);
}

fn read_number(bytes: &mut &[u8]) -> Result<u128, DamagedSums> {
    let (mut low, mut shift) = (0_u64, 0);
    while let [byte, rest @ ..] = *bytes {
        *bytes = rest;
        low |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return Ok(low.into());
        }
        if shift == LOW_BITS {
            return Ok(u128::from(low) | read_high(bytes)? << LOW_BITS);
        }
    }
    Err(DamagedSums)
}

/// The rest of a number that is larger than [`LOW_BITS`].
fn read_high(bytes: &mut &[u8]) -> Result<u128, DamagedSums> {
    let mut number = 0_u128;
    for shift in (0..u128::BITS - LOW_BITS).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(DamagedSums)?;
        *bytes = rest;
        number |= u128::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(DamagedSums)
}

#[cfg(test)]
mod tests {
    use super::{Durations, UsageSums, class_of, middle_of};

    #[test]
    fn the_middle_of_a_class_is_within_two_percent() {
        let mut previous = 0;
        for exponent in 0..64 {
            for offset in [0, 1, 7, 12_345] {
                let milliseconds = (1_u64 << exponent) + offset % (1 << exponent);
                let middle = middle_of(class_of(milliseconds));
                let error = middle.abs_diff(milliseconds) as f64 / milliseconds as f64;
                assert!(error <= 0.02, "{milliseconds} becomes {middle}");
                assert!(class_of(1_u64 << exponent) >= previous);
            }
            previous = class_of(1_u64 << exponent);
        }
        assert_eq!(middle_of(class_of(63)), 63);
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut durations = Durations::default();
        assert_eq!(durations.percentile(50), None);
        for milliseconds in 1..=20 {
            durations.add(milliseconds);
        }
        assert_eq!(durations.percentile(50), Some(10));
        assert_eq!(durations.percentile(95), Some(19));
    }

    #[test]
    fn sums_are_stored_and_subtracted_exactly() {
        let mut sums = UsageSums {
            runs: 3,
            input_tokens: i128::from(u64::MAX) * 5,
            cost: 1_234_567_890_123,
            ..UsageSums::default()
        };
        for milliseconds in [0, 70, 86_400_000] {
            sums.durations.add(milliseconds);
        }
        let stored = UsageSums::decode(&sums.encode());
        assert_eq!(stored.as_ref(), Ok(&sums));
        let mut twice = sums.clone();
        twice.add(&sums);
        assert_eq!(twice.subtract_encoded(&sums.encode()), Ok(()));
        assert_eq!(twice, sums);
        assert_eq!(twice.subtract_encoded(&sums.encode()), Ok(()));
        assert!(twice.is_empty() && twice.durations.percentile(50).is_none());
        assert!(UsageSums::decode(&[0x80]).is_err());
        let too_large = [[0xff; 19].as_slice(), &[0x7f]].concat();
        assert!(UsageSums::decode(&too_large).is_err());
    }
}
