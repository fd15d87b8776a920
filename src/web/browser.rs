//! Keeps web pages out: a browser sends what any page asks it to, also to daemons on its own machine, and this one may
//! ask for no key. Programs that are no browsers send none of the headers that are looked at here.

use std::net::Ipv4Addr;

use axum::http::header::{HOST, HeaderName, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, Uri};

use crate::web::error::{Problem, word};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Endings of names that nobody can register, so that no stranger decides where they lead.
const LOCAL_NAMES: [&str; 6] = [
    ".localhost",
    ".local",
    ".internal",
    ".lan",
    ".home.arpa",
    ".test",
];

/// Why this request is refused, if it is: a page of another site wants to change something, or a page that pointed its
/// own name at this machine asks at all. `loopback_port` is the daemon's port where it listens on loopback.
pub fn refusal(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    loopback_port: Option<u16>,
) -> Option<Problem> {
    let host = uri.authority().map(Authority::as_str).or_else(|| {
        let host = headers.get(HOST)?;
        host.to_str().ok()
    });
    if loopback_port.is_some_and(|port| host.is_some_and(|host| is_foreign(host, port))) {
        let why = format!(
            "{} is not a name of this machine, where alone the daemon listens; ask for 127.0.0.1 or localhost",
            word(host.unwrap_or_default())
        );
        return Some(Problem::new(StatusCode::FORBIDDEN, "foreign_host", why));
    }
    if method.is_safe() || !is_cross_site(headers, host) {
        return None;
    }
    let why = "a web page of another origin may not do this; send it from a program, or from a page that the same \
               host serves";
    Some(Problem::new(StatusCode::FORBIDDEN, "cross_site", why))
}

/// Whether a page of another origin made the browser send this. Browsers set both headers themselves, and the first
/// only towards addresses that they trust.
fn is_cross_site(headers: &HeaderMap, host: Option<&str>) -> bool {
    if let Some(site) = headers.get(SEC_FETCH_SITE) {
        return site != "same-origin" && site != "none";
    }
    let Some(origin) = headers.get(ORIGIN) else {
        return false;
    };
    let origin = origin.to_str().ok().and_then(|o| o.split_once("://"));
    match (origin, host) {
        (Some((_, origin)), Some(host)) => !origin.eq_ignore_ascii_case(host),
        _ => true,
    }
}

/// Whether somebody has to have pointed this name at the daemon: a public name with the daemon's own port. A proxy on
/// this machine that passes its own name on has a port of its own.
fn is_foreign(host: &str, port: u16) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    if authority.port_u16().unwrap_or(80) != port {
        return false;
    }
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let is_address = name.starts_with('[') || name.parse::<Ipv4Addr>().is_ok();
    name.contains('.') && !is_address && !LOCAL_NAMES.iter().any(|local| name.ends_with(local))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

    use super::{is_foreign, refusal};

    fn refused(method: Method, sent: &[(&'static str, &'static str)]) -> Option<&'static str> {
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        refusal(&method, &Uri::from_static("/runs"), &headers, Some(8080))
            .map(|problem| problem.code())
    }

    #[test]
    fn pages_of_other_origins_change_nothing() {
        let host = ("host", "127.0.0.1:8080");
        let evil = ("origin", "https://evil.example");
        for sent in [
            &[host, evil][..],
            &[host, ("origin", "null")],
            &[host, ("origin", "http://127.0.0.1:3000")],
            &[host, ("sec-fetch-site", "cross-site")],
            &[host, ("sec-fetch-site", "same-site")],
            &[evil],
        ] {
            assert_eq!(refused(Method::POST, sent), Some("cross_site"), "{sent:?}");
            assert_eq!(refused(Method::GET, sent), None, "{sent:?}");
        }
        for sent in [
            &[host][..],
            &[],
            &[host, ("origin", "http://127.0.0.1:8080")],
            &[host, evil, ("sec-fetch-site", "same-origin")],
            &[host, ("sec-fetch-site", "none")],
        ] {
            assert_eq!(refused(Method::DELETE, sent), None, "{sent:?}");
        }
    }

    #[test]
    fn a_strangers_name_for_this_machine_is_refused() {
        for foreign in ["evil.example:8080", "EVIL.example.:8080", "a.b.c.d:8080"] {
            assert!(is_foreign(foreign, 8080), "{foreign}");
        }
        assert!(is_foreign("evil.example", 80));
        for fine in [
            "localhost:8080",
            "127.0.0.1:8080",
            "[::1]:8080",
            "axed:8080",
            "host.docker.internal:8080",
            "axed.localhost.:8080",
            "agents.example",
            "agents.example:443",
            "",
            "???",
        ] {
            assert!(!is_foreign(fine, 8080), "{fine}");
        }
        let rebound = [
            ("host", "evil.example:8080"),
            ("origin", "http://evil.example:8080"),
        ];
        assert_eq!(refused(Method::GET, &rebound), Some("foreign_host"));
    }
}
