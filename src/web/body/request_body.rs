//! Reads a request's body within its limits of size and time, and tells JSON, text and forms apart by the content type.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;

use crate::config::AttachmentLimits;
use crate::engine::blocking::run_blocking;
use crate::web::body::body_budget::{BodyAccount, BodyBudget, FREE_BYTES};
use crate::web::body::form::{self, Form};
use crate::web::body::gzip::ContentEncoding;
use crate::web::body::json_body::{decode_utf8, parse_json};
use crate::web::body::large_body::{DataField, LargeBodyLimiter, body_too_large, total_too_large};
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

/// Bodies above this size are parsed off the runtime's threads.
const LARGE_BYTES: usize = 256 << 10;

pub const FORM_CONTENT_TYPE: &str = "multipart/form-data";

/// The body of a request, by content type.
#[derive(Debug)]
pub enum RequestBody {
    Empty,
    /// A body that should be JSON; it is not parsed yet.
    Json(Bytes),
    /// `text/plain`
    Text(String),
    /// `multipart/form-data`
    Form(Box<Form>),
}

impl RequestBody {
    /// Equal for equal bodies: the bytes, or the digest of a form's content.
    pub fn identity_bytes(&self) -> &[u8] {
        match self {
            Self::Form(form) => &form.digest,
            Self::Empty => &[],
            Self::Json(bytes) => bytes,
            Self::Text(text) => text.as_bytes(),
        }
    }

    /// What the body is read as. Equal for equal bodies, however their `Content-Type` is spelled.
    pub fn content_type(&self) -> &'static str {
        match self {
            Self::Empty => "",
            Self::Json(_) => "application/json",
            Self::Text(_) => "text/plain",
            // Without its boundary, which is another one each time.
            Self::Form(_) => FORM_CONTENT_TYPE,
        }
    }

    /// What `parse` makes of the body.
    pub async fn parse<T: Send + 'static>(
        self,
        parse: impl FnOnce(Self) -> T + Send + 'static,
    ) -> T {
        parse_large(self.identity_bytes().len(), move || parse(self)).await
    }

    /// The JSON body as a `T`; the default if there is no body. Other content types are refused.
    pub fn json<T: DeserializeOwned + Default + JsonSchema>(&self) -> Result<T, Problem> {
        match self {
            Self::Empty => Ok(T::default()),
            Self::Json(bytes) => parse_json(bytes),
            Self::Text(_) => Err(unsupported_media_type("text/plain")),
            Self::Form(_) => Err(unsupported_media_type(FORM_CONTENT_TYPE)),
        }
    }
}

/// The result of `parse`, which reads this many bytes: many of them off the runtime's threads, so that other requests need not
/// wait.
pub async fn parse_large<T: Send + 'static>(
    bytes: usize,
    parse: impl FnOnce() -> T + Send + 'static,
) -> T {
    match bytes > LARGE_BYTES {
        true => run_blocking(parse).await,
        false => parse(),
    }
}

#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// Maximum bytes, without the data of attachments.
    pub max_bytes: usize,
    /// The limits of images and files in the body; `None` if it may not contain any.
    pub attachments: Option<AttachmentLimits>,
    /// The fields of a JSON body that have the data of images and files.
    pub data_fields: &'static [DataField],
    /// The time in which the whole body has to arrive.
    pub timeout: Duration,
    /// That of all bodies that are being read.
    pub budget: Arc<BodyBudget>,
}

/// Reads the whole body within its limits.
pub async fn read(
    parts: &Parts,
    body: Body,
    body_limits: BodyLimits,
) -> Result<RequestBody, Problem> {
    let account = body_limits.budget.account(parts);
    let read = read_counted(&parts.headers, body, body_limits, &account).await;
    account.check()?;
    read
}

