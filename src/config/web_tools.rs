//! The sections of the web tools, `[tools.url_fetch]` and `[tools.web_search]`, and lists of allowed hosts.

use std::net::IpAddr;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};

use crate::config::environment::Environment;
use crate::config::secrets::read_secret;
use crate::config::{SearchKind, UrlFetch, WebSearch};
use crate::settings::document::Origin;
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;
use crate::ssrf::{self, normalize_host};

pub(in crate::config) fn read_url_fetch(s: &mut TableReader<'_>) -> UrlFetch {
    let defaults = UrlFetch::default();
    UrlFetch {
        allow_hosts: read_allow_hosts(s),
        timeout: s.seconds("timeout", 1).unwrap_or(defaults.timeout),
    }
}

/// `None` if no URL is configured.
pub(in crate::config) fn read_web_search(
    s: &mut TableReader<'_>,
    environment: &Environment,
) -> Option<WebSearch> {
    let kinds = [
        ("searxng", SearchKind::Searxng),
        ("brave", SearchKind::Brave),
    ];
    let kind = s.one_of("kind", &kinds);
    let api_key_env = s.parsed_text("api_key_env", check_variable_name);
    let timeout = s.seconds("timeout", 1);
    let is_configured = kind.is_some() || api_key_env.is_some() || timeout.is_some();
    if is_configured && s.peek("url").is_none() {
        s.push_missing(
            "url",
            "is required: the address of the search service, such as \"http://127.0.0.1:8888/search\"",
        );
    }
    let url = s.parsed_text("url", |text| {
        let url = ssrf::parse_url(text).map_err(|error| error.to_string())?;
        Ok(SecretString::from(String::from(url)))
    })?;
    let api_key = api_key_env
        .as_deref()
        .map_or(Ok(None), |name| read_secret(environment, name));
    let api_key = api_key.unwrap_or_else(|error| {
        s.push_error(Origin::External(error.variable), error.reason);
        None
    });
    Some(WebSearch {
        kind: kind.unwrap_or(SearchKind::Searxng),
        url,
        api_key: api_key.map(|key| SecretString::from(key.expose_secret().trim())),
        api_key_env,
        timeout: timeout.unwrap_or(Duration::from_secs(20)),
    })
}

/// Reads `allow_hosts`: hosts that the SSRF guard lets through.
pub(in crate::config) fn read_allow_hosts(s: &mut TableReader<'_>) -> Vec<String> {
    let node = s.peek("allow_hosts");
    let hosts = s.text_list("allow_hosts").unwrap_or_default();
    let allow_hosts: Vec<String> = hosts.iter().map(|host| normalize_host(host)).collect();
    if let Some(invalid) = hosts.iter().find(|host| !is_host(&normalize_host(host)))
        && let Some(node) = &node
    {
        let message = format!(
            "contains {invalid:?}, which is not a host; write names or addresses without scheme, port and path"
        );
        s.push_invalid(node, "allow_hosts", &message);
    }
    allow_hosts
}

fn is_host(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.parse::<IpAddr>().is_ok() || (!text.is_empty() && text.chars().all(is_plain))
}
