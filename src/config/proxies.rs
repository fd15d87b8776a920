//! The keys of `[server]` for proxies and web pages: `trusted_proxies`, `path_prefix` and `[server.cors]`.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::config::table_reader::TableReader;

/// Reads `trusted_proxies`: addresses and networks.
pub(in crate::config) fn read_trusted_proxies(s: &mut TableReader<'_>) -> Vec<IpNet> {
    let node = s.peek("trusted_proxies");
    let texts = s.text_list("trusted_proxies").unwrap_or_default();
    let mut networks = Vec::with_capacity(texts.len());
    for text in &texts {
        if let Some(network) = parse_network(text) {
            networks.push(network);
        } else if let Some(node) = &node {
            let message = format!(
                "contains {text:?}, which is not an address or a network; write them such as \"10.0.0.7\" or \"10.0.0.0/8\""
            );
            s.push_invalid(node, "trusted_proxies", &message);
        }
    }
    networks
}

fn parse_network(text: &str) -> Option<IpNet> {
    let text = text.trim();
    let network = text.parse::<IpNet>().ok();
    let network = network.or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
    network.map(|network| network.trunc())
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
