//! GET requests to untrusted URLs. Every hop is checked against the agent's hosts and the SSRF guard, the connection
//! goes to the vetted address, and time and size are bounded.

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, LOCATION, USER_AGENT};
use http::{HeaderMap, StatusCode};
use reqwest::{Client, Response};
use url::Url;

use crate::config;
use crate::fair::fair_semaphore::Permit;
use crate::ssrf::{self, SsrfError, SsrfGuard, ssrf_client};
use crate::tools::web::content::{self, ContentKind, FetchedContent, MAX_BYTES};

/// The configuration key of the hosts that the guard lets through.
const ALLOW_LIST_KEY: &str = "[tools.url_fetch] allow_hosts";
const MAX_REDIRECTS: usize = 5;
/// The client itself limits the size of headers to about 400 KiB.
const MAX_HEADERS: usize = 100;
/// Most bytes of the body of an error response.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Most bytes of the text of an error response that the model sees.
const MAX_ERROR_TEXT: usize = 2000;
const ACCEPTED_TYPES: &str = "text/html, text/markdown, application/json, text/*;q=0.9, */*;q=0.1";

pub struct FetchResponse {
    /// The final URL, after redirects.
    pub url: Url,
    /// Never a redirect.
    pub status: StatusCode,
    pub is_redirected: bool,
    pub content: FetchedContent,
}

/// The text of a response with a status of success.
pub struct ResponseText {
    pub text: String,
    pub is_truncated: bool,
}

impl FetchResponse {
    /// The response as text, at most `max_bytes`. `sender` names in errors who responded. Converting a long page takes time,
    /// so it runs on a blocking thread, which keeps the permit: it continues even if the call is dropped.
    ///
    /// # Errors
    /// A status that is no success with the beginning of its text, or content that cannot be read, for the model.
    pub async fn into_text(
        self,
        sender: &str,
        max_bytes: usize,
        permit: Permit,
    ) -> Result<ResponseText, String> {
        let Self {
            url,
            status,
            content,
            ..
        } = self;
        if status.is_redirection() {
            return Err(format!(
                "{sender} answered {status}, a redirect, which is not followed"
            ));
        }
        let max_bytes = match status.is_success() {
            true => max_bytes,
            false => MAX_ERROR_TEXT,
        };
        let convert = move || {
            let _permit = permit;
            content.into_text(&url, max_bytes)
        };
        let converted = tokio::task::spawn_blocking(convert).await;
        let converted =
            converted.map_err(|_| format!("The response of {sender} could not be read"))?;
        if !status.is_success() {
            let start = converted.map(|(text, _)| text).unwrap_or_default();
            let separator = if start.is_empty() { "" } else { ":\n\n" };
            return Err(format!("{sender} answered {status}{separator}{start}"));
        }
        let converted = converted.map_err(|why| format!("{sender} {why}"));
        let (text, is_truncated) = converted?;
        Ok(ResponseText { text, is_truncated })
    }
}

/// A request with headers that may hold secrets.
pub struct OutgoingRequest {
    pub method: http::Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Option<String>,
    pub timeout: Duration,
}

/// Allows public hosts by HTTPS, and those that the configuration names.
pub fn https_guard(config: &config::UrlFetch) -> SsrfGuard {
    SsrfGuard::new(config.allow_hosts.iter().cloned(), ALLOW_LIST_KEY)
}

/// Why there is no response.
pub struct SendError {
    pub why: String,
    /// Whether the connection broke after the request was sent, or a part of it.
    pub is_end_unknown: bool,
}

impl From<String> for SendError {
    fn from(why: String) -> Self {
        Self {
            why,
            is_end_unknown: false,
        }
    }
}

impl SendError {
    fn new(url: &Url, error: &reqwest::Error) -> Self {
        Self {
            why: connection_error_message(url, error),
            is_end_unknown: !error.is_connect() && !error.is_builder(),
        }
    }
}

pub struct WebFetcher {
    guard: Arc<SsrfGuard>,
    timeout: Duration,
    /// Built on first use, because that reads the system's certificates.
    client: OnceLock<Result<Client, String>>,
}

