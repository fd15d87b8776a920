//! A GET at an address that nobody vouches for: each hop is held to the agent's hosts and to the guard, names are
//! resolved here and the connection goes to what was vetted, and time and bytes are bounded.

use std::error::Error;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::StatusCode;
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, LOCATION, USER_AGENT};
use reqwest::{Client, Response};
use url::Url;

use crate::config;
use crate::net::{self, Guard, Refused, guarded};
use crate::tools::url_fetch::content::{self, Content, Kind, MOST_BYTES};

/// The configuration's key that names the hosts which are exempt from the guard.
const LIST: &str = "[tools.url_fetch] allow_hosts";
/// Most redirects of one call.
const MOST_HOPS: usize = 5;
/// Most headers of an answer; the client itself holds their bytes to about 400 KiB.
const MOST_HEADERS: usize = 100;
/// Most bytes of an answer that is no success.
const MOST_OF_AN_ERROR: usize = 64 << 10;
const WANTED: &str = "text/html, text/markdown, application/json, text/*;q=0.9, */*;q=0.1";

/// What came back.
pub struct Answer {
    /// Whose answer it is.
    pub url: Url,
    /// HTTP's status; no redirect.
    pub status: StatusCode,
    /// Whether it was another address that was asked for.
    pub is_redirected: bool,
    /// The body.
    pub content: Content,
}

/// The web as far as models may see it.
pub struct Web {
    guard: Arc<Guard>,
    timeout: Duration,
    /// Made when it is first needed: it reads the system's certificates.
    client: OnceLock<Result<Client, String>>,
}

impl Web {
    /// As the configuration allows.
    pub fn new(config: &config::UrlFetch) -> Self {
        Self::with(config, Guard::with_http)
    }

    /// As the configuration allows, but by https only where it names no host.
    pub fn by_https(config: &config::UrlFetch) -> Self {
        Self::with(config, |guard| guard)
    }

    fn with(config: &config::UrlFetch, change: impl FnOnce(Guard) -> Guard) -> Self {
        let hosts = config.allow_hosts.iter().cloned();
        Self {
            guard: Arc::new(change(Guard::new(hosts, LIST))),
            timeout: config.timeout,
            client: OnceLock::new(),
        }
    }

    /// Asks for `address` and follows where it is sent. `hosts` are those of the agent; none means every public one.
    pub async fn get(&self, address: &str, hosts: &[String]) -> Result<Answer, String> {
        let url = net::parse(address).map_err(|why| format!("The url {why}"))?;
        let read = async {
            let (url, is_redirected, response) = self.follow(url, hosts).await?;
            answer(url, is_redirected, response).await
        };
        self.in_time(read).await
    }

    /// The bytes at `address`, at most so many.
    pub async fn download(&self, address: &str, most: usize) -> Result<Vec<u8>, String> {
        let url = net::parse(address).map_err(|why| format!("the url {why}"))?;
        let read = async {
            let (url, _, mut response) = self.follow(url, &[]).await?;
            let status = response.status();
            if !status.is_success() {
                return Err(format!("the answer is {status}"));
            }
            let mut bytes = Vec::new();
            while let Some(chunk) = response
                .chunk()
                .await
                .map_err(|error| unreached(&url, &error))?
            {
                if bytes.len() + chunk.len() > most {
                    return Err(format!(
                        "it is larger than {most} bytes (limits.attachment_bytes)"
                    ));
                }
                bytes.extend_from_slice(&chunk);
            }
            Ok(bytes)
        };
        self.in_time(read).await
    }

    async fn in_time<T>(&self, read: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        match tokio::time::timeout(self.timeout, read).await {
            Ok(answer) => answer,
            Err(_) => Err(format!(
                "No whole answer came within {} seconds",
                self.timeout.as_secs()
            )),
        }
    }

    /// The first answer that is no redirect, with its address and whether that is another one.
    async fn follow(
        &self,
        mut url: Url,
        hosts: &[String],
    ) -> Result<(Url, bool, Response), String> {
        let client = self.client.get_or_init(|| self.connector());
        let client = client.as_ref().map_err(Clone::clone)?;
        for hop in 0..=MOST_HOPS {
            self.check(&url, hosts).map_err(|why| match hop {
                0 => why,
                _ => {
                    let shown = net::shown(url.as_str());
                    format!("It redirects to {shown}, which is not followed: {why}")
                }
            })?;
            let sending = client
                .get(url.clone())
                .header(USER_AGENT, concat!("axed/", env!("CARGO_PKG_VERSION")))
                .header(ACCEPT, WANTED)
                .header(ACCEPT_ENCODING, "gzip")
                .send();
            let response = sending.await.map_err(|error| unreached(&url, &error))?;
            match target(&url, &response)? {
                Some(next) => url = next,
                None => return Ok((url, hop > 0, response)),
            }
        }
        Err(format!("It redirects more than {MOST_HOPS} times"))
    }

    /// Whether an address may be asked, before its name is resolved.
    fn check(&self, url: &Url, hosts: &[String]) -> Result<(), String> {
        let host = url.host_str().unwrap_or_default();
        if !hosts.is_empty() && !hosts.iter().any(|pattern| net::matches(pattern, host)) {
            let hosts = hosts.join(", ");
            return Err(format!(
                "{host} is not one of the hosts that this agent may ask: {hosts}"
            ));
        }
        // The client asks the resolver for names only: an address that stands in the URL is vetted here.
        self.guard.check(url).map_err(|refused| told(&refused))?;
        // Below 1024 live services that are not HTTP and would take a request for something else.
        let is_web = matches!(url.port(), None | Some(80 | 443 | 1024..));
        match is_web || self.guard.allows(host) {
            true => Ok(()),
            false => Err("no port below 1024 is asked but 80 and 443".to_owned()),
        }
    }

