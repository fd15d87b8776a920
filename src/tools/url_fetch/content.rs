//! What came back, made into text: which types are read, how their bytes become characters, and how many of them are
//! looked at. Knows no HTTP client.

use std::io::Read;

use encoding_rs::{Encoding, UTF_8};
use flate2::read::MultiGzDecoder;
use mime::Mime;
use url::Url;

use crate::domain::message::beginning;
use crate::tools::html;

/// Most bytes of an answer that are received, and most that they may become when unpacked.
pub const MOST_BYTES: usize = 4 << 20;
/// Where a page says what its encoding is, by the HTML standard.
const HEAD: usize = 1024;
/// A NUL in so many bytes tells that they are no text.
const SAMPLE: usize = 8192;

/// How a type is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Made into Markdown.
    Html,
    /// Shown as it is.
    Text,
}

/// How an answer of this type is read. The error says which type it is.
pub fn kind(content_type: Option<&str>) -> Result<Kind, String> {
    let Some(named) = content_type else {
        // The bytes tell.
        return Ok(Kind::Text);
    };
    let Ok(mime) = named.parse::<Mime>() else {
        let named: String = named.chars().take(100).collect();
        return Err(format!("of the type {named:?}"));
    };
    let (kind, sub) = (mime.type_().as_str(), mime.subtype().as_str());
    let suffix = mime.suffix().map(|name| name.as_str());
    match (kind, sub) {
        ("text", "html") => Ok(Kind::Html),
        ("application", "xhtml") if suffix == Some("xml") => Ok(Kind::Html),
        ("text", _) => Ok(Kind::Text),
        (
            "application",
            "json" | "xml" | "javascript" | "ecmascript" | "x-javascript" | "yaml" | "x-yaml"
            | "toml" | "x-ndjson" | "ndjson" | "jsonl" | "sql" | "x-sh" | "graphql",
        ) => Ok(Kind::Text),
        // Pictures in XML are text, but nothing to read.
        ("application", _) if matches!(suffix, Some("json" | "xml" | "yaml")) => Ok(Kind::Text),
        _ => Err(format!("{kind}/{sub}")),
    }
}

/// The bytes of an answer.
pub struct Content {
    /// How they are read.
    pub kind: Kind,
    /// The encoding that the answer's head names.
    pub charset: Option<String>,
    /// Whether they are packed (gzip).
    pub is_packed: bool,
    /// At most [`MOST_BYTES`].
    pub bytes: Vec<u8>,
    /// Whether more would have come.
    pub is_cut: bool,
}

impl Content {
    /// The text, at most `most` bytes of it, and whether there is more. The error follows the address.
    pub fn read(mut self, url: &Url, most: usize) -> Result<(String, bool), String> {
        if self.is_packed {
            self.unpack()?;
        }
        let (text, is_plain) = self.decode();
        if !is_plain {
            return Err(format!(
                "is no text, whatever it says ({} bytes)",
                self.bytes.len()
            ));
        }
        let (text, is_cut) = match self.kind {
            Kind::Html => html::to_markdown(&text, Some(url), most),
            Kind::Text => cut(text, most),
        };
        Ok((text, is_cut || self.is_cut))
    }

    /// Unpacks as much as may be held; what is wrong behind that nobody looks at.
    fn unpack(&mut self) -> Result<(), String> {
        let mut plain = Vec::new();
        let most = MOST_BYTES as u64 + 1;
        let unpacked = MultiGzDecoder::new(&self.bytes[..])
            .take(most)
            .read_to_end(&mut plain);
        if unpacked.is_err() && plain.is_empty() && !self.bytes.is_empty() {
            return Err("is packed wrongly (gzip)".to_owned());
        }
        self.is_cut |= unpacked.is_err() || plain.len() > MOST_BYTES;
        plain.truncate(MOST_BYTES);
        self.bytes = plain;
        Ok(())
    }

