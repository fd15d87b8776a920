//! The content of a user message: a text, or parts that are texts, images and files.

use std::borrow::Cow;
use std::fmt;

use schemars::JsonSchema;
use serde::de::{SeqAccess, Visitor, value::SeqAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize};

use crate::domain::attachment::{Attachment, MediaType};

/// Estimated tokens of an image. Providers count pixels; this is the value of a large image.
const IMAGE_TOKENS: usize = 1600;
/// Bytes of a file per estimated token.
const FILE_BYTES_PER_TOKEN: usize = 32;
/// The most estimated tokens of a file: context windows are not much larger.
const MAX_FILE_TOKENS: usize = 200_000;

/// The content of a user message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "MessageContent")]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts, images and files, in their order.
    Parts(Vec<Part>),
}

/// A part of a user message. JSON contains the digests of images and files, not their bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ContentPart")]
pub enum Part {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
    /// An image.
    Image(Attachment),
    /// A file that is not an image.
    File(Attachment),
    /// An image or a file that has not been fetched yet.
    Link(AttachmentLink),
}

/// An image or a file that is fetched before the run's first turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub struct AttachmentLink {
    /// The URL. Responses omit its query, which may contain a secret.
    pub url: String,
    /// Whether it is an image; otherwise it is a file.
    pub is_image: bool,
    /// The media type that the request declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<MediaType>,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl From<Attachment> for Part {
    fn from(attachment: Attachment) -> Self {
        match attachment.media_type.is_image() {
            true => Self::Image(attachment),
            false => Self::File(attachment),
        }
    }
}

impl Part {
    pub fn attachment(&self) -> Option<&Attachment> {
        match self {
            Self::Text { .. } | Self::Link(_) => None,
            Self::Image(attachment) | Self::File(attachment) => Some(attachment),
        }
    }

    fn attachment_mut(&mut self) -> Option<&mut Attachment> {
        match self {
            Self::Text { .. } | Self::Link(_) => None,
            Self::Image(attachment) | Self::File(attachment) => Some(attachment),
        }
    }

    /// Its text, or a placeholder for an image or a file.
    pub fn to_plain_text(&self) -> Cow<'_, str> {
        match self {
            Self::Text { text } => Cow::Borrowed(text),
            Self::Image(attachment) | Self::File(attachment) => {
                Cow::Owned(format!("{}]", attachment.placeholder()))
            }
            Self::Link(link) => Cow::Owned(format!("[{}]", without_query(&link.url))),
        }
    }
}

impl Default for Content {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Content {
    /// The whole content as one text, with placeholders for images and files.
    pub fn to_plain_text(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::Parts(parts) => {
                let texts: Vec<_> = parts.iter().map(Part::to_plain_text).collect();
                Cow::Owned(texts.join("\n\n"))
            }
        }
    }

    /// `None` if it is a text.
    pub fn parts(&self) -> Option<&[Part]> {
        match self {
            Self::Text(_) => None,
            Self::Parts(parts) => Some(parts),
        }
    }

    /// Whether it has no attachments and only blank texts.
    pub fn is_blank(&self) -> bool {
        match self {
            Self::Text(text) => text.trim().is_empty(),
            Self::Parts(parts) => parts.iter().all(|part| match part {
                Part::Text { text } => text.trim().is_empty(),
                Part::Image(_) | Part::File(_) | Part::Link(_) => false,
            }),
        }
    }

    /// The size of its texts in bytes.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts.iter().map(Part::text_bytes).sum(),
        }
    }

    pub fn attachments(&self) -> impl Iterator<Item = &Attachment> {
        let parts = self.parts().unwrap_or_default();
        parts.iter().filter_map(Part::attachment)
    }

    /// Attachments that have not been fetched yet.
    pub fn links(&self) -> impl Iterator<Item = &AttachmentLink> {
        let parts = self.parts().unwrap_or_default();
        parts.iter().filter_map(|part| match part {
            Part::Link(link) => Some(link),
            Part::Text { .. } | Part::Image(_) | Part::File(_) => None,
        })
    }

    /// For readers of the run: without the bytes of attachments and the queries of URLs.
    pub fn into_redacted(mut self) -> Self {
        self.drop_data();
        if let Self::Parts(parts) = &mut self {
            for part in parts {
                if let Part::Link(link) = part {
                    link.url = without_query(&link.url).to_owned();
                }
            }
        }
        self
    }

    pub fn prepend(&mut self, before: &str) {
        match self {
            Self::Text(text) => *text = format!("{before}\n\n{text}"),
            Self::Parts(parts) => parts.insert(
                0,
                Part::Text {
                    text: before.to_owned(),
                },
            ),
        }
    }

    pub fn append(&mut self, after: &str) {
        match self {
            Self::Text(text) => *text = format!("{text}\n\n{after}"),
            Self::Parts(parts) => parts.push(Part::Text {
                text: after.to_owned(),
            }),
        }
    }

    pub fn attachments_mut(&mut self) -> impl Iterator<Item = &mut Attachment> {
        let parts = match self {
            Self::Text(_) => &mut [],
            Self::Parts(parts) => &mut parts[..],
        };
        parts.iter_mut().filter_map(Part::attachment_mut)
    }

    /// Drops the bytes of images and files, which are in the store.
    pub fn drop_data(&mut self) {
        self.attachments_mut()
            .for_each(|attachment| attachment.data = None);
    }
}

impl Part {
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text { text } => text.len(),
            Self::Image(_) | Self::File(_) => 0,
            Self::Link(link) => link.url.len(),
        }
    }
}

fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

/// Estimates the tokens of an image or a file. Its Base64 text does not count.
pub fn estimate_tokens(attachment: &Attachment) -> usize {
    if attachment.media_type.is_image() {
        return IMAGE_TOKENS;
    }
    let bytes = usize::try_from(attachment.bytes).unwrap_or(usize::MAX);
    (bytes / FILE_BYTES_PER_TOKEN).clamp(IMAGE_TOKENS, MAX_FILE_TOKENS)
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;

        impl<'de> Visitor<'de> for TextOrParts {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::from(text))
            }

            fn visit_string<E>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
            }
        }

        deserializer.deserialize_any(TextOrParts)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{Content, Part};
    use crate::domain::attachment::Attachment;
    use crate::domain::message::Message;

    #[test]
    fn a_text_is_recorded_as_before_and_parts_without_their_bytes() {
        let text = serde_json::to_string(&Message::user("hi")).expect("JSON");
        assert_eq!(text, r#"{"user":{"content":"hi"}}"#);
        let data = Bytes::from_static(b"\xff\xd8\xff!");
        let picture = Attachment::from_bytes(data, None).expect("a picture");
        let content = Content::Parts(vec![
            Part::Text {
                text: "Look:".to_owned(),
            },
            picture.into(),
        ]);
        assert_eq!(
            content.to_plain_text(),
            "Look:\n\n[image: image/jpeg, 4 bytes]"
        );
        let json = serde_json::to_string(&Message::user(content.clone())).expect("JSON");
        assert!(json.contains(r#"{"type":"image","sha256":""#), "{json}");
        assert!(!json.contains("data"), "{json}");
        let read: Message = serde_json::from_str(&json).expect("a message");
        let mut stored = Message::user(content);
        stored.drop_data();
        let (Message::User { content: read }, Message::User { content: stored }) = (read, stored)
        else {
            panic!("no user's messages");
        };
        assert_eq!(read, stored);
    }
}
