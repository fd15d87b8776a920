//! The content of messages: a text, or parts with texts, pictures and documents.

use serde::Deserialize;
use serde_json::Value;

use crate::domain::attachment::{FILE_TYPES, IMAGE_TYPES, MediaType};
use crate::domain::content::{Content, Part};
use crate::web::body::content::{AttachmentCounter, check_name};
use crate::web::body::json_body;
use crate::web::body::large_body::DataField;
use crate::web::clients::attachment::AttachmentInput;
use crate::web::error::{Problem, quote};

/// The fields with Base64 or data URLs.
pub const DATA_FIELDS: &[DataField] = &[
    DataField::inside("source", "value"),
    DataField::anywhere("data"),
    DataField::anywhere("url"),
];

/// A part of AG-UI 1.0, or one with the type `binary` of the versions before.
#[derive(Deserialize)]
#[serde(
    tag = "type",
    rename_all = "lowercase",
    expecting = "an object with a type"
)]
enum PartInput {
    Text {
        text: String,
    },
    Image {
        source: Source,
    },
    Document {
        source: Source,
        #[serde(default)]
        metadata: Value,
    },
    #[serde(rename_all = "camelCase")]
    Binary {
        mime_type: String,
        data: Option<String>,
        url: Option<String>,
        filename: Option<String>,
    },
}

#[derive(Deserialize)]
#[serde(
    tag = "type",
    rename_all = "lowercase",
    expecting = "an object with a type"
)]
enum Source {
    #[serde(rename_all = "camelCase")]
    Data { value: String, mime_type: String },
    #[serde(rename_all = "camelCase")]
    Url {
        value: String,
        mime_type: Option<String>,
    },
}

/// Reads the content of the message at this index.
pub fn parse(
    message: &Value,
    at: usize,
    counter: &mut AttachmentCounter,
) -> Result<Vec<Part>, Problem> {
    let content = &message["content"];
    if let Some(text) = content.as_str() {
        let text = text.to_owned();
        return Ok(vec![Part::Text { text }]);
    }
    let parts = content.as_array().map(Vec::as_slice).unwrap_or_default();
    let parts = parts.iter().enumerate();
    let parts =
        parts.map(|(index, part)| read(part, &format!("/messages/{at}/content/{index}"), counter));
    parts.collect()
}

/// One content: a text if there are only texts, separated by blank lines.
pub fn join(parts: Vec<Part>) -> Content {
    let texts = parts.iter().map(|part| match part {
        Part::Text { text } => Some(text.as_str()),
        Part::Image(_) | Part::File(_) | Part::Link(_) => None,
    });
    match texts.collect::<Option<Vec<_>>>() {
        Some(texts) => Content::Text(texts.join("\n\n")),
        None => Content::Parts(parts),
    }
}

fn read(part: &Value, pointer: &str, counter: &mut AttachmentCounter) -> Result<Part, Problem> {
    if let Some(kind @ ("audio" | "video")) = part["type"].as_str() {
        let why = format!("{kind} is not supported: send texts, pictures and documents");
        return Err(Problem::invalid_field(format!("{pointer}/type"), why));
    }
    if part["source"]["type"] == "file" {
        let why = "is a file of a provider, which is not supported: send its bytes or its URL";
        return Err(Problem::invalid_field(format!("{pointer}/source"), why));
    }
    let part = PartInput::deserialize(part);
    let part = part.map_err(|error| {
        let why = format!("is no part of a message: {}", json_body::describe(&error));
        Problem::invalid_field(pointer, why)
    })?;
    match part {
        PartInput::Text { text } => Ok(Part::Text { text }),
        PartInput::Image { source } => {
            source.into_part(true, None, &format!("{pointer}/source"), counter)
        }
        PartInput::Document { source, metadata } => {
            let name = metadata["filename"].as_str().map(str::to_owned);
            let name = name.map(|name| check_name(name, &format!("{pointer}/metadata/filename")));
            let name = name.transpose()?;
            source.into_part(false, name, &format!("{pointer}/source"), counter)
        }
        PartInput::Binary {
            mime_type,
            data,
            url,
            filename,
        } => {
            let source = match (data, url) {
                (Some(value), _) => Source::Data { value, mime_type },
                (None, Some(value)) => Source::Url {
                    value,
                    mime_type: Some(mime_type),
                },
                (None, None) => {
                    let why = "needs data or url";
                    return Err(Problem::invalid_field(pointer, why));
                }
            };
            let is_image = source.media_type(pointer)?.is_some_and(MediaType::is_image);
            let name = filename.filter(|_| !is_image);
            let name = name.map(|name| check_name(name, &format!("{pointer}/filename")));
            source.into_part(is_image, name.transpose()?, pointer, counter)
        }
    }
}

impl Source {
    fn media_type(&self, pointer: &str) -> Result<Option<MediaType>, Problem> {
        let declared = match self {
            Self::Data { mime_type, .. } => Some(mime_type),
            Self::Url { mime_type, .. } => mime_type.as_ref(),
        };
        let Some(declared) = declared else {
            return Ok(None);
        };
        let essence = declared.split(';').next().unwrap_or_default().trim();
        essence.parse().map(Some).map_err(|_| {
            let why = format!(
                "{} is not supported; use {IMAGE_TYPES}, {FILE_TYPES}",
                quote(declared)
            );
            Problem::invalid_field(format!("{pointer}/mimeType"), why)
        })
    }

    fn into_part(
        self,
        is_image: bool,
        name: Option<String>,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Part, Problem> {
        let input = AttachmentInput {
            is_image,
            media_type: self.media_type(pointer)?,
            name,
        };
        let pointer = format!("{pointer}/value");
        match self {
            Self::Data { value, .. } => input.from_base64(&value, &pointer, counter),
            Self::Url { value, .. } => input.from_url(value, &pointer, counter),
        }
    }
}