async fn read_counted(
    headers: &HeaderMap,
    body: Body,
    body_limits: BodyLimits,
    account: &Arc<BodyAccount>,
) -> Result<RequestBody, Problem> {
    let BodyLimits {
        max_bytes,
        data_fields,
        timeout,
        ..
    } = body_limits;
    let content_length = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let content_type = ContentType::from_headers(headers);
    let encoding = ContentEncoding::from_headers(headers);
    let is_compressed = matches!(encoding, Ok(ContentEncoding::Gzip));
    let max_decoded_bytes = body_limits.attachments.map_or(max_bytes, |limits| {
        LargeBodyLimiter::max_total_bytes(max_bytes, limits)
    });
    let body = match &encoding {
        Ok(encoding) => encoding.decode(body, max_decoded_bytes),
        Err(_) => body,
    };
    let is_small =
        !is_compressed && content_length.is_some_and(|length| length <= FREE_BYTES as u64);
    let body = match is_small {
        true => body,
        false => account.meter(body),
    };
    if let (Ok(ContentType::Form), Some(limits)) = (&content_type, body_limits.attachments) {
        encoding?;
        let form = form::read(headers, body, max_bytes, limits);
        let form = tokio::time::timeout(timeout, form).await;
        let form = form.map_err(|_| body_timeout(timeout))??;
        return Ok(RequestBody::Form(Box::new(form)));
    }
    let attachments = match content_type {
        Ok(ContentType::Form) => return Err(unsupported_media_type(FORM_CONTENT_TYPE)),
        Ok(ContentType::Json) => body_limits.attachments,
        Ok(ContentType::Text) | Err(_) => None,
    };
    let max_total_bytes = attachments.map_or(max_bytes, |limits| {
        LargeBodyLimiter::max_total_bytes(max_bytes, limits)
    });
    let content_length = content_length.filter(|_| !is_compressed);
    if content_length.is_some_and(|length| length > max_total_bytes as u64) {
        return Err(match attachments {
            None => body_too_large(max_bytes),
            Some(_) => total_too_large(max_total_bytes),
        });
    }
    let large = attachments.map(|limits| LargeBodyLimiter::new(max_bytes, limits, data_fields));
    let bytes = collect(body, max_bytes, large);
    let bytes = tokio::time::timeout(timeout, bytes)
        .await
        .map_err(|_| body_timeout(timeout))??;
    if bytes.is_empty() {
        return Ok(RequestBody::Empty);
    }
    encoding?;
    match content_type? {
        ContentType::Json if bytes.trim_ascii().is_empty() => Ok(RequestBody::Empty),
        ContentType::Json => Ok(RequestBody::Json(bytes)),
        ContentType::Form => Err(unsupported_media_type(FORM_CONTENT_TYPE)),
        ContentType::Text => decode_utf8(&bytes).map(|text| RequestBody::Text(text.to_owned())),
    }
}

/// Reads the whole body within its limits, whatever its content type is.
pub async fn read_bytes(
    parts: &Parts,
    body: Body,
    body_limits: BodyLimits,
) -> Result<Bytes, Problem> {
    let BodyLimits {
        max_bytes, timeout, ..
    } = body_limits;
    let account = body_limits.budget.account(parts);
    let body = ContentEncoding::from_headers(&parts.headers)?.decode(body, max_bytes);
    let bytes = collect(account.meter(body), max_bytes, None);
    let bytes = tokio::time::timeout(timeout, bytes).await;
    account.check()?;
    bytes.map_err(|_| body_timeout(timeout))?
}

fn body_timeout(timeout: Duration) -> Problem {
    Problem::new(
        ProblemCode::RequestTimeout,
        format!("the body did not arrive within {} s", timeout.as_secs_f64()),
    )
}