    fn connector(&self) -> Result<Client, String> {
        guarded::client(&self.guard)
            .http1_only()
            .http1_max_headers(MOST_HEADERS)
            .pool_max_idle_per_host(1)
            .pool_idle_timeout(Duration::from_secs(10))
            .build()
            .map_err(|error| format!("url_fetch has no HTTP client: {error}"))
    }
}

/// Where the answer sends us, if anywhere.
fn target(url: &Url, response: &Response) -> Result<Option<Url>, String> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let Some(named) = response.headers().get(LOCATION) else {
        return Ok(None);
    };
    let nowhere = |why: &str| format!("It redirects to an address that {why}");
    // Outside ASCII it is UTF-8 as a rule.
    let named = String::from_utf8_lossy(named.as_bytes());
    let next = url
        .join(named.trim())
        .map_err(|why| nowhere(&format!("is no URL ({why})")))?;
    let next = net::parse(next.as_str()).map_err(|why| nowhere(&why))?;
    match (url.scheme(), next.scheme()) {
        // Whoever is in between could answer anything. The model can still ask for it by itself.
        ("https", "http") => Err(format!(
            "It redirects from https to {}, which is not followed",
            net::shown(next.as_str())
        )),
        _ => Ok(Some(next)),
    }
}

/// Reads an answer as far as it may be.
async fn answer(url: Url, is_redirected: bool, mut response: Response) -> Result<Answer, String> {
    let status = response.status();
    let header = |name| {
        let value = response.headers().get(name)?;
        Some(String::from_utf8_lossy(http::HeaderValue::as_bytes(value)).into_owned())
    };
    let content_type = header(CONTENT_TYPE);
    let packed = header(CONTENT_ENCODING).map(|it| it.trim().to_ascii_lowercase());
    let charset = content_type
        .as_deref()
        .and_then(|named| named.parse::<mime::Mime>().ok())
        .and_then(|mime| Some(mime.get_param(mime::CHARSET)?.as_str().to_owned()));
    let (is_packed, is_coded) = match packed.as_deref() {
        None | Some("" | "identity") => (false, false),
        Some("gzip" | "x-gzip") => (true, false),
        Some(_) => (false, true),
    };
    let kind = match (content::kind(content_type.as_deref()), status.is_success()) {
        (Ok(_), true) if is_coded => Err("packed in a way that was not asked for".to_owned()),
        (kind, _) => kind,
    };
    let kind = match (kind, status.is_success()) {
        (Ok(kind), true) => kind,
        (Err(is), true) => {
            let size = match response.content_length() {
                Some(bytes) => format!("{bytes} bytes"),
                None => "of unknown size".to_owned(),
            };
            return Err(format!(
                "{url} is {is} ({size}), and url_fetch reads text only"
            ));
        }
        (Ok(kind), false) if !is_coded => kind,
        // Its status says enough.
        (_, false) => {
            return Ok(Answer {
                url,
                status,
                is_redirected,
                content: Content {
                    kind: Kind::Text,
                    charset: None,
                    is_packed: false,
                    bytes: Vec::new(),
                    is_cut: false,
                },
            });
        }
    };
    let most = match status.is_success() {
        true => MOST_BYTES,
        false => MOST_OF_AN_ERROR,
    };
    let mut bytes = Vec::new();
    let mut is_cut = false;
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| unreached(&url, &error))?
    {
        let room = most - bytes.len();
        bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            is_cut = true;
            break;
        }
    }
    Ok(Answer {
        url,
        status,
        is_redirected,
        content: Content {
            kind,
            charset,
            is_packed,
            bytes,
            is_cut,
        },
    })
}

/// Why an address is not asked. What a name of an inner network stands for is not the model's to know.
fn told(refused: &Refused) -> String {
    match refused {
        Refused::NotPublic { host, list, .. } => format!(
            "{host} is not on the public internet, and url_fetch reaches nothing else (the operator can allow the host: {list})"
        ),
        other => other.to_string(),
    }
}

/// Why nothing came: the guard's word, or the innermost cause.
fn unreached(url: &Url, error: &reqwest::Error) -> String {
    let mut cause: &(dyn Error + 'static) = error;
    loop {
        if let Some(refused) = cause.downcast_ref::<Refused>() {
            return told(refused);
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
    use super::Web;
    use crate::config;
    use crate::net;

    fn check(address: &str, hosts: &[&str]) -> Result<(), String> {
        let web = Web::new(&config::UrlFetch {
            allow_hosts: vec!["wiki.internal".to_owned()],
            ..config::UrlFetch::default()
        });
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        web.check(&net::parse(address).expect("a URL"), &hosts)
    }

    #[test]
    fn an_address_is_held_to_the_agents_hosts_and_to_the_guard() {
        assert_eq!(check("http://example.com/", &[]), Ok(()));
        assert_eq!(check("https://example.com:8443/", &[]), Ok(()));
        assert_eq!(check("http://wiki.internal:81/", &[]), Ok(()));
        let told = check("https://example.org/", &["example.com"]).expect_err("another host");
        assert!(told.contains("example.com"), "{told}");
        assert!(check("https://127.0.0.1/", &["127.0.0.1"]).is_err());
        assert!(check("http://example.com:25/", &[]).is_err());
        let told = check("http://10.1.2.3/", &[]).expect_err("private");
        assert!(told.contains("allow_hosts"), "{told}");
    }
}
