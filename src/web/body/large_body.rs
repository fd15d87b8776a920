//! Limits of a JSON body above `server.max_body`, which is accepted if the Base64 of images and files makes it large. The
//! bytes are checked as they arrive, so that a body that is refused is not kept in memory.

use crate::config::AttachmentLimits;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

/// The fields with data in the bodies of axed's own routes and of OpenAI's.
pub const DATA_FIELDS: &[DataField] = &[
    DataField::anywhere("data"),
    DataField::anywhere("file_data"),
    DataField::anywhere("image_url"),
    DataField::anywhere("url"),
];
/// Bytes of a name that are kept; longer ones are the names of no data.
const MAX_NAME_BYTES: usize = 9;

/// A field whose text does not count towards `server.max_body`, because it has Base64 or a data URL.
#[derive(Debug)]
pub struct DataField {
    name: &'static str,
    /// The field whose object has this one; `None` for any.
    parent: Option<&'static str>,
}

impl DataField {
    pub const fn anywhere(name: &'static str) -> Self {
        Self { name, parent: None }
    }

    /// Only in the object of the field `parent`, and not behind another object in it.
    pub const fn inside(parent: &'static str, name: &'static str) -> Self {
        Self {
            name,
            parent: Some(parent),
        }
    }

    fn is_at(&self, parent: &Name, name: &Name) -> bool {
        name.is(self.name) && self.parent.is_none_or(|it| parent.is(it))
    }
}

/// The beginning of a string, and its length.
#[derive(Clone, Copy, Debug, Default)]
struct Name {
    bytes: [u8; MAX_NAME_BYTES],
    length: usize,
}

impl Name {
    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.length) {
            *slot = byte;
        }
        self.length += 1;
    }

    fn is(&self, text: &str) -> bool {
        self.bytes.get(..self.length) == Some(text.as_bytes())
    }
}

/// Counts the bytes of a body as they arrive.
#[derive(Debug)]
pub struct LargeBodyLimiter {
    /// Maximum bytes without the data.
    max_body: usize,
    limits: AttachmentLimits,
    fields: &'static [DataField],
    other_bytes: usize,
    data_bytes: usize,
    /// Bytes of the current field with data.
    current_data_bytes: usize,
    state: State,
    is_escaped: bool,
    last_text: Name,
    /// The field that has the current object; empty behind an object in it.
    parent: Name,
    /// Whether a colon followed the last string.
    has_colon: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Outside,
    InText,
    InData,
}

impl LargeBodyLimiter {
    pub fn new(max_body: usize, limits: AttachmentLimits, fields: &'static [DataField]) -> Self {
        Self {
            max_body,
            limits,
            fields,
            other_bytes: 0,
            data_bytes: 0,
            current_data_bytes: 0,
            state: State::Outside,
            is_escaped: false,
            last_text: Name::default(),
            parent: Name::default(),
            has_colon: false,
        }
    }

    /// Maximum bytes of any body.
    pub fn max_total_bytes(max_body: usize, limits: AttachmentLimits) -> usize {
        max_body.saturating_add(base64_bytes(limits.total))
    }

    /// Counts the next bytes; an error if the body exceeds a limit.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        for byte in bytes {
            self.feed_byte(*byte);
        }
        if self.other_bytes > self.max_body {
            return Err(body_too_large(self.max_body));
        }
        if self.current_data_bytes > base64_bytes(self.limits.bytes) {
            let max_bytes = self.limits.bytes;
            let why =
                format!("an image or file has at most {max_bytes} bytes (limits.attachment_bytes)");
            return Err(Problem::attachments_too_large("", why));
        }
        if self.data_bytes > base64_bytes(self.limits.total) {
            let max_bytes = self.limits.total;
            let suffix = "of images and files in total (limits.conversation_bytes)";
            let why = format!("a request has at most {max_bytes} bytes {suffix}");
            return Err(Problem::attachments_too_large("", why));
        }
        Ok(())
    }

    fn feed_byte(&mut self, byte: u8) {
        match self.state {
            State::InData if byte != b'"' && byte != b'\\' && !self.is_escaped => {
                self.data_bytes += 1;
                self.current_data_bytes += 1;
                return;
            }
            State::Outside => self.feed_outside_text(byte),
            State::InText | State::InData if self.is_escaped => {
                self.is_escaped = false;
                self.last_text.push(byte);
            }
            State::InText | State::InData => match byte {
                b'\\' => self.is_escaped = true,
                b'"' => self.state = State::Outside,
                _ => self.last_text.push(byte),
            },
        }
        self.other_bytes += 1;
    }

    fn feed_outside_text(&mut self, byte: u8) {
        match byte {
            b'"' => {
                let is_data = |field: &DataField| field.is_at(&self.parent, &self.last_text);
                self.state = if self.has_colon && self.fields.iter().any(is_data) {
                    State::InData
                } else {
                    State::InText
                };
                self.current_data_bytes = 0;
                self.forget_name();
            }
            b':' => self.has_colon = true,
            b' ' | b'\t' | b'\r' | b'\n' => {}
            b'{' => {
                self.parent = match self.has_colon {
                    true => self.last_text,
                    false => Name::default(),
                };
                self.forget_name();
            }
            b'}' => {
                self.parent = Name::default();
                self.forget_name();
            }
            _ => self.forget_name(),
        }
    }

    fn forget_name(&mut self) {
        (self.has_colon, self.last_text) = (false, Name::default());
    }
}

