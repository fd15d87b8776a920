//! The keys of `[server]` for proxies and web pages: `trusted_proxies`, `path_prefix` and `[server.cors]`.

use std::net::IpAddr;

use ipnet::IpNet;
use url::Url;

use crate::config::{AllowedOrigins, Cors};
use crate::settings::table_reader::TableReader;

/// Reads `trusted_proxies`: addresses and networks.
pub(in crate::config) fn read_trusted_proxies(
    s: &mut TableReader<'_>,
    key: &'static str,
) -> Vec<IpNet> {
    let parse = |text: &str| {
        parse_network(text).ok_or_else(|| {
            format!(
                "contains {text:?}, which is not an address or a network; write them such as \"10.0.0.7\" or \"10.0.0.0/8\""
            )
        })
    };
    s.parsed_list(key, parse).unwrap_or_default()
}

fn parse_network(text: &str) -> Option<IpNet> {
    let text = text.trim();
    let network = text.parse::<IpNet>().ok();
    let network = network.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
    network.map(|network| network.trunc())
}

/// Reads `[server.cors]`; `None` if it names no origin.
pub(in crate::config) fn read_cors(top: &mut TableReader<'_>, key: &'static str) -> Option<Cors> {
    top.nested(key, read_origins)
}

fn read_origins(s: &mut TableReader<'_>) -> Option<Cors> {
    let node = s.peek("origins");
    let texts = s.text_list("origins").unwrap_or_default();
    let credentials_node = s.peek("credentials");
    let credentials = s.flag("credentials").unwrap_or(false);
    let is_any = texts.iter().any(|text| text == "*");
    let mut origins = Vec::with_capacity(texts.len());
    for text in texts.iter().filter(|text| *text != "*") {
        if let Some(origin) = parse_origin(text) {
            origins.push(origin);
        } else if let Some(node) = &node {
            let message = format!(
                "contains {text:?}, which is not an origin; write a scheme and a host, such as \"https://app.example\", \
                 without a path"
            );
            s.push_invalid(node, "origins", &message);
        }
    }
    if is_any
        && credentials
        && let Some(node) = &credentials_node
    {
        let message = "cannot be true with origins = [\"*\"]: any page could then act with the cookies of the person \
                       who opens it; name the origins";
        s.push_invalid(node, "credentials", message);
    }
    if credentials && texts.is_empty() {
        s.push_missing("origins", "is required with credentials: the origins of the pages, such as [\"https://app.example\"]");
    }
    let origins = match is_any {
        true => AllowedOrigins::Any,
        false => AllowedOrigins::Only(origins),
    };
    (!texts.is_empty()).then_some(Cors {
        origins,
        credentials,
    })
}

/// The origin as browsers write it. Apps may have schemes of their own, such as `tauri://localhost`.
fn parse_origin(text: &str) -> Option<String> {
    let url = Url::parse(text.trim()).ok()?;
    let is_bare = matches!(url.path(), "" | "/")
        && url.query().is_none()
        && url.fragment().is_none()
        && url.username().is_empty()
        && url.password().is_none();
    let host = url
        .host_str()
        .filter(|host| is_bare && !host.is_empty() && !host.contains('*'))?;
    Some(match url.port() {
        Some(port) => format!("{}://{host}:{port}", url.scheme()),
        None => format!("{}://{host}", url.scheme()),
    })
}

/// A path such as `/axed`; empty for `/`. The error follows the key.
pub fn parse_path_prefix(text: &str) -> Result<String, String> {
    let inner = text.trim_matches('/');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.' | '~');
    let is_segment = |part: &str| !matches!(part, "" | "." | "..");
    match inner {
        "" => Ok(String::new()),
        _ if inner.chars().all(is_plain) && inner.split('/').all(is_segment) => {
            Ok(format!("/{inner}"))
        }
        _ => Err("must be a path such as /axed, of letters, digits, - _ . ~".to_owned()),
    }
}
