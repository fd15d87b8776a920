//! Requests to authorization servers and for metadata. Hosts that the agent's file names are reached as the MCP server
//! itself is; every other one only by https at a public address. Answers are bounded in time and size; no redirect is
//! followed.

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue, USER_AGENT};
use reqwest::{Client, RequestBuilder};
use url::Url;

use crate::domain::mcp_oauth::McpOauth;
use crate::ssrf::{self, SsrfGuard, normalize_host, root_cause, ssrf_client};
use crate::tools::mcp::oauth::challenge::Challenge;

/// The longest time of one request.
pub const TIMEOUT: Duration = Duration::from_secs(8);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const AGENT: &str = concat!("axed/", env!("CARGO_PKG_VERSION"));
const MAX_BODY: usize = 256 << 10;
/// What an error says would allow a host that is not public.
const ALLOWED_BY: &str = "oauth.issuer or oauth.token_url of the agent's file";

/// The HTTP clients for authorization servers. Each is built on first use, because that reads the system's
/// certificates.
#[derive(Default)]
pub struct OauthHttp {
    /// For hosts that agent files name.
    direct: OnceLock<Result<Client, String>>,
    loopback: OnceLock<Result<Client, String>>,
    /// For hosts that only a server names.
    guarded: OnceLock<Result<Client, String>>,
}

/// The hosts that an agent's file names for one server.
pub struct NamedHosts {
    guard: SsrfGuard,
    /// Those that the file itself reaches by plain HTTP.
    plain: BTreeSet<String>,
}

impl NamedHosts {
    /// The hosts of these URLs.
    pub fn new(urls: &[&Url]) -> Self {
        let host = |url: &Url| url.host_str().map(normalize_host);
        let hosts = urls.iter().filter_map(|url| host(url));
        let plain = urls.iter().filter(|url| url.scheme() == "http");
        Self {
            guard: SsrfGuard::new(hosts, ALLOWED_BY),
            plain: plain.filter_map(|url| host(url)).collect(),
        }
    }

    /// The hosts that the file names for a server.
    ///
    /// # Errors
    /// A URL cannot be read.
    pub fn of_server(server_url: &str, oauth: &McpOauth) -> Result<Self, String> {
        let named = [
            &oauth.issuer,
            &oauth.token_url,
            &oauth.device_authorization_url,
        ];
        let named = named.into_iter().flatten().map(String::as_str);
        let urls = named.chain([server_url]).map(Url::parse);
        let urls: Result<Vec<Url>, _> = urls.collect();
        let urls = urls.map_err(|why| why.to_string())?;
        Ok(Self::new(&urls.iter().collect::<Vec<_>>()))
    }

    /// Checks a URL before it gets a request.
    ///
    /// # Errors
    /// It is not https, or not public, and the file does not name it.
    pub fn check(&self, text: &str) -> Result<Url, String> {
        let url = ssrf::parse_url(text).map_err(|why| format!("its address {why}"))?;
        let host = normalize_host(url.host_str().unwrap_or_default());
        if url.scheme() != "https" && !self.plain.contains(&host) {
            return Err(format!("{host} must be reached by https"));
        }
        self.guard.check(&url).map_err(|why| why.to_string())?;
        Ok(url)
    }

    fn names(&self, url: &Url) -> bool {
        url.host_str()
            .is_some_and(|host| self.guard.is_allowed(host))
    }
}

