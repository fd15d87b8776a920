//! Converts the result of an MCP tool to the text that a model reads, with images and PDF files as attachments. Content
//! that cannot be read is named in the text, and costs nothing else of the result.

use std::borrow::Cow;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use crate::domain::attachment::{Attachment, MediaType};
use crate::domain::lenient_json::{is_true, scalar_text, text};
use crate::domain::message::shorten;
use crate::tools::ToolOutput;

/// Stands for content of a kind that later protocol versions may add.
const UNKNOWN_CONTENT: &str = "[content of a kind that axed does not support]";
/// Base64 with or without padding.
const STANDARD: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// The text of a result with its attachments; an error, which has only text, if the server marks the result as one.
pub fn tool_output(result: &Value) -> Result<ToolOutput, String> {
    let blocks = content_blocks(result);
    // The protocol asks servers to repeat structured content as text.
    let structured = match blocks.iter().any(|block| has_text(block)) {
        true => None,
        false => structured_content(result, &blocks),
    };
    let mut attachments = Vec::new();
    let texts = blocks.iter();
    let texts = texts.filter_map(|block| block_text(block, &mut attachments));
    let parts: Vec<String> = texts.chain(structured).collect();
    let text = parts.join("\n");
    match result.get("isError").is_some_and(is_true) {
        true if text.is_empty() => Err("the tool failed without a message".to_owned()),
        true => Err(text),
        false => Ok(ToolOutput {
            text,
            attachments,
            ..ToolOutput::default()
        }),
    }
}

/// The blocks of a result. Some servers send one without a list, a text, or a result that is none of the protocol's.
fn content_blocks(result: &Value) -> Vec<&Value> {
    match result.get("content") {
        Some(Value::Array(blocks)) => blocks.iter().collect(),
        Some(Value::Null) => Vec::new(),
        Some(block) => vec![block],
        None if result.get("structuredContent").is_some() => Vec::new(),
        None => match result {
            Value::Array(blocks) => blocks.iter().collect(),
            Value::Object(fields)
                if fields.keys().all(|key| key == "_meta" || key == "isError") =>
            {
                Vec::new()
            }
            Value::Null => Vec::new(),
            other => vec![other.get("toolResult").unwrap_or(other)],
        },
    }
}

/// What kind of content a block is, by its fields if it does not say so.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Image,
    Audio,
    Link,
    Resource,
    Unknown,
}

impl Kind {
    fn of(block: &Value) -> Self {
        match text(block, "type").map(str::to_ascii_lowercase).as_deref() {
            Some("text") => Self::Text,
            Some("image") => Self::Image,
            Some("audio") => Self::Audio,
            Some("resource_link") => Self::Link,
            Some("resource") => Self::Resource,
            _ if block.get("text").is_some_and(Value::is_string) => Self::Text,
            Some(_) => Self::Unknown,
            None if block.get("resource").is_some() || block.get("blob").is_some() => {
                Self::Resource
            }
            None if block.get("data").is_some_and(Value::is_string) => match mime_type(block) {
                Some(mime_type) if mime_type.starts_with("audio/") => Self::Audio,
                _ => Self::Image,
            },
            None if block.get("uri").is_some() => Self::Link,
            None => Self::Unknown,
        }
    }
}

/// The fields of an embedded resource.
fn resource(block: &Value) -> &Value {
    let resource = block.get("resource").filter(|it| it.is_object());
    resource.unwrap_or(block)
}

fn has_text(block: &Value) -> bool {
    match Kind::of(block) {
        Kind::Text => true,
        Kind::Resource => resource(block).get("text").is_some_and(|it| !it.is_null()),
        Kind::Unknown => !block.is_object() && !block.is_null(),
        Kind::Image | Kind::Audio | Kind::Link => false,
    }
}

