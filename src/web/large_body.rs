//! A JSON body above `server.max_body`: taken as long as what makes it large is the Base64 of pictures and files. Looks at
//! the bytes as they come, so that nothing is kept that is refused in the end.

use crate::config::AttachmentLimits;
use crate::web::error::Problem;

/// The field whose text does not count as the body's own.
const DATA: &[u8] = b"data";

/// What has come of a body.
#[derive(Debug)]
pub struct LargeBody {
    /// Most bytes besides the data.
    max_body: usize,
    limits: AttachmentLimits,
    own: usize,
    data: usize,
    /// Bytes of the data that is being read.
    current: usize,
    state: State,
    is_escaped: bool,
    /// The beginning of the last text, and how many bytes it has.
    last: [u8; 4],
    last_bytes: usize,
    /// Whether a colon followed the last text.
    has_colon: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Outside,
    InText,
    InData,
}

impl LargeBody {
    /// Nothing has come.
    pub fn new(max_body: usize, limits: AttachmentLimits) -> Self {
        Self {
            max_body,
            limits,
            own: 0,
            data: 0,
            current: 0,
            state: State::Outside,
            is_escaped: false,
            last: [0; 4],
            last_bytes: 0,
            has_colon: false,
        }
    }

    /// Most bytes of any body.
    pub fn most(max_body: usize, limits: AttachmentLimits) -> usize {
        max_body.saturating_add(base64_bytes(limits.total))
    }

    /// Takes the next bytes, or refuses the body.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        for byte in bytes {
            self.step(*byte);
        }
        if self.own > self.max_body {
            return Err(crate::web::body::too_large(self.max_body));
        }
        if self.current > base64_bytes(self.limits.bytes) {
            let most = self.limits.bytes;
            let why =
                format!("a picture or file has at most {most} bytes (limits.attachment_bytes)");
            return Err(Problem::attachments_too_large("", why));
        }
        if self.data > base64_bytes(self.limits.total) {
            let most = self.limits.total;
            let of = "of pictures and files in all (limits.conversation_bytes)";
            let why = format!("a request has at most {most} bytes {of}");
            return Err(Problem::attachments_too_large("", why));
        }
        Ok(())
    }

    fn step(&mut self, byte: u8) {
        match self.state {
            State::InData if byte != b'"' && byte != b'\\' && !self.is_escaped => {
                self.data += 1;
                self.current += 1;
                return;
            }
            State::Outside => self.outside(byte),
            State::InText | State::InData if self.is_escaped => {
                self.is_escaped = false;
                self.note(byte);
            }
            State::InText | State::InData => match byte {
                b'\\' => self.is_escaped = true,
                b'"' => self.state = State::Outside,
                _ => self.note(byte),
            },
        }
        self.own += 1;
    }

    fn outside(&mut self, byte: u8) {
        match byte {
            b'"' => {
                let is_data = self.has_colon && self.last_bytes == DATA.len() && self.last == DATA;
                self.state = if is_data {
                    State::InData
                } else {
                    State::InText
                };
                (self.has_colon, self.last_bytes, self.current) = (false, 0, 0);
            }
            b':' => self.has_colon = true,
            b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => (self.has_colon, self.last_bytes) = (false, 0),
        }
    }

    fn note(&mut self, byte: u8) {
        if let Some(place) = self.last.get_mut(self.last_bytes) {
            *place = byte;
        }
        self.last_bytes += 1;
    }
}

/// Bytes of so many bytes in Base64.
fn base64_bytes(bytes: usize) -> usize {
    bytes.div_ceil(3).saturating_mul(4)
}

#[cfg(test)]
mod tests {
    use super::LargeBody;
    use crate::config::AttachmentLimits;

    fn refused(body: &str) -> Option<String> {
        let limits = AttachmentLimits {
            count: 9,
            bytes: 30,
            total: 60,
        };
        let mut large = LargeBody::new(100, limits);
        let taken = body.as_bytes().chunks(7).try_for_each(|it| large.take(it));
        let problem = taken.err()?;
        let body = problem.render("", "");
        Some(String::from_utf8_lossy(&body).into_owned())
    }

    #[test]
    fn only_the_text_of_data_is_not_counted_as_the_bodys_own() {
        let data = "A".repeat(40);
        let part = format!(r#"{{"type":"image","data" : "{data}"}}"#);
        assert_eq!(refused(&format!(r#"{{"input":[{part},{part}]}}"#)), None);
        let why = refused(&format!(r#"{{"input":[{part},{part},{part}]}}"#));
        assert!(why.is_some_and(|why| why.contains("limits.conversation_bytes")));
        let why = refused(&format!(r#"{{"data":"{}"}}"#, "A".repeat(48)));
        assert!(why.is_some_and(|why| why.contains("limits.attachment_bytes")));
        for own in [
            format!(r#"{{"input":"{}"}}"#, "A".repeat(100)),
            format!(r#"["data","{}"]"#, "A".repeat(100)),
            format!(r#"{{"data":["{}"]}}"#, "A".repeat(100)),
            format!(r#"{{"x\"data":"{}"}}"#, "A".repeat(100)),
            format!(r#"{{"data":"{}"}}"#, "\\n".repeat(60)),
            " ".repeat(101),
        ] {
            let why = refused(&own);
            assert!(
                why.is_some_and(|why| why.contains("server.max_body")),
                "{own}"
            );
        }
    }
}
