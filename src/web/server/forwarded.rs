//! The client behind trusted proxies: reads `X-Forwarded-For|Proto|Host|Prefix` and `Forwarded` (RFC 7239). Only the values of
//! trusted proxies count: the client is the right-most address that is not one of them. A malformed value is ignored,
//! and so is everything to its left.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::http::header::FORWARDED;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName};
use ipnet::IpNet;

use crate::config::proxies::parse_path_prefix;
use crate::web::server::host::parse_authority;

const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Maximum proxies that one request passes; elements further to the left are ignored.
const MAX_HOPS: usize = 32;
/// Maximum characters of a prefix, because it is part of every link.
const MAX_PREFIX: usize = 256;

/// The proxies whose headers are read.
#[derive(Clone, Debug, Default)]
pub struct TrustedProxies(Vec<IpNet>);

/// The address that a connection comes from. The listener adds it to each request.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddress(pub IpAddr);

/// The address of the client, behind trusted proxies.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddress(pub IpAddr);

impl ClientAddress {
    /// The address, or of IPv6 its /64 network, which one client usually has as a whole.
    pub fn network(&self) -> IpAddr {
        match self.0.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
            address => address,
        }
    }
}

/// The prefix that a trusted proxy has removed from the request's path: `/something`.
#[derive(Clone, Debug)]
pub struct ForwardedPrefix(pub Arc<str>);

/// Where the client sent the request to, if a trusted proxy reports it.
#[derive(Clone, Debug)]
pub struct ForwardedOrigin {
    pub scheme: Option<&'static str>,
    pub host: Option<Authority>,
}

/// Who sent a request, and what for, as trusted proxies report it.
#[derive(Clone, Debug, Default)]
pub struct Client {
    /// `None` only for requests without a connection.
    pub address: Option<IpAddr>,
    /// `http` or `https`.
    pub scheme: Option<&'static str>,
    pub host: Option<Authority>,
    pub prefix: Option<ForwardedPrefix>,
}

impl TrustedProxies {
    pub fn new(networks: Vec<IpNet>) -> Self {
        Self(networks)
    }

    fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// The client of a request that came from `peer`. Without a trusted proxy it is the peer.
    pub fn client(&self, peer: Option<IpAddr>, headers: &HeaderMap) -> Client {
        let direct = Client {
            address: peer,
            ..Client::default()
        };
        let Some(peer) = peer.filter(|peer| self.trusts(*peer)) else {
            return direct;
        };
        let x_forwarded = headers.contains_key(FOR).then(|| elements(headers, &FOR));
        let forwarded = headers.contains_key(FORWARDED).then(|| hops(headers));
        let of_x = x_forwarded.as_ref().map(|addresses| {
            let addresses = addresses.iter().map(|text| parse_node(text));
            self.nearest_untrusted(peer, addresses)
        });
        let of_forwarded = forwarded.as_ref().map(|hops| {
            let addresses = hops.iter().map(|hop| hop.address);
            self.nearest_untrusted(peer, addresses)
        });
        let prefix = last(headers, &PREFIX).and_then(parse_prefix);
        match (of_x, of_forwarded) {
            // The proxy writes one of them and passes on the other as the client sent it. Which one is unknown.
            (Some((one, _)), Some((other, _))) if one != other => direct,
            (None, Some((address, at))) => {
                let hop = forwarded.and_then(|mut hops| hops.drain(..).nth(at));
                let hop = hop.unwrap_or_default();
                Client {
                    address: Some(address),
                    scheme: hop.scheme,
                    host: hop.host,
                    prefix,
                }
            }
            (of_x, _) => {
                let (address, at) = of_x.unwrap_or((peer, 0));
                let hops = x_forwarded.map_or(0, |addresses| addresses.len());
                Client {
                    address: Some(address),
                    scheme: at_hop(headers, &PROTO, at, hops).and_then(parse_scheme),
                    host: at_hop(headers, &HOST, at, hops)
                        .and_then(|host| parse_authority(host.as_bytes())),
                    prefix,
                }
            }
        }
    }

    /// Goes from the peer to the left while the addresses are trusted. Returns the address, and its index from the right.
    fn nearest_untrusted(
        &self,
        peer: IpAddr,
        addresses: impl Iterator<Item = Option<IpAddr>>,
    ) -> (IpAddr, usize) {
        let (mut nearest, mut at) = (peer, 0);
        for (index, address) in addresses.enumerate() {
            let Some(address) = address.filter(|_| self.trusts(nearest)) else {
                break;
            };
            (nearest, at) = (address.to_canonical(), index);
        }
        (nearest, at)
    }
}

/// The elements of a list in one or more headers, from the right.
fn elements<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Vec<&'h str> {
    let values = headers.get_all(name).iter().rev();
    // A value that is no text is an element that is not understood.
    let values = values.map(|value| value.to_str().unwrap_or_default());
    let elements = values.flat_map(|value| value.rsplit(',').map(str::trim));
    elements.take(MAX_HOPS).collect()
}

fn last<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    elements(headers, name).first().copied()
}