/// The text of a block. Images and files that models accept are added to `attachments`, and named in the text.
fn block_text(block: &Value, attachments: &mut Vec<Attachment>) -> Option<String> {
    let text = match Kind::of(block) {
        Kind::Text => value_text(block.get("text")?)?,
        Kind::Image | Kind::Audio => {
            let source = block.get("source").unwrap_or(block);
            let kind = match Kind::of(block) {
                Kind::Audio => "audio",
                _ => "image",
            };
            let stated = mime_type(source).unwrap_or("unknown type");
            match text(source, "data") {
                None => format!("[{kind}: {stated}, without data]"),
                Some(data) => attached(data, None, stated, attachments)
                    .unwrap_or_else(|why| format!("[{kind}: {stated}, {why}]")),
            }
        }
        Kind::Link => {
            let name = text(block, "uri").or_else(|| text(block, "name"));
            format!("[resource: {}]", name.unwrap_or("without a URI"))
        }
        Kind::Resource => {
            let resource = resource(block);
            let uri = text(resource, "uri").unwrap_or("without a URI");
            let stated = mime_type(resource).unwrap_or("unknown type");
            match (
                resource.get("text").and_then(value_text),
                text(resource, "blob"),
            ) {
                (Some(text), _) => text,
                (None, Some(blob)) => attached(blob, file_name(uri), stated, attachments)
                    .unwrap_or_else(|why| format!("[resource: {uri}, {stated}, {why}]")),
                (None, None) => format!("[resource: {uri}, without data]"),
            }
        }
        Kind::Unknown => match block {
            Value::Null => return None,
            Value::Object(fields) if !fields.contains_key("type") => block.to_string(),
            Value::Object(_) => UNKNOWN_CONTENT.to_owned(),
            other => value_text(other)?,
        },
    };
    Some(text)
}

/// A text as it is, and other JSON as compact text.
fn value_text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        other => Some(scalar_text(other).unwrap_or_else(|| other.to_string())),
    }
}

fn mime_type(fields: &Value) -> Option<&str> {
    let keys = ["mimeType", "mime_type", "media_type", "mediaType"];
    keys.into_iter().find_map(|key| text(fields, key))
}

/// The structured content as text, without what the blocks contain too. `None` if nothing is left.
fn structured_content(result: &Value, blocks: &[&Value]) -> Option<String> {
    let content = result.get("structuredContent")?;
    let data = blocks.iter().flat_map(|block| {
        let places = [
            *block,
            resource(block),
            block.get("source").unwrap_or(block),
        ];
        places
            .into_iter()
            .flat_map(|fields| [text(fields, "data"), text(fields, "blob")])
    });
    let repeated = Repeated {
        blocks,
        data: data.flatten().collect(),
    };
    repeated.without(content).and_then(|rest| value_text(&rest))
}

/// What the content blocks of a result say already.
struct Repeated<'r> {
    blocks: &'r [&'r Value],
    /// The data of images and files.
    data: Vec<&'r str>,
}

impl Repeated<'_> {
    /// The value without what is repeated. `None` if all of it is.
    fn without<'v>(&self, value: &'v Value) -> Option<Cow<'v, Value>> {
        if self.blocks.contains(&value) {
            return None;
        }
        match value {
            Value::Null => None,
            Value::String(text) => {
                let is_repeated = self.data.iter().any(|data| {
                    let before = text.strip_suffix(data);
                    before.is_some_and(|it| it.is_empty() || it.starts_with("data:"))
                });
                (!is_repeated).then_some(Cow::Borrowed(value))
            }
            Value::Array(items) => {
                let rest: Vec<Cow<'_, Value>> =
                    items.iter().filter_map(|it| self.without(it)).collect();
                match rest.len() {
                    0 if !items.is_empty() => None,
                    _ => Some(Cow::Owned(rest.into_iter().map(Cow::into_owned).collect())),
                }
            }
            Value::Object(fields) => {
                let rest = fields.iter();
                let rest: Vec<_> = rest
                    .filter_map(|(name, value)| Some((name.clone(), self.without(value)?)))
                    .collect();
                match rest.len() {
                    0 if !fields.is_empty() => None,
                    _ => {
                        let rest = rest
                            .into_iter()
                            .map(|(name, value)| (name, value.into_owned()));
                        Some(Cow::Owned(Value::Object(rest.collect())))
                    }
                }
            }
            other => Some(Cow::Borrowed(other)),
        }
    }
}

