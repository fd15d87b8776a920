//! The content of a message as a client sends it: a text, or a list of parts. Images and files are decoded while they are
//! read, their type is checked against their bytes, and their number and size are limited.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::config::AttachmentLimits;
use crate::domain::attachment::{Attachment, FILE_TYPES, IMAGE_TYPES, MediaType};
use crate::domain::content::{AttachmentLink, Content, Part};
use crate::ssrf::{self, SsrfGuard};
use crate::web::body::json_body::Object;
use crate::web::error::{Problem, quote};

/// Maximum characters of a file's name.
const MAX_FILE_NAME: usize = 255;

/// A text or a list of parts.
#[derive(Debug, JsonSchema)]
#[schemars(rename = "ContentInput", untagged)]
pub enum ContentInput {
    /// A text.
    Text(String),
    /// Texts, images and files in order.
    Parts(Vec<Object<PartInput>>),
}

/// The input of a run: a text, a list of parts, or an object.
#[derive(Debug, JsonSchema)]
#[schemars(rename = "RunInput", untagged)]
pub enum RunInput {
    /// A text or a list of parts.
    Content(ContentInput),
    /// An object that fits the agent's `input_schema`.
    Object(Map<String, Value>),
}

impl<'de> Deserialize<'de> for RunInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentOrObject;

        impl<'de> Visitor<'de> for ContentOrObject {
            type Value = RunInput;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of parts, or an object")
            }

            fn visit_str<E>(self, text: &str) -> Result<RunInput, E> {
                Ok(RunInput::Content(ContentInput::Text(text.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<RunInput, A::Error> {
                let parts = Vec::deserialize(SeqAccessDeserializer::new(parts))?;
                Ok(RunInput::Content(ContentInput::Parts(parts)))
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<RunInput, A::Error> {
                let fields = Map::deserialize(MapAccessDeserializer::new(fields))?;
                Ok(RunInput::Object(fields))
            }
        }

        deserializer.deserialize_any(ContentOrObject)
    }
}

impl RunInput {
    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    /// The content, checked; an object is its compact JSON. `pointer` is its place in the body.
    pub fn into_content(
        self,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Content, Problem> {
        match self {
            Self::Content(content) => content.into_content(pointer, counter),
            Self::Object(fields) => Ok(Content::Text(Value::Object(fields).to_string())),
        }
    }
}

impl From<String> for ContentInput {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

// As it is read. `PartSchema` tells which part has which fields; an error names the field.
/// A part of a message.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(with = "PartSchema", rename = "ContentPartInput")]
pub struct PartInput {
    r#type: PartKind,
    text: Option<String>,
    media_type: Option<String>,
    data: Option<Base64Bytes>,
    url: Option<String>,
    name: Option<String>,
}

/// A part of a message.
#[derive(Deserialize, JsonSchema)]
#[expect(dead_code, reason = "only its schema is read")]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
#[schemars(rename = "ContentPartInput")]
enum PartSchema {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
    /// An image: `media_type` and `data`, or `url`.
    Image {
        /// `image/png`, `image/jpeg`, `image/webp` or `image/gif`; required with `data`.
        media_type: Option<String>,
        /// The bytes in Base64.
        data: Option<String>,
        /// An https URL, instead of `data`. The bytes are fetched before the first turn.
        url: Option<String>,
        /// The name of the image, for people who read the run.
        name: Option<String>,
    },
    /// A file that is not an image: `media_type` and `data`, or `url`.
    File {
        /// `application/pdf`; required with `data`.
        media_type: Option<String>,
        /// The bytes in Base64.
        data: Option<String>,
        /// An https URL, instead of `data`. The bytes are fetched before the first turn.
        url: Option<String>,
        /// The name of the file.
        name: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PartKind {
    Text,
    Image,
    File,
}

/// Bytes that are decoded from Base64.
struct Base64Bytes(Bytes);

impl fmt::Debug for Base64Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl<'de> Deserialize<'de> for Base64Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Base64Visitor;

        impl Visitor<'_> for Base64Visitor {
            type Value = Base64Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text in Base64")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Base64Bytes, E> {
                decode_base64(text).map(Base64Bytes).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Base64Visitor)
    }
}

/// The bytes that `text` encodes in the standard alphabet, with or without padding.
pub fn decode_base64(text: &str) -> Result<Bytes, &'static str> {
    let config =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let decoded = GeneralPurpose::new(&alphabet::STANDARD, config).decode(text);
    decoded
        .map(Bytes::from)
        .map_err(|_| "is not Base64 (the standard alphabet, without line breaks)")
}

impl<'de> Deserialize<'de> for ContentInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;

        impl<'de> Visitor<'de> for TextOrParts {
            type Value = ContentInput;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of parts")
            }

            fn visit_str<E>(self, text: &str) -> Result<ContentInput, E> {
                Ok(ContentInput::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<ContentInput, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(ContentInput::Parts)
            }
        }

        deserializer.deserialize_any(TextOrParts)
    }
}

/// Counts the images and files of one request, and refuses those above the limits.
#[derive(Debug)]
pub struct AttachmentCounter {
    limits: AttachmentLimits,
    /// Checks URLs; without it, they are checked when they are fetched.
    guard: Option<Arc<SsrfGuard>>,
    count: usize,
    bytes: usize,
}

impl AttachmentCounter {
    pub fn new(limits: AttachmentLimits) -> Self {
        Self {
            limits,
            guard: None,
            count: 0,
            bytes: 0,
        }
    }

    #[must_use]
    pub fn with_guard(mut self, guard: &Arc<SsrfGuard>) -> Self {
        self.guard = Some(Arc::clone(guard));
        self
    }

