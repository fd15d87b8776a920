//! Sends requests to one service, over connections that are kept for the next request, and reads the responses in chunks.

use std::error::Error;
use std::io::{self, Write};
use std::time::Duration;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use http::header::{ACCEPT, CONTENT_TYPE, PROXY_AUTHORIZATION};
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, timeout_at};

use crate::providers::http_client::connector::{Connector, Proxy};
use crate::providers::setup_error::SetupError;
use crate::ssrf::root_cause;

/// The longest time without any data. On a slow machine, a model processes a long prompt for minutes before its first token.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a connection without a request is kept.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Clones share the connections.
#[derive(Clone)]
pub struct Transport {
    client: Client<Connector, Full<Bytes>>,
    /// For a request and its whole response.
    timeout: Option<Duration>,
    proxy: Option<Proxy>,
}

#[derive(Debug)]
pub enum TransportError {
    Connect {
        /// By the service itself.
        is_refused: bool,
        cause: String,
    },
    /// No data within [`IDLE_TIMEOUT`], or no whole response within the configured time.
    Timeout,
    Broken {
        cause: String,
    },
}

/// A response whose body may not be complete yet.
pub struct HttpResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: ResponseBody,
    encoding: BodyEncoding,
    /// Read, and to be read again.
    put_back: Bytes,
    /// When the whole of it must have arrived.
    deadline: Option<Instant>,
}

/// Some gateways compress bodies although no request asks for it, and some do not say so.
enum BodyEncoding {
    /// The first byte does not decide.
    Unknown(Bytes),
    Identity,
    Gzip {
        decoder: Box<MultiGzDecoder<Vec<u8>>>,
        /// Received, and not yet decoded.
        compressed: Bytes,
    },
}

const GZIP_MAGIC: &[u8] = b"\x1f\x8b";
/// Decoded at once, so that the size limit of replies holds: a byte can become a thousand.
const GZIP_STEP: usize = 4 << 10;

enum ResponseBody {
    Network(Incoming),
    Chunks(Box<dyn Iterator<Item = Bytes> + Send>),
}

impl Transport {
    pub fn new(
        uri: &Uri,
        is_loopback: bool,
        timeout: Option<Duration>,
    ) -> Result<Self, SetupError> {
        let (connector, proxy) = Connector::new(uri, is_loopback)?;
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            // Thousands of agents may run at once, and each reuses a connection for its next turn.
            .pool_max_idle_per_host(usize::MAX)
            .build(connector);
        Ok(Self {
            client,
            timeout,
            proxy,
        })
    }

    /// Returns the response when its head has arrived. Follows no redirect.
    pub async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<HttpResponse, TransportError> {
        let headers = request.headers_mut();
        headers
            .entry(ACCEPT)
            .or_insert(HeaderValue::from_static("*/*"));
        let authorization = self.proxy.as_ref().and_then(|it| it.authorization.as_ref());
        if let Some(value) = authorization {
            headers
                .entry(PROXY_AUTHORIZATION)
                .or_insert_with(|| value.clone());
        }
        let deadline = self
            .timeout
            .and_then(|timeout| Instant::now().checked_add(timeout));
        let (head, body) = timeout_at(next_limit(deadline), self.client.request(request))
            .await
            .map_err(|_| TransportError::Timeout)?
            .map_err(|error| self.error(&error))?
            .into_parts();
        Ok(HttpResponse {
            status: head.status,
            headers: head.headers,
            body: ResponseBody::Network(body),
            encoding: BodyEncoding::Unknown(Bytes::new()),
            put_back: Bytes::new(),
            deadline,
        })
    }

    fn error(&self, error: &legacy::Error) -> TransportError {
        let cause = cause(error);
        match &self.proxy {
            _ if !error.is_connect() => TransportError::Broken { cause },
            Some(proxy) => TransportError::Connect {
                is_refused: false,
                cause: format!("through the proxy {}: {cause}", proxy.authority),
            },
            None => TransportError::Connect {
                is_refused: is_refused(error),
                cause,
            },
        }
    }
}