/// The last name of a URI's path. The query may hold a secret.
fn file_name(uri: &str) -> Option<&str> {
    let path = uri.split(['?', '#']).next()?;
    path.rsplit('/').next().filter(|name| !name.is_empty())
}

/// Adds an image or a file to `attachments`; its type is that of its bytes, whatever the server states. Returns the text that
/// names it.
///
/// # Errors
/// Why it is left out; the text follows the stated type.
fn attached(
    base64: &str,
    name: Option<&str>,
    stated_type: &str,
    attachments: &mut Vec<Attachment>,
) -> Result<String, String> {
    let base64 = plain_base64(base64);
    let is_supported = stated_type.parse::<MediaType>().is_ok();
    let Ok(data) = STANDARD.decode(base64.as_bytes()) else {
        return Err("left out: its data is not Base64".to_owned());
    };
    let size = data.len();
    let Some(media_type) = MediaType::detect(&data) else {
        return Err(match is_supported {
            true => "left out: its bytes are of another type".to_owned(),
            false => format!("{size} bytes"),
        });
    };
    let name = name.filter(|_| !media_type.is_image());
    let name = name.map(|name| shorten(name, 200).replace(char::is_control, "_"));
    let attachment = Attachment::from_bytes(data.into(), name);
    let Some(attachment) = attachment else {
        return Err(format!("{size} bytes"));
    };
    let text = format!("{}]", attachment.placeholder());
    attachments.push(attachment);
    Ok(text)
}

