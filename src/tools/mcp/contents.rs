//! What a tool of a server answered, as the text that a model reads. Pure.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};

/// Stands for what a later protocol may bring.
const UNKNOWN: &str = "[content of a kind that axed does not know]";

/// The text of a result; an error where the server marks it as one.
pub fn text(result: CallToolResult) -> Result<String, String> {
    let has_text = |block: &ContentBlock| {
        matches!(block, ContentBlock::Text(_))
            || matches!(block, ContentBlock::Resource(it) if matches!(it.resource, ResourceContents::TextResourceContents { .. }))
    };
    let structured = match result.content.iter().any(has_text) {
        // The protocol wants the same in words, too.
        true => None,
        false => result.structured_content.map(|value| value.to_string()),
    };
    let blocks = result.content.into_iter().map(block);
    let parts: Vec<String> = blocks.chain(structured).collect();
    let text = parts.join("\n");
    match result.is_error {
        Some(true) if text.is_empty() => Err("the tool failed and did not say why".to_owned()),
        Some(true) => Err(text),
        _ => Ok(text),
    }
}

fn block(block: ContentBlock) -> String {
    match block {
        ContentBlock::Text(text) => text.text,
        ContentBlock::Image(image) => data("image", &image.mime_type, &image.data),
        ContentBlock::Audio(audio) => data("audio", &audio.mime_type, &audio.data),
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
                format!("[resource: {uri}, {kind}, {} bytes]", decoded(&blob))
            }
            _ => UNKNOWN.to_owned(),
        },
        _ => UNKNOWN.to_owned(),
    }
}

fn data(kind: &str, mime_type: &str, base64: &str) -> String {
    format!("[{kind}: {mime_type}, {} bytes]", decoded(base64))
}

/// How many bytes a Base64 text stands for.
fn decoded(base64: &str) -> usize {
    base64.trim_end_matches('=').len() * 3 / 4
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    fn text(result: Value) -> Result<String, String> {
        super::text(serde_json::from_value(result).expect("a result"))
    }

    #[test]
    fn what_is_no_text_is_named() {
        let result = text(json!({"content": [
            {"type": "text", "text": "hello"},
            {"type": "image", "mimeType": "image/png", "data": "aGVsbG8="},
            {"type": "audio", "mimeType": "audio/wav", "data": "aGVsbG8h"},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
            {"type": "resource", "resource": {"uri": "file:///b", "text": "in b"}},
            {"type": "resource", "resource": {"uri": "file:///c", "blob": "aGk=", "mimeType": "a/b"}},
        ]}));
        let expected = "hello\n[image: image/png, 5 bytes]\n[audio: audio/wav, 6 bytes]\n[resource: file:///a]\n\
                        in b\n[resource: file:///c, a/b, 2 bytes]";
        assert_eq!(result.as_deref(), Ok(expected));
    }

    #[test]
    fn structure_speaks_where_no_text_does_and_errors_are_errors() {
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
