//! The content of messages: texts, and pictures and files as data URLs, http URLs or Base64.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::domain::content::{Content, Part};
use crate::web::body::content::{AttachmentCounter, check_name};
use crate::web::body::json_body::{self, Object};
use crate::web::clients::attachment::AttachmentInput;
use crate::web::error::{Problem, quote};

/// A part of a message, in the forms of chat completions (`text`, `image_url`, `file`) and of responses (`input_text`,
/// `input_image`, `input_file`, `output_text`).
#[derive(Deserialize)]
#[serde(expecting = "an object with a type")]
struct PartInput {
    r#type: String,
    text: Option<String>,
    refusal: Option<String>,
    image_url: Option<ImageUrl>,
    file: Option<Object<FileInput>>,
    #[serde(flatten)]
    own_file: FileInput,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a URL, or an object with a url")]
enum ImageUrl {
    Text(String),
    Object { url: String },
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FileInput {
    file_data: Option<String>,
    file_url: Option<String>,
    filename: Option<String>,
    file_id: Option<String>,
}

/// Reads a text, or a list of parts, at `pointer` in the body. Null is an empty text.
pub fn parse(
    json: Option<&RawValue>,
    pointer: &str,
    counter: &mut AttachmentCounter,
) -> Result<Content, Problem> {
    let Some(json) = json.map(RawValue::get).filter(|json| *json != "null") else {
        return Ok(Content::default());
    };
    if json.starts_with('"') {
        return json_body::parse_raw(json, pointer).map(Content::Text);
    }
    if !json.starts_with('[') {
        let why = "must be a text or a list of parts, each with its type";
        return Err(Problem::invalid_field(pointer, why));
    }
    let parts = json_body::parse_raw::<Vec<PartInput>>(json, pointer)?;
    let parts = parts.into_iter().enumerate();
    let parts = parts.map(|(at, part)| part.into_part(&format!("{pointer}/{at}"), counter));
    let parts: Vec<Part> = parts.collect::<Result<_, _>>()?;
    match parts.as_slice() {
        [] => Ok(Content::default()),
        [Part::Text { text }] => Ok(Content::Text(text.clone())),
        _ => Ok(Content::Parts(parts)),
    }
}

/// As [`parse`], for messages that have only texts.
pub fn parse_text(
    json: Option<&RawValue>,
    pointer: &str,
    counter: &mut AttachmentCounter,
) -> Result<String, Problem> {
    match parse(json, pointer, counter)? {
        Content::Text(text) => Ok(text),
        Content::Parts(parts) => {
            let texts = parts.into_iter().map(|part| match part {
                Part::Text { text } => Ok(text),
                Part::Image(_) | Part::File(_) | Part::Link(_) => Err(Problem::invalid_field(
                    pointer,
                    "a message of this role has texts only",
                )),
            });
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
    }
}

impl PartInput {
    fn into_part(self, pointer: &str, counter: &mut AttachmentCounter) -> Result<Part, Problem> {
        let missing =
            |field: &str| Problem::invalid_field(format!("{pointer}/{field}"), "is required");
        match self.r#type.as_str() {
            "text" | "input_text" | "output_text" | "refusal" => {
                let text = self.text.or(self.refusal).ok_or_else(|| missing("text"))?;
                Ok(Part::Text { text })
            }
            "image_url" | "input_image" => {
                let url = match self.image_url.ok_or_else(|| missing("image_url"))? {
                    ImageUrl::Text(url) | ImageUrl::Object { url } => url,
                };
                attachment(url, None, true, &format!("{pointer}/image_url"), counter)
            }
            "file" => {
                let Object(file) = self.file.ok_or_else(|| missing("file"))?;
                file.into_part(&format!("{pointer}/file"), counter)
            }
            "input_file" => self.own_file.into_part(pointer, counter),
            other => Err(Problem::invalid_field(
                format!("{pointer}/type"),
                format!(
                    "{} is not supported: use texts, pictures and files",
                    quote(other)
                ),
            )),
        }
    }
}

impl FileInput {
    fn into_part(self, pointer: &str, counter: &mut AttachmentCounter) -> Result<Part, Problem> {
        if self.file_id.is_some() {
            let why = "is not supported: send the file in file_data";
            return Err(Problem::invalid_field(format!("{pointer}/file_id"), why));
        }
        let name = self.filename;
        let name = name.map(|name| check_name(name, &format!("{pointer}/filename")));
        let name = name.transpose()?;
        match (self.file_data, self.file_url) {
            (Some(data), _) => {
                attachment(data, name, false, &format!("{pointer}/file_data"), counter)
            }
            (None, Some(url)) => {
                attachment(url, name, false, &format!("{pointer}/file_url"), counter)
            }
            (None, None) => {
                let why = "is required";
                Err(Problem::invalid_field(format!("{pointer}/file_data"), why))
            }
        }
    }
}

/// The part of a data URL, of Base64, or of a URL that is fetched before the first turn.
fn attachment(
    source: String,
    name: Option<String>,
    is_image: bool,
    pointer: &str,
    counter: &mut AttachmentCounter,
) -> Result<Part, Problem> {
    // An unknown type is left to the bytes.
    let input = AttachmentInput {
        is_image,
        media_type: None,
        name,
    };
    match is_image || source.starts_with("http") || source.starts_with("data:") {
        true => input.from_url(source, pointer, counter),
        false => input.from_base64(&source, pointer, counter),
    }
}
