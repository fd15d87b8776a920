//! Pictures and files as each wire sends them. `tests/validate_wire.sh` holds these bodies against the SDKs' types.

use std::sync::Arc;

use axed::config::models::ModelFacts;
use axed::domain::agent::params::Params;
use axed::domain::attachment::{Attachment, Blobs};
use axed::domain::content::{Content, Part};
use axed::domain::message::{
    AssistantMessage, Message, ToolCall, ToolResult, ToolSpec, empty_arguments,
};
use axed::providers::{ChatRequest, content_parts};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::support::attachments::{PDF, PNG, base64};
use crate::support::client::{WIRES, complete, recorded_stream, replay_client};
use crate::support::provider::recorded_request::Wire;

/// The bytes stay with the conversation's store: messages hold what they are known by.
fn stored(data: &'static [u8], name: Option<&str>, blobs: &mut Blobs) -> Attachment {
    let name = name.map(str::to_owned);
    let mut attachment = Attachment::from_bytes(Bytes::from_static(data), name).expect("a kind");
    let data = attachment.data.take().expect("bytes");
    blobs.insert(attachment.sha256, data);
    attachment
}

/// A question with a picture and a file, a call, and its result with a picture.
fn conversation() -> (Vec<Message>, Blobs) {
    let mut blobs = Blobs::new();
    let picture = stored(PNG, None, &mut blobs);
    let file = stored(PDF, Some("a.pdf"), &mut blobs);
    let text = |text: &str| Part::Text {
        text: text.to_owned(),
    };
    let parts = vec![
        text("Look at this:"),
        picture.clone().into(),
        text(" "),
        file.into(),
        text("What is it?"),
    ];
    let call = ToolCall {
        id: "call_1".to_owned(),
        provider_id: String::new(),
        name: "shoot".to_owned(),
        arguments: empty_arguments(),
        invalid_arguments: None,
    };
    let result = ToolResult {
        attachments: vec![picture],
        ..ToolResult::text(&call.id, "a screenshot", false)
    };
    let messages = vec![
        Message::user(Content::Parts(parts)),
        Message::Assistant(AssistantMessage {
            content: String::new(),
            tool_calls: vec![call],
            echo: None,
        }),
        Message::Tool {
            tool_results: vec![result],
        },
    ];
    (messages, blobs)
}

/// The body of a request on that wire.
async fn request_body(
    kind: Wire,
    messages: &[Message],
    blobs: Option<&Blobs>,
    facts: Option<&ModelFacts>,
    stream: bool,
) -> Value {
    let (service, served) = replay_client(kind, recorded_stream(kind));
    let tool = ToolSpec::new("shoot", "Takes a picture.", &Arc::clone(&object()));
    let request = ChatRequest {
        tool_choice: None,
        model: "model",
        system: "",
        messages,
        blobs,
        tools: &[tool],
        params: &Params::default(),
        stream,
        is_prompt_reused: false,
        facts,
        api_key: None,
        cache_key: "",
        conversation_id: "",
        trace: None,
    };
    // A whole reply is not what the service answers here; only what it was sent counts.
    let _ = complete(&served, request).await;
    let seen = service.requests().pop().expect("a request");
    serde_json::from_str(&seen.body).expect("JSON")
}

fn object() -> Arc<serde_json::value::RawValue> {
    serde_json::value::to_raw_value(&json!({"type": "object"}))
        .expect("JSON")
        .into()
}

#[tokio::test]
async fn each_wire_encodes_parts_in_its_format() {
    let (messages, blobs) = conversation();
    let (png, pdf) = (base64(PNG), base64(PDF));
    let png_url = format!("data:image/png;base64,{png}");
    let pdf_url = format!("data:application/pdf;base64,{pdf}");
    for (kind, stream) in WIRES.into_iter().flat_map(|it| [(it, true), (it, false)]) {
        let body = request_body(kind, &messages, Some(&blobs), None, stream).await;
        match kind {
            Wire::Anthropic => {
                let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}});
                let document = json!({
                    "type": "document", "title": "a.pdf",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": pdf},
                });
                let user = json!([
                    {"type": "text", "text": "Look at this:"}, image, document,
                    {"type": "text", "text": "What is it?"},
                ]);
                assert_eq!(body["messages"][0]["content"], user);
                let result = &body["messages"][2]["content"][0];
                let shown = json!([{"type": "text", "text": "a screenshot"}, image]);
                assert_eq!(result["content"], shown);
            }
            Wire::Openai => {
                let image = json!({"type": "image_url", "image_url": {"url": png_url}});
                let user = json!([
                    {"type": "text", "text": "Look at this:"}, image,
                    {"type": "file", "file": {"filename": "a.pdf", "file_data": pdf_url}},
                    {"type": "text", "text": "What is it?"},
                ]);
                assert_eq!(body["messages"][0]["content"], user);
                assert_eq!(body["messages"][2]["content"], "a screenshot");
                // A message of the role `tool` takes only text.
                let after = &body["messages"][3];
                assert_eq!(
                    (&after["role"], &after["content"][1]),
                    (&json!("user"), &image)
                );
            }
            Wire::Responses => {
                let image = json!({"type": "input_image", "image_url": png_url, "detail": "auto"});
                let user = json!([
                    {"type": "input_text", "text": "Look at this:"}, image,
                    {"type": "input_file", "filename": "a.pdf", "file_data": pdf_url},
                    {"type": "input_text", "text": "What is it?"},
                ]);
                assert_eq!(body["input"][0]["content"], user);
                let shown = json!([{"type": "input_text", "text": "a screenshot"}, image]);
                assert_eq!(body["input"][2]["output"], shown);
            }
            Wire::Ollama => {
                let user = &body["messages"][0];
                assert_eq!(user["images"], json!([png]));
                let text = user["content"].as_str().expect("a text");
                assert!(
                    text.contains(
                        "[file: a.pdf, application/pdf, left out: Ollama takes no files]"
                    )
                );
                assert!(text.starts_with("Look at this:") && text.ends_with("What is it?"));
                let after = &body["messages"][3];
                assert_eq!(
                    (&after["role"], &after["images"]),
                    (&json!("user"), &json!([png]))
                );
            }
        }
    }
}

#[tokio::test]
async fn a_model_without_pictures_gets_a_text_in_their_place() {
    let (messages, blobs) = conversation();
    let facts = ModelFacts {
        images: Some(false),
        pdf: Some(false),
        ..ModelFacts::default()
    };
    for kind in WIRES {
        let body = request_body(kind, &messages, Some(&blobs), Some(&facts), true).await;
        let body = body.to_string();
        assert!(!body.contains(&base64(PNG)), "{kind:?}: {body}");
        let size = PNG.len();
        let image =
            format!("[image: image/png, {size} bytes, left out: this model takes no images]");
        assert!(body.contains(&image), "{kind:?}: {body}");
        assert!(body.contains("takes no PDF files]"), "{kind:?}: {body}");
        // Neither are there bytes that went with another run.
        let gone = request_body(kind, &messages, None, None, true).await;
        let gone = gone.to_string();
        assert!(
            gone.contains("its bytes are no longer stored]"),
            "{kind:?}: {gone}"
        );
    }
    let warnings = content_parts::attachment_warnings("p/m", &messages, Some(&facts));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}