impl WebFetcher {
    pub fn new(config: &config::UrlFetch) -> Self {
        Self::with_guard(config, SsrfGuard::allow_http)
    }

    /// Allows plain HTTP only for hosts that the configuration names.
    pub fn https_only(config: &config::UrlFetch) -> Self {
        Self::with_guard(config, |guard| guard)
    }

    fn with_guard(
        config: &config::UrlFetch,
        configure: impl FnOnce(SsrfGuard) -> SsrfGuard,
    ) -> Self {
        Self {
            guard: Arc::new(configure(https_guard(config))),
            timeout: config.timeout,
            client: OnceLock::new(),
        }
    }

    /// Fetches `address` and follows redirects. `hosts` are those that the agent may reach; empty allows every public
    /// host.
    pub async fn fetch(&self, address: &str, hosts: &[String]) -> Result<FetchResponse, String> {
        let url = ssrf::parse_url(address).map_err(|why| format!("The url {why}"))?;
        let request = async {
            let (url, is_redirected, response) = self.follow_redirects(url, hosts).await?;
            let read = read_response(url, is_redirected, response).await;
            read.map_err(|error| error.why)
        };
        self.with_timeout(request).await
    }

    /// Sends a request to a host that the operator named, and returns its response, also if it is a redirect.
    pub async fn send(&self, request: OutgoingRequest) -> Result<FetchResponse, SendError> {
        let OutgoingRequest {
            method,
            url,
            headers,
            body,
            timeout,
        } = request;
        self.check_allowed(&url, &[])?;
        let client = self.client.get_or_init(|| self.build_client());
        let client = client.as_ref().map_err(Clone::clone)?;
        let mut request = client
            .request(method, url.clone())
            .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, ACCEPTED_TYPES)
            .header(ACCEPT_ENCODING, "gzip")
            .headers(headers);
        if let Some(body) = body {
            request = request.body(body);
        }
        let response = async {
            let response = request.send().await;
            let response = response.map_err(|error| SendError::new(&url, &error))?;
            read_response(url.clone(), false, response).await
        };
        within(timeout, response).await
    }

    /// Downloads at most `max_bytes` from `address`.
    pub async fn download(&self, address: &str, max_bytes: usize) -> Result<Vec<u8>, String> {
        let url = ssrf::parse_url(address).map_err(|why| format!("the url {why}"))?;
        let request = async {
            let (url, _, mut response) = self.follow_redirects(url, &[]).await?;
            let status = response.status();
            if !status.is_success() {
                return Err(format!("the answer is {status}"));
            }
            let mut bytes = Vec::new();
            while let Some(chunk) = response
                .chunk()
                .await
                .map_err(|error| connection_error_message(&url, &error))?
            {
                if bytes.len() + chunk.len() > max_bytes {
                    return Err(format!(
                        "it is larger than {max_bytes} bytes (limits.attachment_bytes)"
                    ));
                }
                bytes.extend_from_slice(&chunk);
            }
            Ok(bytes)
        };
        self.with_timeout(request).await
    }

    async fn with_timeout<T>(
        &self,
        request: impl Future<Output = Result<T, String>>,
    ) -> Result<T, String> {
        within(self.timeout, request).await
    }

    /// Returns the first response that is no redirect, its URL, and whether a redirect led there.
    async fn follow_redirects(
        &self,
        mut url: Url,
        hosts: &[String],
    ) -> Result<(Url, bool, Response), String> {
        let client = self.client.get_or_init(|| self.build_client());
        let client = client.as_ref().map_err(Clone::clone)?;
        for hop in 0..=MAX_REDIRECTS {
            self.check_allowed(&url, hosts).map_err(|why| match hop {
                0 => why,
                _ => {
                    let shown = ssrf::redact_query(url.as_str());
                    format!("It redirects to {shown}, which is not followed: {why}")
                }
            })?;
            let request = client
                .get(url.clone())
                .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
                .header(ACCEPT, ACCEPTED_TYPES)
                .header(ACCEPT_ENCODING, "gzip")
                .send();
            let response = request
                .await
                .map_err(|error| connection_error_message(&url, &error))?;
            match redirect_target(&url, &response)? {
                Some(next_url) => url = next_url,
                None => return Ok((url, hop > 0, response)),
            }
        }
        Err(format!("It redirects more than {MAX_REDIRECTS} times"))
    }

    /// Checks a URL before its host name is resolved.
    fn check_allowed(&self, url: &Url, hosts: &[String]) -> Result<(), String> {
        let host = url.host_str().unwrap_or_default();
        if !hosts.is_empty()
            && !hosts
                .iter()
                .any(|pattern| ssrf::matches_pattern(pattern, host))
        {
            let hosts = hosts.join(", ");
            return Err(format!(
                "{host} is not one of the hosts that this agent may reach: {hosts}"
            ));
        }
        // The client calls the guard's resolver only for names, so an IP address in the URL is checked here.
        self.guard
            .check(url)
            .map_err(|refused| refusal_message(&refused))?;
        // Ports below 1024 belong to services other than HTTP, which may misread a request.
        let is_web = matches!(url.port(), None | Some(80 | 443 | 1024..));
        match is_web || self.guard.is_allowed(host) {
            true => Ok(()),
            false => Err("of the ports below 1024 only 80 and 443 can be reached".to_owned()),
        }
    }

    fn build_client(&self) -> Result<Client, String> {
        ssrf_client::client_builder(&self.guard)
            .http1_only()
            .http1_max_headers(MAX_HEADERS)
            .pool_max_idle_per_host(1)
            .pool_idle_timeout(Duration::from_secs(10))
            .build()
            .map_err(|error| format!("url_fetch has no HTTP client: {error}"))
    }
}

