//! Turns a response body into text: which content types are read, how bytes are decoded, and how many.

use std::io::Read;

use encoding_rs::{Encoding, UTF_8};
use flate2::read::MultiGzDecoder;
use mime::Mime;
use url::Url;

use crate::domain::message::truncate_to_bytes;
use crate::tools::web::html;

/// Most bytes that are received, and most after decompression.
pub const MAX_BYTES: usize = 4 << 20;
/// Where the HTML standard looks for a page's encoding.
const META_SCAN_BYTES: usize = 1024;
/// A NUL within these bytes marks binary data.
const SNIFF_BYTES: usize = 8192;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentKind {
    /// Converted to Markdown.
    Html,
    /// Shown as it is.
    Text,
}

/// How content of this type is read. The error describes the type.
pub fn content_kind(content_type: Option<&str>) -> Result<ContentKind, String> {
    let Some(type_name) = content_type else {
        // The bytes decide.
        return Ok(ContentKind::Text);
    };
    let Ok(mime) = type_name.parse::<Mime>() else {
        let type_name: String = type_name.chars().take(100).collect();
        return Err(format!("of the type {type_name:?}"));
    };
    let (kind, subtype) = (mime.type_().as_str(), mime.subtype().as_str());
    let suffix = mime.suffix().map(|name| name.as_str());
    match (kind, subtype) {
        ("text", "html") => Ok(ContentKind::Html),
        ("application", "xhtml") if suffix == Some("xml") => Ok(ContentKind::Html),
        ("text", _) => Ok(ContentKind::Text),
        (
            "application",
            "json" | "xml" | "javascript" | "ecmascript" | "x-javascript" | "yaml" | "x-yaml"
            | "toml" | "x-ndjson" | "ndjson" | "jsonl" | "sql" | "x-sh" | "graphql",
        ) => Ok(ContentKind::Text),
        // XML images (SVG) are text, but not worth reading.
        ("application", _) if matches!(suffix, Some("json" | "xml" | "yaml")) => {
            Ok(ContentKind::Text)
        }
        _ => Err(format!("{kind}/{subtype}")),
    }
}

pub struct FetchedContent {
    pub kind: ContentKind,
    /// The charset of the Content-Type header.
    pub charset: Option<String>,
    pub is_gzip: bool,
    /// At most [`MAX_BYTES`].
    pub bytes: Vec<u8>,
    /// Whether the body was longer.
    pub is_truncated: bool,
}

impl FetchedContent {
    /// Returns at most `max_bytes` of text, and whether there is more. An error's text follows the URL.
    pub fn into_text(mut self, url: &Url, max_bytes: usize) -> Result<(String, bool), String> {
        if self.is_gzip {
            self.decompress()?;
        }
        let (text, is_plain) = self.decode_text();
        if !is_plain {
            return Err(format!(
                "is not text, although its type says so ({} bytes)",
                self.bytes.len()
            ));
        }
        let (text, is_truncated) = match self.kind {
            ContentKind::Html => html::to_markdown(&text, Some(url), max_bytes),
            ContentKind::Text => truncate(text, max_bytes),
        };
        Ok((text, is_truncated || self.is_truncated))
    }

    /// Decompresses up to [`MAX_BYTES`]. An error behind that is ignored.
    fn decompress(&mut self) -> Result<(), String> {
        let mut plain = Vec::new();
        let limit = MAX_BYTES as u64 + 1;
        let unpacked = MultiGzDecoder::new(&self.bytes[..])
            .take(limit)
            .read_to_end(&mut plain);
        if unpacked.is_err() && plain.is_empty() && !self.bytes.is_empty() {
            return Err("is not valid gzip".to_owned());
        }
        self.is_truncated |= unpacked.is_err() || plain.len() > MAX_BYTES;
        plain.truncate(MAX_BYTES);
        self.bytes = plain;
        Ok(())
    }

    /// Decodes by byte order mark, Content-Type, the page's `<meta>`, or else UTF-8. `false` if the result is binary.
    fn decode_text(&self) -> (String, bool) {
        let declared = self.charset.as_deref().and_then(|label| {
            let label = label.trim_matches('"');
            Encoding::for_label(label.as_bytes())
        });
        let encoding = declared.or_else(|| self.meta_charset()).unwrap_or(UTF_8);
        let (text, _, _) = encoding.decode(&self.bytes);
        let is_plain = !text.bytes().take(SNIFF_BYTES).any(|byte| byte == 0);
        (text.into_owned(), is_plain)
    }