    /// Counts an image or file that is fetched later; an error if its URL shows that it cannot be.
    pub fn add_link(&mut self, url: &str, pointer: &str) -> Result<(), Problem> {
        let url =
            ssrf::parse_url(url).map_err(|why| Problem::invalid_field(pointer, why.to_string()))?;
        if let Some(guard) = &self.guard {
            guard
                .check(&url)
                .map_err(|why| Problem::invalid_field(pointer, why.to_string()))?;
        }
        self.add(0, pointer)
    }

    /// Counts an image or file of `bytes`; an error if it exceeds a limit.
    pub fn add(&mut self, bytes: usize, pointer: &str) -> Result<(), Problem> {
        let AttachmentLimits {
            count,
            bytes: max_each,
            total,
        } = self.limits;
        self.count += 1;
        self.bytes += bytes;
        let why = if self.count > count {
            format!("a request has at most {count} images and files (limits.attachments)")
        } else if bytes > max_each {
            format!("has {bytes} bytes; at most {max_each} are allowed (limits.attachment_bytes)")
        } else if self.bytes > total {
            let suffix = "of images and files in total (limits.conversation_bytes)";
            format!("a request has at most {total} bytes {suffix}")
        } else {
            return Ok(());
        };
        Err(Problem::attachments_too_large(pointer, why))
    }
}

impl ContentInput {
    /// The content, checked. `pointer` is its place in the body.
    pub fn into_content(
        self,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Content, Problem> {
        let parts = match self {
            Self::Text(text) => return Ok(Content::Text(text)),
            Self::Parts(parts) => parts,
        };
        if parts.is_empty() {
            return Err(Problem::invalid_field(pointer, "needs at least one part"));
        }
        let parts = parts
            .into_iter()
            .enumerate()
            .map(|(at, Object(part))| part.into_part(&format!("{pointer}/{at}"), counter));
        parts.collect::<Result<_, _>>().map(Content::Parts)
    }
}

impl PartInput {
    fn into_part(self, pointer: &str, counter: &mut AttachmentCounter) -> Result<Part, Problem> {
        let field_pointer = |field: &str| format!("{pointer}/{field}");
        if self.r#type == PartKind::Text {
            let extra = [
                ("media_type", self.media_type.is_some()),
                ("data", self.data.is_some()),
                ("url", self.url.is_some()),
                ("name", self.name.is_some()),
            ];
            if let Some((extra, _)) = extra.into_iter().find(|(_, is)| *is) {
                return Err(Problem::invalid_field(
                    field_pointer(extra),
                    "is not for a part of type text",
                ));
            }
            let text = self
                .text
                .ok_or_else(|| Problem::invalid_field(field_pointer("text"), REQUIRED))?;
            return Ok(Part::Text { text });
        }
        if self.text.is_some() {
            return Err(Problem::invalid_field(
                field_pointer("text"),
                "is only for a part of type text",
            ));
        }
        let wants_image = self.r#type == PartKind::Image;
        let name = self
            .name
            .map(|name| check_name(name, &field_pointer("name")))
            .transpose()?;
        let declared_type = self.media_type.as_deref();
        let declared_type =
            declared_type.map(|it| parse_media_type(it, wants_image, &field_pointer("media_type")));
        let declared_type = declared_type.transpose()?;
        if let Some(url) = self.url {
            if self.data.is_some() {
                return Err(Problem::invalid_field(
                    field_pointer("url"),
                    "is given beside data; send one of them",
                ));
            }
            counter.add_link(&url, &field_pointer("url"))?;
            return Ok(Part::Link(AttachmentLink {
                url,
                is_image: wants_image,
                media_type: declared_type,
                name,
            }));
        }
        if declared_type.is_none() {
            return Err(Problem::invalid_field(
                field_pointer("media_type"),
                REQUIRED,
            ));
        }
        let Base64Bytes(data) = self
            .data
            .ok_or_else(|| Problem::invalid_field(field_pointer("data"), "or url is required"))?;
        counter.add(data.len(), &field_pointer("data"))?;
        build_attachment(data, name, &field_pointer("media_type")).map(Part::from)
    }
}

const REQUIRED: &str = "is required";

/// The media type, if it is one of an image or of a file, as the part needs.
fn parse_media_type(
    declared_type: &str,
    wants_image: bool,
    pointer: &str,
) -> Result<MediaType, Problem> {
    let media_type = declared_type.parse::<MediaType>();
    let media_type = media_type
        .ok()
        .filter(|taken| taken.is_image() == wants_image);
    media_type.ok_or_else(|| {
        let (kind, list) = if wants_image {
            ("image", IMAGE_TYPES)
        } else {
            ("file", FILE_TYPES)
        };
        let quoted_type = quote(declared_type);
        Problem::invalid_field(
            pointer,
            format!("{quoted_type} is not supported; a part of type {kind} is {list}"),
        )
    })
}

/// Checks a file's name, which is shown to people and sent to providers.
pub fn check_name(name: String, pointer: &str) -> Result<String, Problem> {
    let is_valid = !name.trim().is_empty()
        && name.chars().nth(MAX_FILE_NAME).is_none()
        && !name.chars().any(char::is_control);
    match is_valid {
        true => Ok(name),
        false => Err(Problem::invalid_field(
            pointer,
            format!("must be 1 to {MAX_FILE_NAME} characters, none of them a control character"),
        )),
    }
}

/// An image or file. Its type is that of its bytes, whatever the request declares.
pub fn build_attachment(
    data: Bytes,
    name: Option<String>,
    pointer: &str,
) -> Result<Attachment, Problem> {
    Attachment::from_bytes(data, name).ok_or_else(|| {
        let why =
            format!("the type of the bytes is not supported; use {IMAGE_TYPES}, {FILE_TYPES}");
        Problem::invalid_field(pointer, why)
    })
}