/// The element that belongs to the address at this index. If the lists differ in length, it is the one that the nearest
/// proxy has written.
fn at_hop<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
    at: usize,
    hops: usize,
) -> Option<&'h str> {
    let values = elements(headers, name);
    let at = if values.len() == hops { at } else { 0 };
    values.get(at).copied()
}

/// An address with or without a port, IPv6 with or without brackets.
fn parse_node(text: &str) -> Option<IpAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    bare.unwrap_or(text)
        .parse()
        .or_else(|_| text.parse::<SocketAddr>().map(|address| address.ip()))
        .ok()
}

fn parse_scheme(text: &str) -> Option<&'static str> {
    ["http", "https"]
        .into_iter()
        .find(|scheme| text.eq_ignore_ascii_case(scheme))
}

fn parse_prefix(text: &str) -> Option<ForwardedPrefix> {
    let is_path = text.starts_with('/') && text.len() <= MAX_PREFIX;
    let prefix = parse_path_prefix(text).ok().filter(|_| is_path)?;
    (!prefix.is_empty()).then(|| ForwardedPrefix(prefix.into()))
}

/// One element of `Forwarded`.
#[derive(Debug, Default)]
struct Hop {
    /// `None` if it is missing, hidden or malformed.
    address: Option<IpAddr>,
    scheme: Option<&'static str>,
    host: Option<Authority>,
}

/// The elements of `Forwarded`, from the right. A malformed header has none, because its quotes cannot be trusted to
/// separate elements.
fn hops(headers: &HeaderMap) -> Vec<Hop> {
    let mut hops = Vec::new();
    for value in headers.get_all(FORWARDED).iter().rev() {
        match value.to_str().ok().and_then(parse_forwarded) {
            Some(elements) => hops.extend(elements.into_iter().rev()),
            None => return Vec::new(),
        }
    }
    hops.truncate(MAX_HOPS);
    hops
}

/// `None` if the value does not have the syntax of RFC 7239, section 4.
fn parse_forwarded(value: &str) -> Option<Vec<Hop>> {
    split_unquoted(value, ',')?
        .into_iter()
        .map(parse_hop)
        .collect()
}

fn parse_hop(element: &str) -> Option<Hop> {
    let mut hop = Hop::default();
    let mut names: Vec<String> = Vec::new();
    for pair in split_unquoted(element, ';')? {
        let (name, value) = pair.split_once('=')?;
        let (name, value) = (name.to_ascii_lowercase(), unquote(value)?);
        match name.as_str() {
            "for" => hop.address = parse_node(&value),
            "proto" => hop.scheme = parse_scheme(&value),
            "host" => hop.host = parse_authority(value.as_bytes()),
            _ => {}
        }
        if names.contains(&name) {
            return None;
        }
        names.push(name);
    }
    Some(hop)
}

/// The trimmed parts between separators outside of quoted strings; `None` if a quoted string does not end.
fn split_unquoted(text: &str, separator: char) -> Option<Vec<&str>> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if c == separator && !is_quoted => {
                parts.push(text[start..at].trim());
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    (!is_quoted).then_some(parts)
}

