//! Reads HTML for the tokenizer, which recurses from one quoted attribute of a tag to the next: a page could overflow the
//! stack with them.

use html5gum::{Readable, Reader, StringReader};

use crate::domain::stack;

/// Suffices for hundreds of attributes, and is a part of the stack of the runtime's threads.
const MAX_STACK_BYTES: usize = 512 << 10;

/// Fails if the tokenizer recurses too deep.
pub struct BoundedReader<'a> {
    inner: StringReader<'a>,
    stack_base: usize,
}

#[derive(Debug, thiserror::Error)]
#[error("a tag has too many attributes")]
pub struct TooManyAttributes;

impl<'a> BoundedReader<'a> {
    pub fn new(html: &'a str) -> Self {
        Self {
            inner: html.to_reader(),
            stack_base: stack::pointer(),
        }
    }

    fn check_stack(&self) -> Result<(), TooManyAttributes> {
        match self.stack_base.abs_diff(stack::pointer()) > MAX_STACK_BYTES {
            true => Err(TooManyAttributes),
            false => Ok(()),
        }
    }
}

impl Reader for BoundedReader<'_> {
    type Error = TooManyAttributes;

    fn read_byte(&mut self) -> Result<Option<u8>, TooManyAttributes> {
        self.check_stack()?;
        let Ok(byte) = self.inner.read_byte();
        Ok(byte)
    }

    fn try_read_string(
        &mut self,
        s: &[u8],
        case_sensitive: bool,
    ) -> Result<bool, TooManyAttributes> {
        let Ok(found) = self.inner.try_read_string(s, case_sensitive);
        Ok(found)
    }

    fn read_until<'b>(
        &'b mut self,
        needle: &[u8],
        char_buf: &'b mut [u8; 4],
    ) -> Result<Option<&'b [u8]>, TooManyAttributes> {
        self.check_stack()?;
        let Ok(text) = self.inner.read_until(needle, char_buf);
        Ok(text)
    }
}
