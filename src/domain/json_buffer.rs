//! A buffer that JSON is written to.

use std::io::{self, Write};

/// `serde_json` writes most of a text in pieces of one byte. Each is a call of a function that writes any number of bytes to a
/// `Vec`; here it is inlined.
#[derive(Default)]
pub struct JsonBuffer(pub Vec<u8>);

impl JsonBuffer {
    pub fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    /// The JSON of a value, for which `bytes` are likely to be enough.
    pub fn json(value: &impl serde::Serialize, bytes: usize) -> serde_json::Result<Vec<u8>> {
        let mut buffer = Self::with_capacity(bytes);
        serde_json::to_writer(&mut buffer, value)?;
        Ok(buffer.0)
    }
}

impl Write for JsonBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    #[inline(always)]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match bytes {
            [byte] => self.0.push(*byte),
            _ => self.0.extend_from_slice(bytes),
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