/// The text of a token or a quoted string.
fn unquote(value: &str) -> Option<String> {
    let Some(quoted) = value.strip_prefix('"') else {
        let is_token = !value.is_empty() && !value.contains(['"', '\\', ' ']);
        return is_token.then(|| value.to_owned());
    };
    let mut text = String::new();
    let mut letters = quoted.strip_suffix('"')?.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => text.push(letters.next()?),
            '"' => return None,
            letter => text.push(letter),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use axum::http::{HeaderMap, HeaderName, HeaderValue};

    use super::{Client, TrustedProxies};

    /// The client of a request that came through 10.0.0.1; all of 10.0.0.0/8 is trusted.
    fn client(headers: &[(&str, &str)]) -> Client {
        client_from("10.0.0.1", headers)
    }

    fn client_from(peer: &str, headers: &[(&str, &str)]) -> Client {
        let network = "10.0.0.0/8".parse().expect("a network");
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name = HeaderName::try_from(*name).expect("a name");
            map.append(
                name,
                HeaderValue::from_bytes(value.as_bytes()).expect("a value"),
            );
        }
        let peer: IpAddr = peer.parse().expect("an address");
        TrustedProxies::new(vec![network]).client(Some(peer), &map)
    }

    fn address(headers: &[(&str, &str)]) -> String {
        client(headers).address.expect("an address").to_string()
    }

    #[test]
    fn headers_count_only_from_trusted_proxies() {
        let all = [
            ("x-forwarded-for", "192.0.2.1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "agents.example"),
            ("x-forwarded-prefix", "/gw"),
        ];
        let stranger = client_from("203.0.113.9", &all);
        assert_eq!(stranger.address, "203.0.113.9".parse().ok());
        assert!(stranger.scheme.is_none() && stranger.host.is_none() && stranger.prefix.is_none());
        for peer in ["10.0.0.1", "::ffff:10.0.0.1"] {
            let client = client_from(peer, &all);
            assert_eq!(client.address, "192.0.2.1".parse().ok());
            assert_eq!(client.scheme, Some("https"));
            assert_eq!(client.host.expect("a host").as_str(), "agents.example");
            assert_eq!(&*client.prefix.expect("a prefix").0, "/gw");
        }
    }

    #[test]
    fn the_client_is_the_right_most_untrusted_address() {
        for (list, expected) in [
            ("192.0.2.1", "192.0.2.1"),
            ("6.6.6.6, 192.0.2.1", "192.0.2.1"),
            ("6.6.6.6, 192.0.2.1, 10.0.0.3,10.0.0.2", "192.0.2.1"),
            ("10.0.0.4, 10.0.0.3", "10.0.0.4"),
            ("192.0.2.1:4711", "192.0.2.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
        ] {
            assert_eq!(address(&[("x-forwarded-for", list)]), expected, "{list}");
        }
        let two_lines = [
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-for", "192.0.2.1"),
        ];
        assert_eq!(address(&two_lines), "192.0.2.1");
    }

    #[test]
    fn malformed_values_end_the_search() {
        for list in [
            "",
            "unknown",
            "localhost",
            "6.6.6.6, 1.2.3",
            "6.6.6.6,",
            "6.6.6.6, ä",
            "[::1",
        ] {
            assert_eq!(address(&[("x-forwarded-for", list)]), "10.0.0.1", "{list}");
        }
        let behind_two = "6.6.6.6, nonsense, 10.0.0.2";
        assert_eq!(address(&[("x-forwarded-for", behind_two)]), "10.0.0.2");
        let long = "10.0.0.2, ".repeat(5000) + "10.0.0.2";
        assert_eq!(address(&[("x-forwarded-for", &long)]), "10.0.0.2");
        let evil = "/x".repeat(200);
        for (name, value) in [
            ("x-forwarded-proto", "javascript"),
            ("x-forwarded-host", "a/b"),
            ("x-forwarded-host", "a@evil.example"),
            ("x-forwarded-prefix", "//evil.example"),
            ("x-forwarded-prefix", "/a/../b"),
            ("x-forwarded-prefix", "/a b"),
            ("x-forwarded-prefix", "evil"),
            ("x-forwarded-prefix", "/"),
            ("x-forwarded-prefix", &evil),
        ] {
            let client = client(&[(name, value)]);
            let prefix = client.prefix.map(|prefix| prefix.0.to_string());
            assert!(client.scheme.is_none() && client.host.is_none(), "{value}");
            assert!(
                prefix.is_none_or(|prefix| prefix == "/evil.example"),
                "{value}"
            );
        }
    }

    #[test]
    fn scheme_and_host_are_those_that_the_client_used() {
        let client = client(&[
            ("x-forwarded-for", "6.6.6.6, 192.0.2.1, 10.0.0.2"),
            ("x-forwarded-proto", "http, https, http"),
            ("x-forwarded-host", "evil.example, nearest.example"),
        ]);
        assert_eq!(client.scheme, Some("https"));
        assert_eq!(client.host.expect("a host").as_str(), "nearest.example");
    }

    #[test]
    fn forwarded_is_read_as_in_rfc_7239() {
        for (value, expected) in [
            ("for=192.0.2.43", "192.0.2.43"),
            ("For=\"[2001:db8:cafe::17]:4711\"", "2001:db8:cafe::17"),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", "192.0.2.60"),
            ("for=6.6.6.6, for=198.51.100.17", "198.51.100.17"),
            ("for=192.0.2.1, for=\"10.0.0.2:80\"", "192.0.2.1"),
            ("for=unknown", "10.0.0.1"),
            ("for=_hidden, for=10.0.0.2", "10.0.0.2"),
            ("for=\"192.0.2.1", "10.0.0.1"),
            ("for=\"192.0.2.1\"x", "10.0.0.1"),
            ("for=192.0.2.1;for=192.0.2.2", "10.0.0.1"),
            ("192.0.2.1", "10.0.0.1"),
            ("for=6.6.6.6;ext=\"a, for=9.9.9.9\"", "6.6.6.6"),
        ] {
            assert_eq!(address(&[("forwarded", value)]), expected, "{value}");
        }
        let client = client(&[(
            "forwarded",
            "for=192.0.2.1;proto=HTTPS;host=\"agents.example:8443\"",
        )]);
        assert_eq!(client.scheme, Some("https"));
        assert_eq!(client.host.expect("a host").as_str(), "agents.example:8443");
    }

    #[test]
    fn contradicting_headers_are_both_ignored() {
        let x = ("x-forwarded-for", "192.0.2.1");
        assert_eq!(address(&[x, ("forwarded", "for=192.0.2.1")]), "192.0.2.1");
        let both = client(&[x, ("forwarded", "for=6.6.6.6"), ("x-forwarded-host", "a")]);
        assert_eq!(both.address, "10.0.0.1".parse().ok());
        assert!(both.host.is_none());
        let unread = client(&[("forwarded", "for=192.0.2.1"), ("x-forwarded-host", "evil")]);
        assert!(unread.host.is_none());
    }
}