async fn within<T, E: From<String>>(
    timeout: Duration,
    request: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    match tokio::time::timeout(timeout, request).await {
        Ok(result) => result,
        Err(_) => Err(E::from(format!(
            "No complete response arrived within {} seconds",
            timeout.as_secs()
        ))),
    }
}

/// The URL that a response redirects to, if any.
fn redirect_target(url: &Url, response: &Response) -> Result<Option<Url>, String> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let Some(location) = response.headers().get(LOCATION) else {
        return Ok(None);
    };
    let bad_target = |why: &str| format!("It redirects to an address that {why}");
    // Bytes outside ASCII are usually UTF-8.
    let named = String::from_utf8_lossy(location.as_bytes());
    let next_url = url
        .join(named.trim())
        .map_err(|why| bad_target(&format!("is not a URL ({why})")))?;
    let next = ssrf::parse_url(next_url.as_str()).map_err(|why| bad_target(&why.to_string()))?;
    match (url.scheme(), next.scheme()) {
        // Anyone on the network path could forge the response. The model may still fetch the URL itself.
        ("https", "http") => Err(format!(
            "It redirects from https to {}, which is not followed",
            ssrf::redact_query(next.as_str())
        )),
        _ => Ok(Some(next)),
    }
}

/// Reads a response within the size limits.
async fn read_response(
    url: Url,
    is_redirected: bool,
    response: Response,
) -> Result<FetchResponse, SendError> {
    let status = response.status();
    let BodyFormat {
        kind,
        charset,
        is_gzip,
    } = BodyFormat::from_headers(response.headers());
    let content = match kind {
        Ok(kind) => {
            let max_bytes = match status.is_success() {
                true => MAX_BYTES,
                false => MAX_ERROR_BYTES,
            };
            let (bytes, is_truncated) = read_body(&url, response, max_bytes).await?;
            FetchedContent {
                kind,
                charset,
                is_gzip,
                bytes,
                is_truncated,
            }
        }
        Err(type_name) if status.is_success() => {
            let size = match response.content_length() {
                Some(bytes) => format!("{bytes} bytes"),
                None => "of unknown size".to_owned(),
            };
            // An HTTP tool may have a secret in its query.
            let shown = ssrf::redact_query(url.as_str());
            let why = format!("{shown} is {type_name} ({size}), and only text is read");
            return Err(why.into());
        }
        // The status of an error says enough.
        Err(_) => FetchedContent {
            kind: ContentKind::Text,
            charset: None,
            is_gzip: false,
            bytes: Vec::new(),
            is_truncated: false,
        },
    };
    Ok(FetchResponse {
        url,
        status,
        is_redirected,
        content,
    })
}

