//! Converts the result of an MCP tool to the text that a model reads, with images and PDF files as attachments.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::RoleClient;
use rmcp::model::{
    CallToolResult, ContentBlock, CustomResult, JsonRpcMessage, ResourceContents, ServerResult,
};
use rmcp::service::RxJsonRpcMessage;
use serde_json::{Value, json};

use crate::domain::attachment::{Attachment, MediaType};
use crate::domain::message::shorten;
use crate::tools::ToolOutput;

/// Replaces content of a kind that later protocol versions may add.
const UNKNOWN_CONTENT: &str = "[content of a kind that axed does not support]";
/// The kinds of content that the SDK reads.
const KNOWN_KINDS: [&str; 5] = ["text", "image", "audio", "resource", "resource_link"];

/// Replaces content of unknown kinds in a tool's result by a text: the SDK reads a result with such content as JSON of
/// no known form.
pub fn replace_unknown_content(message: &mut RxJsonRpcMessage<RoleClient>) {
    let JsonRpcMessage::Response(response) = message else {
        return;
    };
    let ServerResult::CustomResult(CustomResult(value)) = &mut response.result else {
        return;
    };
    let Some(Value::Array(blocks)) = value.get_mut("content") else {
        return;
    };
    for block in blocks {
        let kind = block.get("type").and_then(Value::as_str);
        if kind.is_some_and(|kind| !KNOWN_KINDS.contains(&kind)) {
            *block = json!({"type": "text", "text": UNKNOWN_CONTENT});
        }
    }
    // A result that is still not readable stays without a known form.
    if let Ok(result) = serde_json::from_value::<CallToolResult>(value.take()) {
        response.result = ServerResult::CallToolResult(result);
    }
}

/// The text of a result with its attachments; an error, which has only text, if the server marks the result as one.
pub fn tool_output(result: CallToolResult) -> Result<ToolOutput, String> {
    let has_text = |block: &ContentBlock| {
        matches!(block, ContentBlock::Text(_))
            || matches!(block, ContentBlock::Resource(it) if matches!(it.resource, ResourceContents::TextResourceContents { .. }))
    };
    let structured = match result.content.iter().any(has_text) {
        // The protocol asks servers to repeat structured content as text.
        true => None,
        false => result.structured_content.map(|value| value.to_string()),
    };
    let mut attachments = Vec::new();
    let blocks = result.content.into_iter();
    let blocks = blocks.map(|it| block_text(it, &mut attachments));
    let parts: Vec<String> = blocks.chain(structured).collect();
    let text = parts.join("\n");
    match result.is_error {
        Some(true) if text.is_empty() => Err("the tool failed without a message".to_owned()),
        Some(true) => Err(text),
        _ => Ok(ToolOutput { text, attachments }),
    }
}

/// The text of a block. Images and files that models accept are added to `attachments`, and named in the text.
fn block_text(block: ContentBlock, attachments: &mut Vec<Attachment>) -> String {
    match block {
        ContentBlock::Text(text) => text.text,
        ContentBlock::Image(image) => match read_attachment(&image.mime_type, &image.data, None) {
            AttachmentResult::Attached(attachment) => push_attachment(attachment, attachments),
            AttachmentResult::Invalid(why) => {
                format!("[image: {}, left out: {why}]", image.mime_type)
            }
            AttachmentResult::Unsupported => placeholder("image", &image.mime_type, &image.data),
        },
        ContentBlock::Audio(audio) => placeholder("audio", &audio.mime_type, &audio.data),
        ContentBlock::ResourceLink(link) => format!("[resource: {}]", link.uri),
        ContentBlock::Resource(embedded) => match embedded.resource {
            ResourceContents::TextResourceContents { text, .. } => text,
            ResourceContents::BlobResourceContents {
                uri,
                mime_type,
                blob,
                ..
            } => {
                let kind = mime_type.as_deref().unwrap_or("unknown type");
                match read_attachment(kind, &blob, file_name(&uri)) {
                    AttachmentResult::Attached(attachment) => {
                        push_attachment(attachment, attachments)
                    }
                    AttachmentResult::Invalid(why) => {
                        format!("[resource: {uri}, {kind}, left out: {why}]")
                    }
                    AttachmentResult::Unsupported => {
                        format!("[resource: {uri}, {kind}, {} bytes]", decoded_len(&blob))
                    }
                }
            }
            _ => UNKNOWN_CONTENT.to_owned(),
        },
        _ => UNKNOWN_CONTENT.to_owned(),
    }
}