impl HttpResponse {
    /// A response that does not come from the network.
    ///
    /// # Errors
    /// The status or the content type is invalid.
    pub fn from_chunks(
        status: u16,
        content_type: &str,
        chunks: impl IntoIterator<Item = Bytes, IntoIter: Send + 'static>,
    ) -> Result<Self, http::Error> {
        let content_type = HeaderValue::from_str(content_type)?;
        Ok(Self {
            status: StatusCode::from_u16(status)?,
            headers: HeaderMap::from_iter([(CONTENT_TYPE, content_type)]),
            body: ResponseBody::Chunks(Box::new(chunks.into_iter())),
            encoding: BodyEncoding::Unknown(Bytes::new()),
            put_back: Bytes::new(),
            deadline: None,
        })
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The next bytes come first again.
    pub fn put_back(&mut self, bytes: Bytes) {
        self.put_back = bytes;
    }

    /// The next bytes of the body, decompressed; `None` at its end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, TransportError> {
        if !self.put_back.is_empty() {
            return Ok(Some(std::mem::take(&mut self.put_back)));
        }
        loop {
            if let BodyEncoding::Gzip {
                decoder,
                compressed,
            } = &mut self.encoding
                && !compressed.is_empty()
            {
                let step = compressed.split_to(compressed.len().min(GZIP_STEP));
                let decoded = decoder.write_all(&step).and_then(|()| decoder.flush());
                decoded.map_err(|error| gzip_error(&error))?;
                if let Some(bytes) = take_decoded(decoder) {
                    return Ok(Some(bytes));
                }
                continue;
            }
            let received = self.received_chunk().await?;
            match (&mut self.encoding, received) {
                (BodyEncoding::Identity, received) => return Ok(received),
                (BodyEncoding::Gzip { compressed, .. }, Some(received)) => *compressed = received,
                (BodyEncoding::Gzip { decoder, .. }, None) => {
                    let finished = decoder.try_finish();
                    finished.map_err(|error| gzip_error(&error))?;
                    return Ok(take_decoded(decoder));
                }
                (BodyEncoding::Unknown(start), received) => {
                    let is_end = received.is_none();
                    let received = received.unwrap_or_default();
                    let start = match start.is_empty() {
                        true => received,
                        false => Bytes::from([&start[..], &received[..]].concat()),
                    };
                    if start.starts_with(GZIP_MAGIC) {
                        self.encoding = BodyEncoding::Gzip {
                            decoder: Box::new(MultiGzDecoder::new(Vec::new())),
                            compressed: start,
                        };
                    } else if is_end || !GZIP_MAGIC.starts_with(&start) {
                        self.encoding = BodyEncoding::Identity;
                        if !start.is_empty() {
                            return Ok(Some(start));
                        }
                        if is_end {
                            return Ok(None);
                        }
                    } else {
                        self.encoding = BodyEncoding::Unknown(start);
                    }
                }
            }
        }
    }

    async fn received_chunk(&mut self) -> Result<Option<Bytes>, TransportError> {
        let body = match &mut self.body {
            ResponseBody::Chunks(chunks) => return Ok(chunks.next()),
            ResponseBody::Network(body) => body,
        };
        loop {
            let frame = timeout_at(next_limit(self.deadline), body.frame()).await;
            match frame.map_err(|_| TransportError::Timeout)? {
                None => return Ok(None),
                Some(Err(error)) => {
                    let cause = cause(&error);
                    return Err(TransportError::Broken { cause });
                }
                Some(Ok(frame)) => {
                    // Trailers say nothing that is needed.
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

fn take_decoded(decoder: &mut MultiGzDecoder<Vec<u8>>) -> Option<Bytes> {
    let decoded = std::mem::take(decoder.get_mut());
    (!decoded.is_empty()).then(|| Bytes::from(decoded))
}

fn gzip_error(error: &io::Error) -> TransportError {
    TransportError::Broken {
        cause: format!("the body is no valid gzip: {error}"),
    }
}

fn next_limit(deadline: Option<Instant>) -> Instant {
    let idle = Instant::now() + IDLE_TIMEOUT;
    deadline.map_or(idle, |deadline| deadline.min(idle))
}

fn is_refused(error: &legacy::Error) -> bool {
    std::iter::successors(error.source(), |&cause| cause.source())
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn cause(error: &dyn Error) -> String {
    root_cause(error).unwrap_or_else(|| error.to_string())
}
