//! The parts of a message as the input of a run.

use serde_json::value::RawValue;

use crate::domain::attachment::{FILE_TYPES, IMAGE_TYPES, MediaType};
use crate::domain::content::{AttachmentLink, Content, Part};
use crate::web::body::content::{AttachmentCounter, build_attachment, check_name, decode_base64};
use crate::web::body::large_body::DataField;
use crate::web::clients::a2a::message::PartInput;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

/// The fields with Base64. `data` is any JSON here, and `url` is no data URL.
pub const DATA_FIELDS: &[DataField] = &[DataField::anywhere("raw")];

/// What a message says.
#[derive(Debug)]
pub struct MessageContent {
    pub content: Content,
    /// The only data part, if it is an object and all other parts are texts; the texts are then the context.
    pub structured: Option<StructuredInput>,
}

#[derive(Debug)]
pub struct StructuredInput {
    /// The JSON of an object.
    pub object: Box<RawValue>,
    pub context: Option<String>,
}

/// Reads the parts, which are at `/message/parts` in the body.
pub fn parse(
    parts: Vec<PartInput>,
    counter: &mut AttachmentCounter,
) -> Result<MessageContent, Problem> {
    let structured = structured_input(&parts);
    let parts = parts.into_iter().enumerate();
    let parts = parts.map(|(at, part)| parse_part(part, &format!("/message/parts/{at}"), counter));
    let parts: Vec<Part> = parts.collect::<Result<_, _>>()?;
    let content = match <[Part; 1]>::try_from(parts) {
        Ok([Part::Text { text }]) => Content::Text(text),
        Ok([part]) => Content::Parts(vec![part]),
        Err(parts) => Content::Parts(parts),
    };
    if content.is_blank() {
        return Err(Problem::invalid_field("/message/parts", "are blank"));
    }
    Ok(MessageContent {
        content,
        structured,
    })
}

fn structured_input(parts: &[PartInput]) -> Option<StructuredInput> {
    let mut objects = parts.iter().filter_map(|part| part.data.as_deref());
    let object = objects.next().filter(|json| json.get().starts_with('{'))?;
    let texts: Vec<&str> = parts
        .iter()
        .filter_map(|part| part.text.as_deref())
        .collect();
    let context = texts.join("\n\n");
    (texts.len() + 1 == parts.len()).then(|| StructuredInput {
        object: object.to_owned(),
        context: (!context.trim().is_empty()).then_some(context),
    })
}

fn parse_part(
    part: PartInput,
    pointer: &str,
    counter: &mut AttachmentCounter,
) -> Result<Part, Problem> {
    let PartInput {
        text,
        raw,
        url,
        data,
        filename,
        media_type,
    } = part;
    let name = filename.filter(|name| !name.is_empty());
    let name = name.map(|name| check_name(name, &format!("{pointer}/filename")));
    let name = name.transpose()?;
    let media_type = media_type.filter(|it| !it.is_empty());
    match (text, raw, url, data) {
        (Some(text), None, None, None) => Ok(Part::Text { text }),
        (None, None, None, Some(data)) => Ok(Part::Text {
            text: data.get().to_owned(),
        }),
        (None, Some(raw), None, None) => {
            if let Some(media_type) = &media_type {
                supported_type(media_type, pointer)?;
            }
            let pointer = format!("{pointer}/raw");
            let bytes = decode_base64(&raw).map_err(|why| Problem::invalid_field(&pointer, why))?;
            counter.add(bytes.len(), &pointer)?;
            if MediaType::detect(&bytes).is_none() {
                return Err(unsupported("these bytes", &pointer));
            }
            build_attachment(bytes, name, &pointer).map(Part::from)
        }
        (None, None, Some(url), None) => {
            let why = "is required for a url, such as image/png or application/pdf";
            let declared = media_type
                .ok_or_else(|| Problem::invalid_field(format!("{pointer}/mediaType"), why))?;
            let declared = supported_type(&declared, pointer)?;
            let pointer = format!("{pointer}/url");
            counter.add_link(&url, &pointer)?;
            let is_image = declared.is_image();
            Ok(Part::Link(AttachmentLink {
                url,
                is_image,
                media_type: Some(declared),
                name: name.filter(|_| !is_image),
            }))
        }
        _ => Err(Problem::invalid_field(
            pointer,
            "needs exactly one of text, raw, url and data",
        )),
    }
}

fn supported_type(media_type: &str, pointer: &str) -> Result<MediaType, Problem> {
    let essence = media_type.split(';').next().unwrap_or_default().trim();
    essence
        .parse()
        .map_err(|_| unsupported(&quote(media_type), &format!("{pointer}/mediaType")))
}

fn unsupported(what: &str, pointer: &str) -> Problem {
    Problem::new(
        ProblemCode::UnsupportedMediaType,
        format!(
            "{pointer}: {what} cannot be a file here; send {IMAGE_TYPES}, {FILE_TYPES}, a text or data"
        ),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::parse;
    use crate::config::AttachmentLimits;
    use crate::web::body::content::AttachmentCounter;

    fn read(parts: Value) -> Result<(String, Option<String>), String> {
        let limits = AttachmentLimits {
            count: 1,
            bytes: 100,
            total: 100,
        };
        let parts = serde_json::from_value(parts).expect("parts");
        let parsed = parse(parts, &mut AttachmentCounter::new(limits));
        let parsed = parsed.map_err(|problem| problem.detail().to_owned())?;
        let object = parsed.structured.map(|it| it.object.get().to_owned());
        Ok((parsed.content.to_plain_text().into_owned(), object))
    }

    #[test]
    fn texts_and_data_are_read() {
        assert_eq!(read(json!([{"text": "a"}])), Ok(("a".into(), None)));
        let both = read(json!([{"text": "a"}, {"data": {"n": 1}}]));
        assert_eq!(
            both,
            Ok(("a\n\n{\"n\":1}".into(), Some("{\"n\":1}".into())))
        );
        let list = read(json!([{"data": [1]}]));
        assert_eq!(list, Ok(("[1]".into(), None)));
    }

    #[test]
    fn a_wrong_part_is_named() {
        for (parts, expected) in [
            (json!([{"text": " "}]), "/message/parts: are blank"),
            (
                json!([{"text": "a"}, {}]),
                "/message/parts/1: needs exactly one",
            ),
            (
                json!([{"text": "a", "url": "b"}]),
                "/message/parts/0: needs exactly one",
            ),
            (
                json!([{"raw": "AA=="}]),
                "/message/parts/0/raw: these bytes cannot be",
            ),
            (json!([{"raw": "%"}]), "/message/parts/0/raw: is not Base64"),
            (
                json!([{"raw": "AA==", "mediaType": "video/mp4"}]),
                "\"video/mp4\" cannot be",
            ),
            (
                json!([{"url": "https://a/b"}]),
                "/message/parts/0/mediaType: is required",
            ),
        ] {
            let error = read(parts).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
