//! MCP's "Streamable HTTP": the client that requests go through. Knows no protocol message.

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use ::http::{HeaderName, HeaderValue};
use reqwest::{Client, Url};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransportConfig, StreamableHttpError,
};

use crate::net::{innermost, is_loopback};

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Requests at once: a server that answers only when a call is done keeps one for each call.
const MOST_REQUESTS: usize = 256;

/// A transport to that address, which nothing has been sent to yet.
///
/// # Errors
/// Why there is none, without a header's value.
pub fn connect(
    url: &str,
    headers: Vec<(String, String)>,
) -> Result<StreamableHttpClientTransport<Client>, String> {
    let parsed = Url::parse(url).map_err(|why| format!("its url cannot be read: {why}"))?;
    let mut custom = HashMap::with_capacity(headers.len());
    for (name, value) in headers {
        let wrong = || {
            format!(
                "its headers.{name} is no header's value: it must be visible characters on one line"
            )
        };
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        let mut value = HeaderValue::from_str(&value).map_err(|_| wrong())?;
        value.set_sensitive(true);
        custom.insert(parsed, value);
    }
    let mut builder = Client::builder()
        // A redirect would take the headers with it.
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .pool_idle_timeout(Duration::from_secs(60));
    if parsed.host_str().is_some_and(is_loopback) {
        builder = builder.no_proxy();
    }
    if parsed.scheme() == "http" {
        // Without redirects a plain address never needs the system's certificates; reading them takes a while.
        builder = builder.tls_certs_only([]);
    }
    let client = builder.build().map_err(|why| match why.source() {
        Some(cause) => format!("its HTTP client cannot be started: {cause}"),
        None => "its HTTP client cannot be started".to_owned(),
    })?;
    let config = StreamableHttpClientTransportConfig::with_uri(url)
        .custom_headers(custom)
        .max_concurrent_requests(MOST_REQUESTS);
    Ok(StreamableHttpClientTransport::with_client(client, config))
}

/// What an error of the HTTP client says without the address; none where it is another error.
pub fn told(error: &(dyn Error + 'static)) -> Option<String> {
    let error = match error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
        Some(StreamableHttpError::Client(error)) => error,
        _ => error.downcast_ref::<reqwest::Error>()?,
    };
    if let Some(status) = error.status() {
        return Some(format!("HTTP {}", status.as_u16()));
    }
    Some(innermost(error).unwrap_or_else(|| "the request failed".to_owned()))
}