/// 413: the body is too large without the data of images and files.
pub fn body_too_large(max_bytes: usize) -> Problem {
    Problem::new(
        ProblemCode::BodyTooLarge,
        format!("the body is larger than {max_bytes} bytes (server.max_body)"),
    )
}

/// 413: the body is too large even if it has the maximum of images and files.
pub fn total_too_large(max_bytes: usize) -> Problem {
    Problem::new(
        ProblemCode::BodyTooLarge,
        format!(
            "the body is larger than {max_bytes} bytes (server.max_body, and limits.conversation_bytes for images and files)"
        ),
    )
}

/// The length of this many bytes in Base64.
fn base64_bytes(bytes: usize) -> usize {
    bytes.div_ceil(3).saturating_mul(4)
}

#[cfg(test)]
mod tests {
    use super::{DATA_FIELDS, DataField, LargeBodyLimiter};
    use crate::config::AttachmentLimits;

    fn refused(body: &str) -> Option<String> {
        refused_with(DATA_FIELDS, body)
    }

    fn refused_with(fields: &'static [DataField], body: &str) -> Option<String> {
        let limits = AttachmentLimits {
            count: 9,
            bytes: 30,
            total: 60,
        };
        let mut limiter = LargeBodyLimiter::new(100, limits, fields);
        let result = body
            .as_bytes()
            .chunks(7)
            .try_for_each(|it| limiter.feed(it));
        let problem = result.err()?;
        let body = problem.render("", "");
        Some(String::from_utf8_lossy(&body).into_owned())
    }

    #[test]
    fn only_the_text_of_data_does_not_count_towards_max_body() {
        let data = "A".repeat(40);
        let part = format!(r#"{{"type":"image","data" : "{data}"}}"#);
        assert_eq!(refused(&format!(r#"{{"input":[{part},{part}]}}"#)), None);
        let why = refused(&format!(r#"{{"input":[{part},{part},{part}]}}"#));
        assert!(why.is_some_and(|why| why.contains("limits.conversation_bytes")));
        let why = refused(&format!(r#"{{"data":"{}"}}"#, "A".repeat(48)));
        assert!(why.is_some_and(|why| why.contains("limits.attachment_bytes")));
        for body in [
            format!(r#"{{"input":"{}"}}"#, "A".repeat(100)),
            format!(r#"["data","{}"]"#, "A".repeat(100)),
            format!(r#"{{"data":["{}"]}}"#, "A".repeat(100)),
            format!(r#"{{"x\"data":"{}"}}"#, "A".repeat(100)),
            format!(r#"{{"data":"{}"}}"#, "\\n".repeat(60)),
            " ".repeat(101),
        ] {
            let why = refused(&body);
            assert!(
                why.is_some_and(|why| why.contains("server.max_body")),
                "{body}"
            );
        }
    }

    #[test]
    fn a_common_name_is_that_of_data_only_in_its_object() {
        const FIELDS: &[DataField] = &[DataField::inside("source", "value")];
        let value = "A".repeat(40);
        let source = format!(r#"{{"source" : {{"type":"data", "value":"{value}"}}}}"#);
        let sources = format!("[{source},{source}]");
        assert_eq!(refused_with(FIELDS, &sources), None);
        for body in [
            format!(r#"{{"value":"{}"}}"#, "A".repeat(100)),
            format!(r#"{{"source":{{"a":{{"value":"{}"}}}}}}"#, "A".repeat(100)),
            format!(r#"{{"source":{{}},"value":"{}"}}"#, "A".repeat(100)),
            format!(r#"["source",{{"value":"{}"}}]"#, "A".repeat(100)),
            format!(r#"{{"data":"{}"}}"#, "A".repeat(100)),
        ] {
            let why = refused_with(FIELDS, &body);
            assert!(
                why.is_some_and(|why| why.contains("server.max_body")),
                "{body}"
            );
        }
    }
}
