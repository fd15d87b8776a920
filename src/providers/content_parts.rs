//! Converts images and files for the wires: to Base64, or to a text that says why the model does not get them.

use std::borrow::Cow;
use std::fmt;

use base64::display::Base64Display;
use base64::engine::general_purpose::{GeneralPurpose, STANDARD};
use serde::{Serialize, Serializer};

use crate::config::models::ModelFacts;
use crate::domain::attachment::{Attachment, MediaType};
use crate::domain::content::Part;
use crate::domain::message::{Message, ToolResult};
use crate::domain::warning::{Warning, WarningCode};
use crate::providers::ChatRequest;

/// A part of a message, before a wire serializes it.
#[derive(Clone, Debug)]
pub enum ContentPart<'a> {
    /// Never blank.
    Text(Cow<'a, str>),
    Image(MediaData<'a>),
    /// A PDF file.
    File {
        name: &'a str,
        data: MediaData<'a>,
    },
}

/// Bytes to send as Base64, encoded directly into the request.
#[derive(Clone, Copy)]
pub struct MediaData<'a> {
    pub media_type: MediaType,
    bytes: &'a [u8],
}

impl fmt::Debug for MediaData<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes", self.media_type, self.bytes.len())
    }
}

impl<'a> MediaData<'a> {
    pub fn base64(self) -> Base64<'a> {
        Base64(self.bytes)
    }

    pub fn data_url(self) -> DataUrl<'a> {
        DataUrl(self)
    }
}

/// Serializes as Base64.
#[derive(Clone, Copy)]
pub struct Base64<'a>(&'a [u8]);

impl<'a> Base64<'a> {
    fn display(self) -> Base64Display<'a, 'static, GeneralPurpose> {
        Base64Display::new(self.0, &STANDARD)
    }
}

impl Serialize for Base64<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.display())
    }
}

/// Serializes as a `data:` URL.
#[derive(Clone, Copy)]
pub struct DataUrl<'a>(MediaData<'a>);

impl Serialize for DataUrl<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let MediaData { media_type, .. } = self.0;
        let base64 = self.0.base64().display();
        serializer.collect_str(&format_args!("data:{media_type};base64,{base64}"))
    }
}

/// Converts the parts of a user message.
pub fn user_parts<'a>(parts: &'a [Part], request: &ChatRequest<'a>) -> Vec<ContentPart<'a>> {
    let converted = parts.iter().filter_map(|part| match part {
        Part::Text { text } if text.trim().is_empty() => None,
        Part::Text { text } => Some(ContentPart::Text(Cow::Borrowed(text.as_str()))),
        Part::Image(attachment) | Part::File(attachment) => {
            Some(attachment_part(attachment, request))
        }
        // Links are resolved before a request, so this arm is a fallback.
        Part::Link(_) => Some(placeholder_text(part.to_plain_text().into_owned())),
    });
    converted.collect()
}

/// Converts a tool result with attachments; empty if it has no attachments.
pub fn result_parts<'a>(result: &'a ToolResult, request: &ChatRequest<'a>) -> Vec<ContentPart<'a>> {
    if result.attachments.is_empty() {
        return Vec::new();
    }
    let text = Some(result.content.as_str()).filter(|text| !text.trim().is_empty());
    let text = text.map(|text| ContentPart::Text(Cow::Borrowed(text)));
    let attachments = result
        .attachments
        .iter()
        .map(|it| attachment_part(it, request));
    text.into_iter().chain(attachments).collect()
}

/// Converts the attachments of tool results, for a wire that takes only text in a result. A text before each names its call.
pub fn result_attachment_parts<'a>(
    results: &'a [ToolResult],
    request: &ChatRequest<'a>,
) -> Vec<ContentPart<'a>> {
    let mut parts = Vec::new();
    for result in results.iter().filter(|it| !it.attachments.is_empty()) {
        let label = format!("[What the tool call {} returned:]", result.call_id);
        parts.push(ContentPart::Text(Cow::Owned(label)));
        parts.extend(
            result
                .attachments
                .iter()
                .map(|it| attachment_part(it, request)),
        );
    }
    parts
}

fn attachment_part<'a>(attachment: &'a Attachment, request: &ChatRequest<'a>) -> ContentPart<'a> {
    if let Some(kind) = unsupported_kind(attachment.media_type, request.facts) {
        let description = attachment.placeholder();
        return placeholder_text(format!(
            "{description}, left out: this model takes no {kind}]"
        ));
    }
    let stored = request.blobs.and_then(|it| it.get(&attachment.sha256));
    let Some(bytes) = attachment.data.as_ref().or(stored) else {
        let description = attachment.placeholder();
        return placeholder_text(format!(
            "{description}, left out: its bytes are no longer stored]"
        ));
    };
    let data = MediaData {
        media_type: attachment.media_type,
        bytes,
    };
    match data.media_type.is_image() {
        true => ContentPart::Image(data),
        false => ContentPart::File {
            name: attachment.name.as_deref().unwrap_or("document.pdf"),
            data,
        },
    }
}

pub fn placeholder_text<'a>(text: String) -> ContentPart<'a> {
    ContentPart::Text(Cow::Owned(text))
}

/// The kind of attachment that the model is known not to take. Unknown models take everything.
fn unsupported_kind(media_type: MediaType, facts: Option<&ModelFacts>) -> Option<&'static str> {
    let facts = facts?;
    let (is_supported, kind) = match media_type.is_image() {
        true => (facts.images, "images"),
        false => (facts.pdf, "PDF files"),
    };
    (is_supported == Some(false)).then_some(kind)
}

/// Advice for a request that a service rejected: if the messages have attachments and it is unknown whether the model takes
/// them, names the configuration key that turns them off.
pub fn in_doubt(
    provider: &str,
    model: &str,
    messages: &[Message],
    facts: Option<&ModelFacts>,
) -> Option<String> {
    let mut attached = messages.iter().flat_map(Message::attachments);
    let (kind, key) = attached.find_map(|attachment| {
        let is_image = attachment.media_type.is_image();
        let (is_supported, kind, key) = match is_image {
            true => (facts.and_then(|it| it.images), "images", "images"),
            false => (facts.and_then(|it| it.pdf), "PDF files", "pdf"),
        };
        is_supported.is_none().then_some((kind, key))
    })?;
    Some(format!(
        "the request has {kind}; if the model takes none, set {key} = false in [providers.{provider}.models.{model:?}]"
    ))
}

/// One warning for each kind of attachment that a request to this model replaces with a text.
pub fn attachment_warnings(
    model: &str,
    messages: &[Message],
    facts: Option<&ModelFacts>,
) -> Vec<Warning> {
    let mut warnings = Vec::new();
    for attachment in messages.iter().flat_map(Message::attachments) {
        if let Some(kind) = unsupported_kind(attachment.media_type, facts) {
            let message = format!("{model} takes no {kind}: a text replaces them");
            let warning = Warning::new(WarningCode::AttachmentReplaced, &message);
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
    }
    warnings
}
