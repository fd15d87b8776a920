//! The pieces that a stored body consists of: bytes, parts of the previous body, and references to texts. Pure.

use crate::domain::attachment::Digest;

const LITERAL: u8 = 0;
const TEXT: u8 = 1;
const RAW_TEXT: u8 = 2;
const ATTACHMENT: u8 = 3;
const SHARED: u8 = 4;
const COPY: u8 = 5;

/// A shorter part of the previous body is stored again: a reference would not be much shorter.
const MIN_COPY_BYTES: usize = 12;
/// How far before the first difference a part may begin: new messages are built like the last ones before them.
const WINDOW_BYTES: usize = 4096;
const WINDOW_SLOTS: usize = 4096;

/// Identifies a text of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextKey {
    /// A text of the prompt, counted from 0.
    Prompt(u32),
    /// A text of the reply of this turn.
    Reply(u32, u32),
    /// The result of the call at this position in the reply of this turn.
    Result(u32, u32),
    /// The bytes of an image or a file, in base64.
    Attachment(Digest),
    /// A text that requests of other runs contain too.
    Shared(Digest),
}

impl TextKey {
    /// The turn whose reply or results have the text.
    pub fn turn(self) -> Option<u32> {
        match self {
            Self::Prompt(_) | Self::Attachment(_) | Self::Shared(_) => None,
            Self::Reply(turn, _) | Self::Result(turn, _) => Some(turn),
        }
    }
}

pub struct PieceWriter<'a> {
    pub bytes: Vec<u8>,
    window: Option<Window<'a>>,
}

impl<'a> PieceWriter<'a> {
    /// `copied` is what the previous body and this one begin with.
    pub fn new(copied: Option<&'a [u8]>) -> Self {
        Self {
            bytes: Vec::new(),
            window: copied.map(Window::new),
        }
    }

    /// Appends bytes as they are, except for those that the window has.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        let mut literal_start = 0;
        let mut at = 0;
        while at + MIN_COPY_BYTES <= bytes.len() {
            let found = self.window.as_ref().and_then(|it| it.find(&bytes[at..]));
            let Some((start, len)) = found else {
                at += 1;
                continue;
            };
            self.push_literal(&bytes[literal_start..at]);
            self.bytes.push(COPY);
            push_number(&mut self.bytes, start as u64);
            push_number(&mut self.bytes, len as u64);
            at += len;
            literal_start = at;
        }
        self.push_literal(&bytes[literal_start..]);
    }

    fn push_literal(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes.push(LITERAL);
            push_number(&mut self.bytes, bytes.len() as u64);
            self.bytes.extend_from_slice(bytes);
        }
    }

    pub fn push_reference(&mut self, key: TextKey, is_raw: bool) {
        let (kind, numbers) = match key {
            TextKey::Attachment(digest) | TextKey::Shared(digest) => {
                let is_shared = matches!(key, TextKey::Shared(_));
                self.bytes.push(if is_shared { SHARED } else { ATTACHMENT });
                self.bytes.extend_from_slice(&digest.0);
                return;
            }
            TextKey::Prompt(index) => (0, [0, index]),
            TextKey::Reply(turn, index) => (1, [turn, index]),
            TextKey::Result(turn, position) => (2, [turn, position]),
        };
        self.bytes
            .extend([if is_raw { RAW_TEXT } else { TEXT }, kind]);
        for number in numbers {
            push_number(&mut self.bytes, number.into());
        }
    }
}

/// The end of what two bodies begin with, and where its parts are.
struct Window<'a> {
    start: usize,
    bytes: &'a [u8],
    /// By the hash of their first bytes, the last position of such bytes, counted from 1; 0 if there is none.
    positions: Vec<u16>,
}

impl<'a> Window<'a> {
    fn new(copied: &'a [u8]) -> Self {
        let start = copied.len().saturating_sub(WINDOW_BYTES);
        let bytes = &copied[start..];
        let mut positions = vec![0; WINDOW_SLOTS];
        for (position, first) in (1..).zip(bytes.windows(8)) {
            positions[slot(first)] = position;
        }
        Self {
            start,
            bytes,
            positions,
        }
    }

    /// Where these bytes are in the previous body, and how many of them.
    fn find(&self, bytes: &[u8]) -> Option<(usize, usize)> {
        let position = usize::from(self.positions[slot(bytes.get(..8)?)]).checked_sub(1)?;
        let pairs = self.bytes[position..].iter().zip(bytes);
        let len = pairs.take_while(|(a, b)| a == b).count();
        (len >= MIN_COPY_BYTES).then_some((self.start + position, len))
    }
}

fn slot(first: &[u8]) -> usize {
    let number = first
        .iter()
        .fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52) as usize
}

/// Appends a number in 7 bits a byte, the lowest first.
pub fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub enum Piece<'a> {
    Literal(&'a [u8]),
    /// A part of the previous body.
    Copy {
        start: usize,
        len: usize,
    },
    /// Raw: not as the content of a JSON string.
    Text {
        key: TextKey,
        is_raw: bool,
    },
}

/// Reads what [`PieceWriter`] and [`push_number`] wrote. Every read is `None` at the end.
pub struct PieceReader<'a>(pub &'a [u8]);

impl<'a> PieceReader<'a> {
    pub fn next_byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    pub fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.next_byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    pub fn piece(&mut self) -> Option<Piece<'a>> {
        let tag = self.next_byte()?;
        let key = match tag {
            LITERAL => {
                let len = usize::try_from(self.number()?).ok()?;
                return Some(Piece::Literal(self.bytes(len)?));
            }
            COPY => {
                let start = usize::try_from(self.number()?).ok()?;
                let len = usize::try_from(self.number()?).ok()?;
                return Some(Piece::Copy { start, len });
            }
            TEXT | RAW_TEXT => self.key()?,
            ATTACHMENT => TextKey::Attachment(self.digest()?),
            SHARED => TextKey::Shared(self.digest()?),
            _ => return None,
        };
        let is_raw = tag != TEXT;
        Some(Piece::Text { key, is_raw })
    }

    fn digest(&mut self) -> Option<Digest> {
        Some(Digest(self.bytes(32)?.try_into().ok()?))
    }

    fn key(&mut self) -> Option<TextKey> {
        let kind = self.next_byte()?;
        let first = u32::try_from(self.number()?).ok()?;
        let second = u32::try_from(self.number()?).ok()?;
        match kind {
            0 => Some(TextKey::Prompt(second)),
            1 => Some(TextKey::Reply(first, second)),
            2 => Some(TextKey::Result(first, second)),
            _ => None,
        }
    }
}