/// Reads a body of at most `max_bytes`, or a larger one that `large` accepts.
async fn collect(
    mut body: Body,
    max_bytes: usize,
    mut large: Option<LargeBodyLimiter>,
) -> Result<Bytes, Problem> {
    let mut is_large = false;
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        // Decompressing is never interrupted by a wait for the network.
        tokio::task::consume_budget().await;
        let read_error = |error: axum::Error| {
            Problem::new(
                ProblemCode::MalformedBody,
                format!("the body ended early, or cannot be decompressed: {error}"),
            )
        };
        let Ok(data) = frame.map_err(read_error)?.into_data() else {
            continue;
        };
        if first.len() + all.len() + data.len() > max_bytes {
            let large = large.as_mut().ok_or_else(|| body_too_large(max_bytes))?;
            if !std::mem::replace(&mut is_large, true) {
                large.feed(&first)?;
                large.feed(&all)?;
            }
            large.feed(&data)?;
        }
        // Nearly every body is one frame, which is not copied.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

enum ContentType {
    Json,
    Text,
    Form,
}

impl ContentType {
    /// A body without a content type is read as JSON.
    fn from_headers(headers: &HeaderMap) -> Result<Self, Problem> {
        let Some(value) = headers.get(CONTENT_TYPE) else {
            return Ok(Self::Json);
        };
        let value = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
        let (essence, parameters) = value.split_once(';').unwrap_or((&value, ""));
        let kind = match essence.trim() {
            "" | "application/json" => Self::Json,
            json if json.starts_with("application/") && json.ends_with("+json") => Self::Json,
            "text/plain" => Self::Text,
            FORM_CONTENT_TYPE => return Ok(Self::Form),
            other => return Err(unsupported_media_type(other)),
        };
        let charset = parameters
            .split(';')
            .find_map(|parameter| parameter.trim().strip_prefix("charset="))
            .map(|charset| charset.trim_matches('"'));
        match charset {
            None | Some("utf-8" | "utf8" | "us-ascii") => Ok(kind),
            Some(other) => Err(Problem::new(
                ProblemCode::UnsupportedCharset,
                format!("charset {} is not supported; send UTF-8", quote(other)),
            )),
        }
    }
}

pub fn unsupported_media_type(content_type: &str) -> Problem {
    let hint = if content_type == "application/x-www-form-urlencoded" {
        "; curl sends this type by default: add -H 'content-type: application/json'"
    } else {
        ""
    };
    Problem::new(
        ProblemCode::UnsupportedMediaType,
        format!(
            "{} is not supported here; send application/json, or for a run text/plain with its input or multipart/form-data{hint}",
            quote(content_type)
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use axum::body::{Body, Bytes};
    use axum::http::Request;
    use axum::http::request::Parts;

    use super::{BodyBudget, BodyLimits, RequestBody, read};

    fn limits(timeout: Duration) -> BodyLimits {
        BodyLimits {
            max_bytes: 10,
            attachments: None,
            data_fields: &[],
            timeout,
            budget: Arc::new(BodyBudget::new(0, 10)),
        }
    }

    fn head(kind: &str) -> Parts {
        let request = Request::builder().header("content-type", kind).body(());
        request.expect("a request").into_parts().0
    }

    async fn read_body(kind: &str, body: impl Into<Body>) -> Result<RequestBody, u16> {
        read(&head(kind), body.into(), limits(Duration::from_secs(5)))
            .await
            .map_err(|problem| problem.status().as_u16())
    }

    #[tokio::test]
    async fn the_content_type_decides_how_a_body_is_read() {
        assert!(matches!(
            read_body("application/json; charset=UTF-8", "{}").await,
            Ok(RequestBody::Json(_))
        ));
        assert!(matches!(
            read_body("application/vnd.a+json", "{}").await,
            Ok(RequestBody::Json(_))
        ));
        assert!(matches!(
            read_body("", "{}").await,
            Ok(RequestBody::Json(_))
        ));
        assert!(
            matches!(read_body("text/plain", "hello").await, Ok(RequestBody::Text(text)) if text == "hello")
        );
        assert!(matches!(
            read_body("application/xml", "").await,
            Ok(RequestBody::Empty)
        ));
        assert!(matches!(
            read_body("application/x-www-form-urlencoded", "{}").await,
            Err(415)
        ));
        assert!(matches!(
            read_body("text/plain; charset=latin1", "x").await,
            Err(415)
        ));
        assert!(matches!(
            read_body("text/plain", Bytes::from_static(b"\xff")).await,
            Err(400)
        ));
        assert!(matches!(
            read_body("text/plain", "12345678901").await,
            Err(413)
        ));
    }

    #[tokio::test]
    async fn a_body_that_never_arrives_times_out() {
        let never =
            Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
        let limits = limits(Duration::from_millis(1));
        let problem = read(&head("text/plain"), never, limits)
            .await
            .expect_err("a problem");
        assert_eq!(problem.status(), 408);
    }
}