/// What the headers of a response say about its body.
struct BodyFormat {
    /// The error describes a body that is not text.
    kind: Result<ContentKind, String>,
    charset: Option<String>,
    is_gzip: bool,
}

impl BodyFormat {
    fn from_headers(headers: &HeaderMap) -> Self {
        let header = |name| {
            let value = headers.get(name)?;
            Some(String::from_utf8_lossy(http::HeaderValue::as_bytes(value)).into_owned())
        };
        let content_type = header(CONTENT_TYPE);
        let encoding = header(CONTENT_ENCODING).map(|it| it.trim().to_ascii_lowercase());
        let charset = content_type
            .as_deref()
            .and_then(|text| text.parse::<mime::Mime>().ok())
            .and_then(|mime| Some(mime.get_param(mime::CHARSET)?.as_str().to_owned()));
        let kind = content::content_kind(content_type.as_deref());
        let (is_gzip, kind) = match encoding.as_deref() {
            None | Some("" | "identity") => (false, kind),
            Some("gzip" | "x-gzip") => (true, kind),
            Some(_) => {
                let unsupported = "compressed in a way that was not requested".to_owned();
                (false, kind.and(Err(unsupported)))
            }
        };
        Self {
            kind,
            charset,
            is_gzip,
        }
    }
}

/// The first `max_bytes` of a body, and whether there are more.
async fn read_body(
    url: &Url,
    mut response: Response,
    max_bytes: usize,
) -> Result<(Vec<u8>, bool), SendError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| SendError::new(url, &error))?
    {
        let remaining = max_bytes - bytes.len();
        bytes.extend_from_slice(&chunk[..chunk.len().min(remaining)]);
        if chunk.len() > remaining {
            return Ok((bytes, true));
        }
    }
    Ok((bytes, false))
}

/// Why a URL is refused. Does not reveal the address of an internal name.
fn refusal_message(refused: &SsrfError) -> String {
    match refused {
        SsrfError::NotPublic { host, list, .. } => format!(
            "{host} is not on the public internet, and url_fetch reaches nothing else (the operator can allow the host: {list})"
        ),
        other => other.to_string(),
    }
}

/// Why there is no response: the guard's refusal, or the innermost cause.
fn connection_error_message(url: &Url, error: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = error;
    loop {
        if let Some(refused) = cause.downcast_ref::<SsrfError>() {
            return refusal_message(refused);
        }
        match cause.source() {
            Some(inner) => cause = inner,
            None => break,
        }
    }
    let host = url.host_str().unwrap_or_default();
    format!("No answer from {host}: {cause}")
}

#[cfg(test)]
mod tests {
    use super::WebFetcher;
    use crate::config;
    use crate::ssrf;

    fn check(address: &str, hosts: &[&str]) -> Result<(), String> {
        let fetcher = WebFetcher::new(&config::UrlFetch {
            allow_hosts: vec!["wiki.internal".to_owned()],
            ..config::UrlFetch::default()
        });
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        fetcher.check_allowed(&ssrf::parse_url(address).expect("a URL"), &hosts)
    }

    #[test]
    fn a_url_is_checked_against_the_hosts_and_the_guard() {
        assert_eq!(check("http://example.com/", &[]), Ok(()));
        assert_eq!(check("https://example.com:8443/", &[]), Ok(()));
        assert_eq!(check("http://wiki.internal:81/", &[]), Ok(()));
        let error = check("https://example.org/", &["example.com"]).expect_err("another host");
        assert!(error.contains("example.com"), "{error}");
        assert!(check("https://127.0.0.1/", &["127.0.0.1"]).is_err());
        assert!(check("http://example.com:25/", &[]).is_err());
        let error = check("http://10.1.2.3/", &[]).expect_err("private");
        assert!(error.contains("allow_hosts"), "{error}");
    }
}