/// The data of a `data:` URL or of wrapped lines, in the standard alphabet.
fn plain_base64(text: &str) -> Cow<'_, str> {
    let text = match text.strip_prefix("data:").and_then(|it| it.split_once(',')) {
        Some((_, data)) => data,
        None => text,
    };
    match text.contains(|c: char| c.is_whitespace() || matches!(c, '-' | '_')) {
        false => Cow::Borrowed(text),
        true => {
            let letters = text.chars().filter(|c| !c.is_whitespace());
            let letters = letters.map(|c| match c {
                '-' => '+',
                '_' => '/',
                other => other,
            });
            Cow::Owned(letters.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::tools::ToolOutput;

    fn output(result: Value) -> Result<ToolOutput, String> {
        super::tool_output(&result)
    }

    fn text(result: Value) -> Result<String, String> {
        output(result).map(|output| output.text)
    }

    #[test]
    fn other_content_is_named_in_the_text() {
        let result = text(json!({"content": [
            {"type": "text", "text": "hello"},
            {"type": "image", "mimeType": "image/tiff", "data": "aGVsbG8="},
            {"type": "audio", "mimeType": "audio/wav", "data": "aGVsbG8h"},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
            {"type": "resource", "resource": {"uri": "file:///b", "text": "in b"}},
            {"type": "resource", "resource": {"uri": "file:///c", "blob": "aGk=", "mimeType": "a/b"}},
            {"type": "video", "data": "aGVsbG8="},
        ]}));
        let expected = "hello\n[image: image/tiff, 5 bytes]\n[audio: audio/wav, 6 bytes]\n[resource: file:///a]\n\
                        in b\n[resource: file:///c, a/b, 2 bytes]\n[content of a kind that axed does not support]";
        assert_eq!(result.as_deref(), Ok(expected));
    }

    #[test]
    fn an_odd_block_costs_only_itself() {
        for (odd, expected) in [
            (
                json!({"type": "resource_link"}),
                Some("[resource: without a URI]"),
            ),
            (
                json!({"type": "resource_link", "name": "a"}),
                Some("[resource: a]"),
            ),
            (
                json!({"type": "image"}),
                Some("[image: unknown type, without data]"),
            ),
            (
                json!({"type": "image", "data": "%", "mimeType": null}),
                Some("[image: unknown type, left out: its data is not Base64]"),
            ),
            (
                json!({"type": "resource"}),
                Some("[resource: without a URI, without data]"),
            ),
            (
                json!({"type": "resource", "uri": "a", "text": 7}),
                Some("7"),
            ),
            (json!({"type": "text", "text": {"a": 1}}), Some("{\"a\":1}")),
            (
                json!({"type": "text", "text": null, "annotations": 5}),
                None,
            ),
            (json!({"type": "markdown", "text": "# a"}), Some("# a")),
            (json!({"text": "untyped", "_meta": []}), Some("untyped")),
            (json!("bare"), Some("bare")),
            (json!(5), Some("5")),
            (json!(null), None),
        ] {
            let result = text(json!({"content": [{"type": "text", "text": "forty-two"}, odd]}));
            let expected = [Some("forty-two"), expected];
            let expected: Vec<&str> = expected.into_iter().flatten().collect();
            assert_eq!(result, Ok(expected.join("\n")), "{odd}");
        }
    }

    #[test]
    fn a_result_has_many_forms() {
        for (result, expected) in [
            (json!({"content": "plain"}), "plain"),
            (json!({"content": {"type": "text", "text": "one"}}), "one"),
            (json!({"content": null, "structuredContent": [1]}), "[1]"),
            (json!({"content": null}), ""),
            (json!({}), ""),
            (json!(null), ""),
            (json!("plain"), "plain"),
            (json!([{"type": "text", "text": "one"}]), "one"),
            (json!({"toolResult": "old"}), "old"),
            (json!({"temperature": 5}), "{\"temperature\":5}"),
            (
                json!({"content": [{"type": "text", "text": "a"}], "isError": null, "_meta": 5}),
                "a",
            ),
        ] {
            assert_eq!(text(result.clone()).as_deref(), Ok(expected), "{result}");
        }
        assert_eq!(
            text(json!({"content": "no", "isError": "true"})),
            Err("no".to_owned())
        );
    }

    #[test]
    fn attachments_have_the_type_of_their_bytes() {
        let output = output(json!({"content": [
            {"type": "image", "mimeType": "image/gif", "data": "R0lGODlhIQ=="},
            {"type": "image", "mimeType": "image/png", "data": "R0lG\nODlhIQ"},
            {"type": "image", "data": "data:image/png;base64,R0lGODlhIQ=="},
            {"type": "image", "mimeType": "image/png", "data": "aGVsbG8="},
            {"type": "resource", "resource": {"uri": "https://a.example/b.pdf?to=/c&key=s3cret#/d", "blob": "JVBERi0xLjc=", "mimeType": "application/octet-stream"}},
        ]}))
        .expect("an output");
        let expected = "[image: image/gif, 7 bytes]\n[image: image/gif, 7 bytes]\n[image: image/gif, 7 bytes]\n\
                        [image: image/png, left out: its bytes are of another type]\n\
                        [file: b.pdf, application/pdf, 8 bytes]";
        assert_eq!(output.text, expected);
        assert_eq!(output.attachments.len(), 4);
        assert_eq!(output.attachments[3].name.as_deref(), Some("b.pdf"));
    }

    #[test]
    fn structured_content_replaces_missing_text() {
        let structured = json!({"content": [], "structuredContent": {"b": 1, "a": 2}});
        assert_eq!(text(structured).as_deref(), Ok(r#"{"b":1,"a":2}"#));
        let both =
            json!({"content": [{"type": "text", "text": "one"}], "structuredContent": {"a": 1}});
        assert_eq!(text(both).as_deref(), Ok("one"));
        let failed = json!({"content": [{"type": "text", "text": "no"}], "isError": true});
        assert_eq!(text(failed), Err("no".to_owned()));
        assert!(text(json!({"content": [], "isError": true})).is_err());
    }

    #[test]
    fn structured_content_does_not_repeat_a_picture() {
        let picture = json!({"type": "image", "mimeType": "image/gif", "data": "R0lGODlhIQ=="});
        let alone = "[image: image/gif, 7 bytes]";
        for (structured, expected) in [
            (json!({"content": [picture]}), alone),
            (json!([picture]), alone),
            (json!({"image": "R0lGODlhIQ=="}), alone),
            (json!({"url": "data:image/gif;base64,R0lGODlhIQ=="}), alone),
            (
                json!({"content": [picture], "width": 7}),
                "[image: image/gif, 7 bytes]\n{\"width\":7}",
            ),
            (json!(null), alone),
        ] {
            let result = json!({"content": [picture], "structuredContent": structured});
            assert_eq!(text(result).as_deref(), Ok(expected), "{structured}");
        }
    }
}
