//! The address of a service.

use std::borrow::Cow;
use std::fmt;

use url::Url;

use crate::ssrf;

/// Why a `base_url` is invalid. The texts do not quote it because it may contain a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BaseUrlError {
    #[error("base_url is not a URL ({cause}); it should look like http://localhost:8000/v1")]
    NotAUrl { cause: String },
    #[error(
        "base_url must start with http:// or https://; it should look like http://localhost:8000/v1"
    )]
    Scheme,
    #[error(
        "base_url must not hold a user or password (use api_key or headers); it should look like http://localhost:8000/v1"
    )]
    Credentials,
}

#[derive(Clone, Debug)]
pub struct BaseUrl {
    url: Url,
}

impl BaseUrl {
    /// Parses `http(s)://host[:port][/path]`, with or without a trailing slash. The default scheme is `http`.
    pub fn parse(text: &str) -> Result<Self, BaseUrlError> {
        let text = text.trim();
        let full = match text.contains("://") {
            true => Cow::Borrowed(text),
            false => Cow::Owned(format!("http://{text}")),
        };
        let mut url = Url::parse(&full).map_err(|error| BaseUrlError::NotAUrl {
            cause: error.to_string(),
        })?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(BaseUrlError::Scheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(BaseUrlError::Credentials);
        }
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        url.set_fragment(None);
        Ok(Self { url })
    }

    pub fn has_path(&self) -> bool {
        self.url.path() != "/"
    }

    /// Empty if the URL has no host.
    pub fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// Appends `path`, which starts with a slash, and keeps the query.
    pub fn join(&self, path: &str) -> Self {
        let mut url = self.url.clone();
        let full_path = format!("{}{path}", self.url.path().trim_end_matches('/'));
        url.set_path(&full_path);
        Self { url }
    }

    pub fn into_url(self) -> Url {
        self.url
    }

    pub fn is_loopback(&self) -> bool {
        ssrf::is_loopback(self.host())
    }
}

impl fmt::Display for BaseUrl {
    /// Omits the trailing slash, and the query because it may contain a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut url = self.url.clone();
        url.set_query(None);
        f.write_str(url.as_str().trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::BaseUrl;

    #[test]
    fn urls_parse_with_or_without_scheme_slash_and_query() {
        let normalized = |text: &str| BaseUrl::parse(text).expect("an address").to_string();
        assert_eq!(
            normalized("http://localhost:8000/"),
            "http://localhost:8000"
        );
        assert_eq!(normalized(" https://a.b/v1// "), "https://a.b/v1");
        assert_eq!(normalized("127.0.0.1:11434"), "http://127.0.0.1:11434");
        assert_eq!(normalized("https://a.b/v1?key=secret"), "https://a.b/v1");
        let joined = BaseUrl::parse("https://a.b/v1/?q=1")
            .expect("an address")
            .join("/chat");
        assert_eq!(joined.url.as_str(), "https://a.b/v1/chat?q=1");
        for bad in ["", "ftp://a", "http://", "http://me:secret@a", "http://a b"] {
            let message = BaseUrl::parse(bad).expect_err("an error").to_string();
            assert!(
                message.starts_with("base_url ") && !message.contains("secret"),
                "{message}"
            );
        }
    }
}
