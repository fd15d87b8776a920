//! The sections of the tools that reach the web: `[tools.url_fetch]` and `[tools.web_search]`.

use std::time::Duration;

use secrecy::SecretString;

use crate::config::load::{Environment, allow_hosts, set, variable};
use crate::config::section::Section;
use crate::config::{SearchKind, UrlFetch, WebSearch};
use crate::net;

/// Reads `[tools.url_fetch]`.
pub(in crate::config) fn url_fetch(s: &mut Section<'_>) -> UrlFetch {
    let usual = UrlFetch::default();
    UrlFetch {
        allow_hosts: allow_hosts(s),
        timeout: s.seconds("timeout", 1).unwrap_or(usual.timeout),
    }
}

/// Reads `[tools.web_search]`; none where it says nothing.
pub(in crate::config) fn web_search(
    s: &mut Section<'_>,
    environment: &Environment,
) -> Option<WebSearch> {
    let kinds = [
        ("searxng", SearchKind::Searxng),
        ("brave", SearchKind::Brave),
    ];
    let kind = s.one_of("kind", &kinds);
    let api_key_env = s.checked("api_key_env", variable);
    let timeout = s.seconds("timeout", 1);
    let is_begun = kind.is_some() || api_key_env.is_some() || timeout.is_some();
    if is_begun && s.peek("url").is_none() {
        s.missing(
            "url",
            "is required: the address that is asked, such as \"http://127.0.0.1:8888/search\"",
        );
    }
    let url = s.checked("url", |text| {
        net::parse(text).map(|url| SecretString::from(String::from(url)))
    })?;
    let api_key = api_key_env
        .as_deref()
        .and_then(|name| set(environment, name));
    Some(WebSearch {
        kind: kind.unwrap_or(SearchKind::Searxng),
        url,
        api_key: api_key.map(|key| SecretString::from(key.trim())),
        api_key_env,
        timeout: timeout.unwrap_or(Duration::from_secs(20)),
    })
}
