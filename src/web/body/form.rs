//! Reads the request of a run from a form (`multipart/form-data`, as `curl -F` sends it): texts and files named `input`, and
//! the other fields of the body as text.

use std::collections::BTreeSet;

use axum::body::Body;
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Multipart, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::config::AttachmentLimits;
use crate::domain::content::{Content, Part};
use crate::web::body::content::{self, AttachmentCounter};
use crate::web::body::json_body;
use crate::web::body::large_body::{body_too_large, total_too_large};
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

/// Allowance for the form's boundaries and part headers.
const FORM_OVERHEAD_BYTES: usize = 1 << 20;
/// Fields whose text is JSON; the text of all others is the value itself.
const JSON_FIELDS: [&str; 8] = [
    "budget",
    "labels",
    "messages",
    "params",
    "response_format",
    "stream",
    "timeout",
    "webhook",
];

#[derive(Debug)]
pub struct Form {
    /// The fields besides `input`, as a JSON object.
    pub fields: String,
    /// The content of the fields named `input`.
    pub input: Option<Content>,
    /// Counts the files of the request, of which the form has some already.
    pub counter: AttachmentCounter,
    /// SHA-256 of the content, without the boundaries, which differ each time that a form is sent.
    pub digest: [u8; 32],
}

/// Reads a form of at most `max_bytes` of text, and files within their limits.
pub async fn read(
    headers: &HeaderMap,
    body: Body,
    max_bytes: usize,
    limits: AttachmentLimits,
) -> Result<Form, Problem> {
    let max_total_bytes = max_bytes
        .saturating_add(limits.total)
        .saturating_add(FORM_OVERHEAD_BYTES);
    let mut request = Request::new(body);
    if let Some(kind) = headers.get(CONTENT_TYPE) {
        request.headers_mut().insert(CONTENT_TYPE, kind.clone());
    }
    DefaultBodyLimit::max(max_total_bytes).apply(&mut request);
    let form = Multipart::from_request(request, &()).await;
    let mut form = form.map_err(|error| malformed(&error.body_text()))?;
    let mut reader = FormReader::new(max_bytes, limits);
    let read_error = |error: MultipartError| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => total_too_large(max_total_bytes),
        _ => malformed(&error.body_text()),
    };
    while let Some(field) = form.next_field().await.map_err(read_error)? {
        reader.read_field(field, &read_error).await?;
    }
    reader.finish()
}

fn malformed(why: &str) -> Problem {
    let why = format!("the form cannot be read: {why}");
    Problem::new(ProblemCode::MalformedBody, why)
}

struct FormReader {
    max_bytes: usize,
    limits: AttachmentLimits,
    text_bytes: usize,
    names: BTreeSet<String>,
    fields: String,
    input: Vec<Part>,
    counter: AttachmentCounter,
    digest: Sha256,
}

impl FormReader {
    fn new(max_bytes: usize, limits: AttachmentLimits) -> Self {
        Self {
            max_bytes,
            limits,
            text_bytes: 0,
            names: BTreeSet::new(),
            fields: String::new(),
            input: Vec::new(),
            counter: AttachmentCounter::new(limits),
            digest: Sha256::new(),
        }
    }

    async fn read_field(
        &mut self,
        mut field: Field<'_>,
        read_error: &impl Fn(MultipartError) -> Problem,
    ) -> Result<(), Problem> {
        let name = field.name().unwrap_or_default().to_owned();
        let file_name = field.file_name().map(str::to_owned);
        let kind = field.content_type().unwrap_or_default().to_owned();
        let is_input = name == "input";
        if file_name.is_some() && !is_input {
            let why = "is a file, but only fields named input may be files";
            return Err(Problem::invalid_field(
                json_body::join_pointer("", &name),
                why,
            ));
        }
        let is_text = file_name.is_none() || kind.starts_with("text/");
        let field_pointer = json_body::join_pointer("", &name);
        self.text_bytes += name.len() + kind.len() + file_name.as_ref().map_or(0, String::len);
        let mut data = Vec::new();
        while let Some(chunk) = field.chunk().await.map_err(read_error)? {
            data.extend_from_slice(&chunk);
            if is_text && self.text_bytes + data.len() > self.max_bytes {
                return Err(body_too_large(self.max_bytes));
            }
            if !is_text && data.len() > self.limits.bytes {
                // This fails: the file is too large.
                self.counter.add(data.len(), &field_pointer)?;
            }
        }
        for part in [
            name.as_bytes(),
            file_name.as_deref().unwrap_or("").as_bytes(),
            kind.as_bytes(),
        ] {
            self.update_digest(part);
        }
        if is_text {
            self.update_digest(&data);
            self.text_bytes += data.len();
            let text = String::from_utf8(data);
            let text = text.map_err(|_| Problem::invalid_field(&field_pointer, "is not UTF-8"))?;
            if !is_input {
                return self.add_field(&name, &text);
            }
            self.input.push(Part::Text { text });
            return Ok(());
        }
        self.counter.add(data.len(), &field_pointer)?;
        let attachment = content::build_attachment(Bytes::from(data), None, &field_pointer)?;
        self.update_digest(&attachment.sha256.0);
        let file_name = file_name.filter(|name| !name.is_empty());
        let name = file_name.map(|name| content::check_name(name, &field_pointer));
        let mut attachment = attachment;
        attachment.name = name.transpose()?;
        self.input.push(attachment.into());
        Ok(())
    }

    /// Adds a field other than `input`.
    fn add_field(&mut self, name: &str, text: &str) -> Result<(), Problem> {
        if !self.names.insert(name.to_owned()) {
            return Err(Problem::invalid_field(
                json_body::join_pointer("", name),
                "is given twice",
            ));
        }
        let value = match JSON_FIELDS.contains(&name) {
            true => match serde_json::from_str::<&RawValue>(text) {
                Ok(json) => json.get().to_owned(),
                Err(error) => {
                    let why = format!("must be JSON in a form: {error}");
                    return Err(Problem::invalid_field(
                        json_body::join_pointer("", name),
                        why,
                    ));
                }
            },
            false => json_string(text),
        };
        let comma = if self.fields.is_empty() { "" } else { "," };
        self.fields
            .push_str(&format!("{comma}{}:{value}", json_string(name)));
        Ok(())
    }

    /// Adds to the digest with the length, so that fields cannot be confused by shifting bytes between them.
    fn update_digest(&mut self, bytes: &[u8]) {
        self.digest.update((bytes.len() as u64).to_le_bytes());
        self.digest.update(bytes);
    }

    fn finish(mut self) -> Result<Form, Problem> {
        let input = match self.input.len() {
            0 => None,
            1 => match self.input.remove(0) {
                Part::Text { text } => Some(Content::Text(text)),
                part => Some(Content::Parts(vec![part])),
            },
            _ => Some(Content::Parts(self.input)),
        };
        Ok(Form {
            fields: format!("{{{}}}", self.fields),
            input,
            counter: self.counter,
            digest: self.digest.finalize().into(),
        })
    }
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
