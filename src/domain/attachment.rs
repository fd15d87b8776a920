//! Images and files of a conversation, and their media types.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The accepted image types, for error messages.
pub const IMAGE_TYPES: &str = "image/png, image/jpeg, image/webp or image/gif";
/// The accepted file types, for error messages.
pub const FILE_TYPES: &str = "application/pdf";

/// Stored bytes by their digest.
pub type Blobs = BTreeMap<Digest, Bytes>;

/// An image or a file. Its bytes are stored once under their digest, even if several messages contain it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attachment {
    /// The SHA-256 digest of its bytes, in hexadecimal digits.
    pub sha256: Digest,
    /// The media type, detected from its bytes.
    pub media_type: MediaType,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its name, if the request gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The bytes until they are stored.
    #[serde(skip)]
    pub data: Option<Bytes>,
}

impl Attachment {
    /// Detects the media type from the bytes; `None` if it is not supported.
    pub fn from_bytes(data: Bytes, name: Option<String>) -> Option<Self> {
        Some(Self {
            media_type: MediaType::detect(&data)?,
            sha256: Digest::compute(&data),
            bytes: data.len() as u64,
            name,
            data: Some(data),
        })
    }

    /// A text that replaces it, without the closing bracket: `[image: image/png, 5 bytes`.
    pub fn placeholder(&self) -> String {
        let name = self.name.as_deref();
        let name = name.map_or_else(String::new, |name| format!("{name}, "));
        let kind = self.media_type.part_type();
        format!("[{kind}: {name}{}, {} bytes", self.media_type, self.bytes)
    }
}

impl fmt::Debug for Attachment {
    /// Omits the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}]", self.placeholder(), self.sha256)
    }
}

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", inline)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub fn compute(data: &[u8]) -> Self {
        Self(Sha256::digest(data).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        const EXPECTED: &str = "expected 64 hexadecimal digits";
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return Err(EXPECTED);
        }
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(pairs) {
            let pair = std::str::from_utf8(pair).map_err(|_| EXPECTED)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| EXPECTED)?;
        }
        Ok(Self(digest))
    }
}

/// The media types that models accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum MediaType {
    /// A PNG image.
    #[serde(rename = "image/png")]
    Png,
    /// A JPEG image.
    #[serde(rename = "image/jpeg")]
    Jpeg,
    /// A WebP image.
    #[serde(rename = "image/webp")]
    Webp,
    /// A GIF image.
    #[serde(rename = "image/gif")]
    Gif,
    /// A PDF document.
    #[serde(rename = "application/pdf")]
    Pdf,
}

impl MediaType {
    /// Detects the media type by the first bytes; `None` if it is not supported.
    pub fn detect(data: &[u8]) -> Option<Self> {
        match data {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [
                b'R',
                b'I',
                b'F',
                b'F',
                _,
                _,
                _,
                _,
                b'W',
                b'E',
                b'B',
                b'P',
                ..,
            ] => Some(Self::Webp),
            [b'%', b'P', b'D', b'F', b'-', ..] => Some(Self::Pdf),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Webp => "image/webp",
            Self::Gif => "image/gif",
            Self::Pdf => "application/pdf",
        }
    }

    /// Whether it is a picture.
    pub fn is_image(self) -> bool {
        self != Self::Pdf
    }

    /// The type of a message part with such an attachment.
    pub fn part_type(self) -> &'static str {
        if self.is_image() { "image" } else { "file" }
    }
}

impl fmt::Display for MediaType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MediaType {
    type Err = ();

    /// Ignores parameters and letter case.
    fn from_str(text: &str) -> Result<Self, ()> {
        let name = text.split(';').next().unwrap_or_default().trim();
        let all = [Self::Png, Self::Jpeg, Self::Webp, Self::Gif, Self::Pdf];
        if name.eq_ignore_ascii_case("image/jpg") {
            return Ok(Self::Jpeg);
        }
        let mut all = all.into_iter();
        all.find(|it| name.eq_ignore_ascii_case(it.as_str()))
            .ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Attachment, Digest, MediaType};

    #[test]
    fn a_digest_is_written_as_hexadecimal_digits_and_read_back() {
        let digest = Digest::compute(b"abc");
        let text = String::from(digest);
        assert!(text.starts_with("ba7816bf") && text.len() == 64, "{text}");
        assert_eq!(Digest::try_from(text.clone()), Ok(digest));
        for bad in [&text[1..], &format!("{}g", &text[1..]), "é"] {
            assert!(Digest::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn kinds_are_known_by_their_first_bytes() {
        for (data, kind) in [
            (&b"\x89PNG\r\n\x1a\n..."[..], Some(MediaType::Png)),
            (b"\xff\xd8\xff\xe0", Some(MediaType::Jpeg)),
            (b"GIF89a", Some(MediaType::Gif)),
            (b"RIFF\x04\0\0\0WEBPVP8 ", Some(MediaType::Webp)),
            (b"RIFF\x04\0\0\0WAVEfmt ", None),
            (b"%PDF-1.7", Some(MediaType::Pdf)),
            (b"<svg/>", None),
            (b"", None),
        ] {
            assert_eq!(MediaType::detect(data), kind);
        }
        assert_eq!("image/JPG; q=1".parse(), Ok(MediaType::Jpeg));
        assert!("image/svg+xml".parse::<MediaType>().is_err());
    }

    #[test]
    fn json_holds_no_bytes() {
        let data = bytes::Bytes::from_static(b"%PDF-1.7");
        let file = Attachment::from_bytes(data, Some("a.pdf".to_owned())).expect("a PDF");
        let json = serde_json::to_value(&file).expect("JSON");
        assert_eq!(json["media_type"], "application/pdf");
        assert_eq!(
            (&json["bytes"], &json["name"]),
            (&8.into(), &"a.pdf".into())
        );
        assert_eq!(json.as_object().map(serde_json::Map::len), Some(4));
        let read: Attachment = serde_json::from_value(json).expect("an attachment");
        assert_eq!((read.sha256, read.data), (file.sha256, None));
    }
}