    /// As characters, by the byte order mark, the answer's head, the page's own word, or else UTF-8; and whether they
    /// are such.
    fn decode(&self) -> (String, bool) {
        let named = self.charset.as_deref().and_then(|label| {
            let label = label.trim_matches('"');
            Encoding::for_label(label.as_bytes())
        });
        let encoding = named.or_else(|| self.own_word()).unwrap_or(UTF_8);
        let (text, _, _) = encoding.decode(&self.bytes);
        let is_plain = !text.bytes().take(SAMPLE).any(|byte| byte == 0);
        (text.into_owned(), is_plain)
    }

    /// The encoding in a page's `<meta charset=…>`.
    fn own_word(&self) -> Option<&'static Encoding> {
        if self.kind != Kind::Html {
            return None;
        }
        let head = &self.bytes[..self.bytes.len().min(HEAD)];
        let head = String::from_utf8_lossy(head).to_ascii_lowercase();
        let (_, rest) = head.split_once("charset=")?;
        let rest = rest.trim_start_matches(['"', '\'', ' ']);
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_')));
        let found = Encoding::for_label(&rest.as_bytes()[..end.unwrap_or(rest.len())])?;
        // Who can write this in ASCII does not write UTF-16.
        found.is_ascii_compatible().then_some(found)
    }
}

fn cut(mut text: String, most: usize) -> (String, bool) {
    if text.len() <= most {
        return (text, false);
    }
    text.truncate(beginning(&text, most).len());
    (text, true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;
    use url::Url;

    use super::{Content, Kind, MOST_BYTES, kind};

    fn content(kind: Kind, charset: Option<&str>, bytes: &[u8]) -> Content {
        Content {
            kind,
            charset: charset.map(str::to_owned),
            is_packed: false,
            bytes: bytes.to_vec(),
            is_cut: false,
        }
    }

    fn read(content: Content) -> Result<(String, bool), String> {
        let url = Url::parse("https://example.com/").expect("a URL");
        content.read(&url, 1000)
    }

    #[test]
    fn types_are_read_as_text_or_pages_or_refused() {
        for text in [
            "text/plain; charset=utf-8",
            "application/json",
            "application/ld+json",
            "text/markdown",
            "application/rss+xml",
        ] {
            assert_eq!(kind(Some(text)), Ok(Kind::Text), "{text}");
        }
        for page in ["text/html;charset=x", "application/xhtml+xml", "TEXT/HTML"] {
            assert_eq!(kind(Some(page)), Ok(Kind::Html), "{page}");
        }
        for other in [
            "image/png",
            "image/svg+xml",
            "application/pdf",
            "video/mp4",
            "nonsense",
        ] {
            assert!(kind(Some(other)).is_err(), "{other}");
        }
    }

    #[test]
    fn bytes_become_characters_by_the_encoding_that_is_said() {
        let text = |it: Content| read(it).expect("text").0;
        let said = content(Kind::Text, Some("\"iso-8859-1\""), b"caf\xe9");
        assert_eq!(text(said), "café");
        let own = b"<meta http-equiv=x content='text/html; charset=Shift_JIS'><p>\x93\xfa\x96{";
        assert_eq!(text(content(Kind::Html, None, own)), "日本");
        let marked = content(Kind::Text, None, b"\xff\xfeh\0i\0");
        assert_eq!(text(marked), "hi");
        assert_eq!(
            text(content(Kind::Text, Some("what"), b"a\xff")),
            "a\u{fffd}"
        );
        assert!(read(content(Kind::Text, None, b"GIF\0\0")).is_err());
    }

    #[test]
    fn what_is_packed_is_unpacked_to_its_bound() {
        let packed = |bytes: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::best());
            encoder.write_all(bytes).expect("write");
            let bytes = encoder.finish().expect("packed");
            Content {
                is_packed: true,
                ..content(Kind::Text, None, &bytes)
            }
        };
        assert_eq!(read(packed(b"hello")), Ok(("hello".to_owned(), false)));
        let mut bomb = packed(&vec![b'x'; 4 * MOST_BYTES]);
        assert!(bomb.bytes.len() < MOST_BYTES / 100);
        bomb.unpack().expect("some of it");
        assert!(bomb.is_cut && bomb.bytes.len() == MOST_BYTES);
        let broken = Content {
            is_packed: true,
            ..content(Kind::Text, None, b"no gzip")
        };
        assert!(read(broken).is_err());
    }
}
