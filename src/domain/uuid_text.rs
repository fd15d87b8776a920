//! The text of a UUID. Ids of runs are in every event, and the formatter of `uuid` takes longer.

use uuid::Uuid;

/// Where the two digits of each byte are in the text.
const POSITIONS: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
/// The digits of each byte.
static DIGITS: [[u8; 2]; 256] = {
    let digits = b"0123456789abcdef";
    let mut pairs = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [digits[byte >> 4], digits[byte & 15]];
        byte += 1;
    }
    pairs
};

/// Writes the hyphenated text, 36 bytes, to the beginning of the buffer.
///
/// # Panics
/// The buffer is shorter.
pub fn write(id: &Uuid, text: &mut [u8]) {
    let text = &mut text[..36];
    text.copy_from_slice(b"00000000-0000-0000-0000-000000000000");
    for (byte, at) in id.as_bytes().iter().zip(POSITIONS) {
        [text[at], text[at + 1]] = DIGITS[usize::from(*byte)];
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    #[test]
    fn the_text_is_that_of_the_crate() {
        let mut text = [0; 36];
        for n in 0..128_u32 {
            let id = Uuid::from_u128((u128::MAX / 3) ^ (0x0123_4567_89ab_cdef_u128 << n));
            super::write(&id, &mut text);
            assert_eq!(std::str::from_utf8(&text), Ok(&*id.to_string()));
        }
    }
}
