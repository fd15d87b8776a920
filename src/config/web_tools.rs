//! The sections of the web tools, `[tools.url_fetch]` and `[tools.web_search]`, and lists of allowed hosts.

use std::net::IpAddr;
use std::time::Duration;

use schemars::SchemaGenerator;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};

use crate::config::environment::Environment;
use crate::config::secrets::read_secret;
use crate::config::{SearchKind, WebSearch};
use crate::settings::document::Origin;
use crate::settings::kinds::check_variable_name;
use crate::settings::kinds::texts_schema;
use crate::settings::section::{Audience, Kind};
use crate::settings::table_reader::TableReader;
use crate::ssrf::{self, normalize_host};

/// `None` if no URL is configured.
pub(in crate::config) fn read_web_search(
    s: &mut TableReader<'_>,
    environment: &Environment,
) -> Option<WebSearch> {
    let kind = s.choice("kind");
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

/// Hosts that the SSRF guard lets through.
pub(in crate::config) struct AllowHosts;

impl Kind<Vec<String>> for AllowHosts {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Vec<String>) {
        let check = |hosts: Vec<String>| {
            let normalized: Vec<String> = hosts.iter().map(|host| normalize_host(host)).collect();
            match normalized.iter().position(|host| !is_host(host)) {
                Some(at) => Err(format!(
                    "contains {:?}, which is not a host; write names or addresses without scheme, port and path",
                    hosts[at]
                )),
                None => Ok(normalized),
            }
        };
        if let Some(hosts) = table.checked_list(key, check) {
            *value = hosts;
        }
    }

    fn show(&self, value: &Vec<String>, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, _generator: &mut SchemaGenerator) -> Value {
        texts_schema()
    }
}

fn is_host(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.parse::<IpAddr>().is_ok() || (!text.is_empty() && text.chars().all(is_plain))
}
