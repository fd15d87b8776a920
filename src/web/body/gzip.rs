//! Decompresses request bodies, and compresses a content that is sent many times.

use std::io;

use async_compression::tokio::bufread::{GzipDecoder, GzipEncoder};
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use bytes::Bytes;
use futures_util::TryStreamExt;
use http_body_util::Limited;
use tokio::io::AsyncReadExt;
use tokio_util::io::{ReaderStream, StreamReader};

use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;

/// By how much a compressed body may be larger than the decompressed one.
const OVERHEAD_BYTES: usize = 64 << 10;
/// Bytes of one frame of the decompressed body. The reader of the body checks its limits after each.
const FRAME_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentEncoding {
    Identity,
    Gzip,
}

impl ContentEncoding {
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, Problem> {
        let mut codings = headers.get_all(CONTENT_ENCODING).iter();
        let (coding, more) = (codings.next(), codings.next());
        let is = |name: &str| {
            coding.is_some_and(|coding| coding.as_bytes().eq_ignore_ascii_case(name.as_bytes()))
        };
        match more {
            None if coding.is_none() || is("identity") => Ok(Self::Identity),
            None if is("gzip") || is("x-gzip") => Ok(Self::Gzip),
            _ => Err(Problem::new(
                ProblemCode::UnsupportedEncoding,
                "the body's content-encoding is not supported; send the body with content-encoding: gzip, or without \
                 compression",
            )),
        }
    }

    /// The decompressed body, of which at most `max_bytes` are read: that bounds the compressed bytes too, which may be
    /// many and decompress to nothing.
    pub fn decode(self, body: Body, max_bytes: usize) -> Body {
        match self {
            Self::Identity => body,
            Self::Gzip => {
                let compressed = Limited::new(body, max_bytes.saturating_add(OVERHEAD_BYTES));
                let compressed = Body::new(compressed).into_data_stream();
                let compressed = StreamReader::new(compressed.map_err(io::Error::other));
                let mut decoder = GzipDecoder::new(compressed);
                decoder.multiple_members(true);
                Body::from_stream(ReaderStream::with_capacity(decoder, FRAME_BYTES))
            }
        }
    }
}

/// Whether a response may be compressed: `Accept-Encoding` names `gzip`, and not with the weight 0.
pub fn is_accepted(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter();
    let mut codings = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    codings.any(|coding| {
        let (name, parameters) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = parameters.trim().strip_prefix("q=");
        let is_refused = weight.is_some_and(|weight| weight.parse() == Ok(0.0));
        name.trim().eq_ignore_ascii_case("gzip") && !is_refused
    })
}

/// The compressed content; `None` if it cannot be compressed.
pub async fn compress(content: &[u8]) -> Option<Bytes> {
    let mut compressed = Vec::new();
    let mut encoder = GzipEncoder::new(content);
    encoder.read_to_end(&mut compressed).await.ok()?;
    Some(compressed.into())
}