/// The last name of a URI's path. The query may hold a secret.
fn file_name(uri: &str) -> Option<&str> {
    let path = uri.split(['?', '#']).next()?;
    path.rsplit('/').next().filter(|name| !name.is_empty())
}

enum AttachmentResult {
    Attached(Attachment),
    /// The type is supported, but the data is invalid.
    Invalid(String),
    Unsupported,
}

/// Decodes data of the MIME type that the server states.
fn read_attachment(mime_type: &str, base64: &str, name: Option<&str>) -> AttachmentResult {
    let Ok(stated_type) = mime_type.parse::<MediaType>() else {
        return AttachmentResult::Unsupported;
    };
    let name = name.filter(|_| !stated_type.is_image());
    let name = name.map(|name| shorten(name, 200).replace(char::is_control, "_"));
    let Ok(data) = STANDARD.decode(base64) else {
        return AttachmentResult::Invalid("its data is not Base64".to_owned());
    };
    match Attachment::from_bytes(data.into(), name) {
        Some(attachment) if attachment.media_type == stated_type => {
            AttachmentResult::Attached(attachment)
        }
        _ => AttachmentResult::Invalid("its bytes are of another type".to_owned()),
    }
}

fn push_attachment(attachment: Attachment, attachments: &mut Vec<Attachment>) -> String {
    let text = format!("{}]", attachment.placeholder());
    attachments.push(attachment);
    text
}

fn placeholder(kind: &str, mime_type: &str, base64: &str) -> String {
    format!("[{kind}: {mime_type}, {} bytes]", decoded_len(base64))
}

/// The number of bytes that Base64 text decodes to.
fn decoded_len(base64: &str) -> usize {
    base64.trim_end_matches('=').len() * 3 / 4
}

#[cfg(test)]
mod tests {
    use rmcp::model::{JsonRpcMessage, ServerResult};
    use serde_json::{Value, json};

    use crate::tools::ToolOutput;

    fn output(result: Value) -> Result<ToolOutput, String> {
        super::tool_output(serde_json::from_value(result).expect("a result"))
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
        ]}));
        let expected = "hello\n[image: image/tiff, 5 bytes]\n[audio: audio/wav, 6 bytes]\n[resource: file:///a]\n\
                        in b\n[resource: file:///c, a/b, 2 bytes]";
        assert_eq!(result.as_deref(), Ok(expected));
    }

    #[test]
    fn content_of_an_unknown_kind_is_replaced() {
        let read = |block: Value| {
            let mut message = serde_json::from_value(json!({
                "jsonrpc": "2.0", "id": 1,
                "result": {"content": [{"type": "text", "text": "hello"}, block]},
            }))
            .expect("a message");
            super::replace_unknown_content(&mut message);
            match message {
                JsonRpcMessage::Response(response) => match response.result {
                    ServerResult::CallToolResult(result) => {
                        super::tool_output(result).ok().map(|output| output.text)
                    }
                    _ => None,
                },
                _ => None,
            }
        };
        let text = read(json!({"type": "video", "data": "aGVsbG8="}));
        let expected = "hello\n[content of a kind that axed does not support]";
        assert_eq!(text.as_deref(), Some(expected));
        let known = read(json!({"type": "text", "text": "too"}));
        assert_eq!(known.as_deref(), Some("hello\ntoo"));
        assert_eq!(read(json!({"type": "image"})), None);
    }

    #[test]
    fn attachments_must_match_their_stated_type() {
        let output = output(json!({"content": [
            {"type": "image", "mimeType": "image/gif", "data": "R0lGODlhIQ=="},
            {"type": "image", "mimeType": "image/png", "data": "R0lGODlhIQ=="},
            {"type": "resource", "resource": {"uri": "https://a.example/b.pdf?to=/c&key=s3cret#/d", "blob": "JVBERi0xLjc=", "mimeType": "application/pdf"}},
        ]}))
        .expect("an output");
        let expected = "[image: image/gif, 7 bytes]\n[image: image/png, left out: its bytes are of another type]\n\
                        [file: b.pdf, application/pdf, 8 bytes]";
        assert_eq!(output.text, expected);
        assert_eq!(output.attachments.len(), 2);
        assert_eq!(output.attachments[1].name.as_deref(), Some("b.pdf"));
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
}