    /// The encoding in a page's `<meta charset=…>`.
    fn meta_charset(&self) -> Option<&'static Encoding> {
        if self.kind != ContentKind::Html {
            return None;
        }
        let head = &self.bytes[..self.bytes.len().min(META_SCAN_BYTES)];
        let head = String::from_utf8_lossy(head).to_ascii_lowercase();
        let (_, rest) = head.split_once("charset=")?;
        let rest = rest.trim_start_matches(['"', '\'', ' ']);
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_')));
        let encoding = Encoding::for_label(&rest.as_bytes()[..end.unwrap_or(rest.len())])?;
        // A page that states its charset in ASCII is not in UTF-16.
        encoding.is_ascii_compatible().then_some(encoding)
    }
}

fn truncate(mut text: String, max_bytes: usize) -> (String, bool) {
    if text.len() <= max_bytes {
        return (text, false);
    }
    text.truncate(truncate_to_bytes(&text, max_bytes).len());
    (text, true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;
    use url::Url;

    use super::{ContentKind, FetchedContent, MAX_BYTES, content_kind};

    fn content(kind: ContentKind, charset: Option<&str>, bytes: &[u8]) -> FetchedContent {
        FetchedContent {
            kind,
            charset: charset.map(str::to_owned),
            is_gzip: false,
            bytes: bytes.to_vec(),
            is_truncated: false,
        }
    }

    fn read(content: FetchedContent) -> Result<(String, bool), String> {
        let url = Url::parse("https://example.com/").expect("a URL");
        content.into_text(&url, 1000)
    }

    #[test]
    fn types_are_text_or_html_or_rejected() {
        for text in [
            "text/plain; charset=utf-8",
            "application/json",
            "application/ld+json",
            "text/markdown",
            "application/rss+xml",
        ] {
            assert_eq!(content_kind(Some(text)), Ok(ContentKind::Text), "{text}");
        }
        for page in ["text/html;charset=x", "application/xhtml+xml", "TEXT/HTML"] {
            assert_eq!(content_kind(Some(page)), Ok(ContentKind::Html), "{page}");
        }
        for other in [
            "image/png",
            "image/svg+xml",
            "application/pdf",
            "video/mp4",
            "nonsense",
        ] {
            assert!(content_kind(Some(other)).is_err(), "{other}");
        }
    }

    #[test]
    fn bytes_are_decoded_by_their_declared_encoding() {
        let text = |it: FetchedContent| read(it).expect("text").0;
        let declared = content(ContentKind::Text, Some("\"iso-8859-1\""), b"caf\xe9");
        assert_eq!(text(declared), "café");
        let own = b"<meta http-equiv=x content='text/html; charset=Shift_JIS'><p>\x93\xfa\x96{";
        assert_eq!(text(content(ContentKind::Html, None, own)), "日本");
        let marked = content(ContentKind::Text, None, b"\xff\xfeh\0i\0");
        assert_eq!(text(marked), "hi");
        assert_eq!(
            text(content(ContentKind::Text, Some("what"), b"a\xff")),
            "a\u{fffd}"
        );
        assert!(read(content(ContentKind::Text, None, b"GIF\0\0")).is_err());
    }

    #[test]
    fn decompression_is_bounded() {
        let gzipped = |bytes: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::best());
            encoder.write_all(bytes).expect("write");
            let bytes = encoder.finish().expect("packed");
            FetchedContent {
                is_gzip: true,
                ..content(ContentKind::Text, None, &bytes)
            }
        };
        assert_eq!(read(gzipped(b"hello")), Ok(("hello".to_owned(), false)));
        let mut bomb = gzipped(&vec![b'x'; 4 * MAX_BYTES]);
        assert!(bomb.bytes.len() < MAX_BYTES / 100);
        bomb.decompress().expect("some of it");
        assert!(bomb.is_truncated && bomb.bytes.len() == MAX_BYTES);
        let broken = FetchedContent {
            is_gzip: true,
            ..content(ContentKind::Text, None, b"no gzip")
        };
        assert!(read(broken).is_err());
    }
}