/// A complete answer.
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl OauthHttp {
    /// Sends a GET request.
    ///
    /// # Errors
    /// Why there is no answer; the text follows the address.
    pub async fn get(&self, hosts: &NamedHosts, url: &Url, accept: &str) -> Result<Answer, String> {
        let client = self.client(hosts, url)?;
        let request = client.get(url.clone()).header(ACCEPT, accept);
        receive(request).await
    }

    /// The challenge of a server that gets a message without a token.
    ///
    /// # Errors
    /// As [`OauthHttp::get`].
    pub async fn challenge(
        &self,
        hosts: &NamedHosts,
        url: &Url,
    ) -> Result<Option<Challenge>, String> {
        let request = self
            .client(hosts, url)?
            .post(url.clone())
            .header(ACCEPT, "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header(USER_AGENT, AGENT)
            .body(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#);
        match tokio::time::timeout(TIMEOUT, request.send()).await {
            Ok(Ok(response)) => Ok(Challenge::of(response.status(), response.headers())),
            Ok(Err(error)) => Err(unreachable(&error)),
            Err(_) => Err(format!("did not answer within {TIMEOUT:?}")),
        }
    }

    /// Sends a form, with a user and a password if there are any.
    ///
    /// # Errors
    /// As [`OauthHttp::get`].
    pub async fn post_form(
        &self,
        hosts: &NamedHosts,
        url: &Url,
        form: &[(&str, &str)],
        basic: Option<(&str, &str)>,
    ) -> Result<Answer, String> {
        let body = url::form_urlencoded::Serializer::new(String::new())
            .extend_pairs(form)
            .finish();
        let mut request = self
            .client(hosts, url)?
            .post(url.clone())
            .header(ACCEPT, "application/json")
            .header("content-type", "application/x-www-form-urlencoded");
        if let Some((user, password)) = basic {
            let credentials = format!("Basic {}", basic_credentials(user, password));
            let value = HeaderValue::from_str(&credentials);
            let mut value = value.map_err(|_| "cannot be sent the credentials".to_owned())?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        receive(request.body(body)).await
    }

    fn client(&self, hosts: &NamedHosts, url: &Url) -> Result<Client, String> {
        let is_loopback = url.host_str().is_some_and(ssrf::is_loopback);
        let (cell, builder) = match (hosts.names(url), is_loopback) {
            (true, true) => (&self.loopback, Client::builder().no_proxy()),
            (true, false) => (&self.direct, Client::builder()),
            (false, _) => {
                let guard = Arc::new(SsrfGuard::new([], ALLOWED_BY));
                (&self.guarded, ssrf_client::client_builder(&guard))
            }
        };
        let build = || {
            let builder = builder
                .redirect(reqwest::redirect::Policy::none())
                .connect_timeout(CONNECT_TIMEOUT)
                .pool_max_idle_per_host(1);
            builder.build().map_err(|why| match why.source() {
                Some(cause) => format!("cannot be reached: {cause}"),
                None => "cannot be reached".to_owned(),
            })
        };
        cell.get_or_init(build).clone()
    }
}

/// What follows `Basic` in a header. RFC 6749, section 2.3.1: both are encoded before they are joined.
pub fn basic_credentials(user: &str, password: &str) -> String {
    let encode =
        |text: &str| -> String { url::form_urlencoded::byte_serialize(text.as_bytes()).collect() };
    STANDARD.encode(format!("{}:{}", encode(user), encode(password)))
}

fn unreachable(error: &reqwest::Error) -> String {
    match root_cause(error) {
        Some(cause) => format!("cannot be reached: {cause}"),
        None => "cannot be reached".to_owned(),
    }
}

async fn receive(request: RequestBuilder) -> Result<Answer, String> {
    let request = request.header(USER_AGENT, AGENT);
    let answer = async {
        let response = request.send().await;
        let mut response = response.map_err(|error| unreachable(&error))?;
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| unreachable(&error))?
        {
            if body.len() + chunk.len() > MAX_BODY {
                return Err(format!("answered with more than {MAX_BODY} bytes"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Answer {
            status: response.status().as_u16(),
            body,
        })
    };
    match tokio::time::timeout(TIMEOUT, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("did not answer within {TIMEOUT:?}")),
    }
}

#[cfg(test)]
mod tests {
    use url::Url;

    use super::NamedHosts;

    #[test]
    fn only_named_hosts_may_be_private_and_only_plain_ones_plain() {
        let url = |text: &str| Url::parse(text).expect("a URL");
        let named = [
            url("https://mcp.example/mcp"),
            url("http://127.0.0.1:9/"),
            url("https://10.0.0.1/"),
        ];
        let hosts = NamedHosts::new(&named.iter().collect::<Vec<_>>());
        for good in [
            "https://mcp.example/token",
            "https://auth.example/token",
            "https://10.0.0.1:8443/token",
            "http://127.0.0.1:1/token",
        ] {
            assert!(hosts.check(good).is_ok(), "{good}");
        }
        for bad in [
            "http://mcp.example/token",
            "http://auth.example/token",
            "http://10.0.0.1/token",
            "https://10.0.0.2/token",
            "https://169.254.169.254/latest",
            "https://me:pass@auth.example/",
            "ftp://auth.example/",
            "/token",
        ] {
            assert!(hosts.check(bad).is_err(), "{bad}");
        }
    }
}
