//! Protects the daemon from web pages (CSRF and DNS rebinding). A browser sends the requests of any page, also to a daemon on
//! its own machine, and the daemon may run without keys. Only browsers send the headers that are checked here.

use std::net::Ipv4Addr;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::{HeaderName, ORIGIN};
use axum::http::uri::Authority;

use crate::config::AllowedOrigins;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::server::host;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Suffixes that nobody can register, so that no stranger controls where such a name resolves to.
const LOCAL_SUFFIXES: [&str; 6] = [
    ".localhost",
    ".local",
    ".internal",
    ".lan",
    ".home.arpa",
    ".test",
];

/// The checks of one listener.
#[derive(Clone, Debug, Default)]
pub struct OriginGuard {
    /// The listener's port, if it listens on a loopback address.
    pub loopback_port: Option<u16>,
    /// The prefix of every route: empty, or `/something`.
    pub path_prefix: String,
    /// The origins whose pages may use unsafe methods, besides the request's own host.
    pub allowed_origins: Option<AllowedOrigins>,
}

impl OriginGuard {
    /// Refuses a request without a valid host, a request by DNS rebinding, and an unsafe method from a page of another
    /// origin. `forwarded_host` is the host that a trusted proxy reports; DNS rebinding is checked without it, because a
    /// page that was rebound can send any header but `Host`.
    pub fn check(
        &self,
        request: &Request,
        forwarded_host: Option<&Authority>,
    ) -> Result<(), Problem> {
        let host = host::requested_host(request, &self.path_prefix)?;
        if let (Some(port), Some(host)) = (self.loopback_port, &host)
            && is_dns_rebinding(host, port)
        {
            let why = format!(
                "{} is not a name of this machine, where alone the daemon listens; ask for 127.0.0.1 or localhost",
                quote(host.as_str())
            );
            return Err(Problem::new(ProblemCode::ForeignHost, why));
        }
        if request.method().is_safe()
            || self.is_allowed_origin(request.headers())
            || !is_cross_site(request.headers(), forwarded_host.or(host.as_ref()))
        {
            return Ok(());
        }
        let why = "a web page of another origin may not do this; send it from a program, or from a page that the same \
                   host serves, or name its origin in server.cors.origins";
        Err(Problem::new(ProblemCode::CrossSite, why))
    }
}

impl OriginGuard {
    fn is_allowed_origin(&self, headers: &HeaderMap) -> bool {
        let origin = headers.get(ORIGIN);
        let allowed = self.allowed_origins.as_ref();
        origin.is_some_and(|origin| allowed.is_some_and(|all| all.contains(origin.as_bytes())))
    }
}

/// Whether a page of another origin sent this. Browsers set both headers themselves; they send `Sec-Fetch-Site` only to
/// trustworthy origins.
fn is_cross_site(headers: &HeaderMap, host: Option<&Authority>) -> bool {
    if let Some(site) = headers.get(SEC_FETCH_SITE) {
        return site != "same-origin" && site != "none";
    }
    let Some(origin) = headers.get(ORIGIN) else {
        return false;
    };
    let origin = origin.to_str().ok().and_then(|o| o.split_once("://"));
    match (origin, host) {
        (Some((_, origin)), Some(host)) => !origin.eq_ignore_ascii_case(host.as_str()),
        _ => true,
    }
}

/// Whether this is a public name with the daemon's port, which then must resolve to this machine. A proxy on this machine
/// that forwards its own name listens on another port.
fn is_dns_rebinding(authority: &Authority, port: u16) -> bool {
    if authority.port_u16().unwrap_or(80) != port {
        return false;
    }
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let is_address = name.starts_with('[') || name.parse::<Ipv4Addr>().is_ok();
    name.contains('.') && !is_address && !LOCAL_SUFFIXES.iter().any(|local| name.ends_with(local))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use axum::http::Method;
    use axum::http::uri::Authority;

    use super::{OriginGuard, is_dns_rebinding};

    fn refusal_code(method: Method, headers: &[(&str, &str)]) -> Option<&'static str> {
        let guard = OriginGuard {
            loopback_port: Some(8080),
            path_prefix: String::new(),
            allowed_origins: None,
        };
        let mut request = Request::builder().method(method).uri("/runs");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).expect("a request");
        guard
            .check(&request, None)
            .err()
            .map(|problem| problem.code())
    }

    #[test]
    fn unsafe_methods_from_other_origins_are_refused() {
        let host = ("host", "127.0.0.1:8080");
        let evil = ("origin", "https://evil.example");
        for headers in [
            &[host, evil][..],
            &[host, ("origin", "null")],
            &[host, ("origin", "http://127.0.0.1:3000")],
            &[host, ("sec-fetch-site", "cross-site")],
            &[host, ("sec-fetch-site", "same-site")],
        ] {
            assert_eq!(
                refusal_code(Method::POST, headers),
                Some("cross_site"),
                "{headers:?}"
            );
            assert_eq!(refusal_code(Method::GET, headers), None, "{headers:?}");
        }
        for headers in [
            &[host][..],
            &[host, ("origin", "http://127.0.0.1:8080")],
            &[host, evil, ("sec-fetch-site", "same-origin")],
            &[host, ("sec-fetch-site", "none")],
        ] {
            assert_eq!(refusal_code(Method::DELETE, headers), None, "{headers:?}");
        }
    }

    #[test]
    fn dns_rebinding_is_refused() {
        let authority = |text: &str| text.parse::<Authority>().expect("an authority");
        for foreign in ["evil.example:8080", "EVIL.example.:8080", "a.b.c.d:8080"] {
            assert!(is_dns_rebinding(&authority(foreign), 8080), "{foreign}");
        }
        assert!(is_dns_rebinding(&authority("evil.example"), 80));
        for fine in [
            "localhost:8080",
            "127.0.0.1:8080",
            "[::1]:8080",
            "axed:8080",
            "host.docker.internal:8080",
            "axed.localhost.:8080",
            "agents.example",
            "agents.example:443",
        ] {
            assert!(!is_dns_rebinding(&authority(fine), 8080), "{fine}");
        }
        let rebound = [
            ("host", "evil.example:8080"),
            ("origin", "http://evil.example:8080"),
        ];
        assert_eq!(refusal_code(Method::GET, &rebound), Some("foreign_host"));
        for unclear in [&[][..], &[("host", "???")], &[rebound[0], ("host", "a")]] {
            assert_eq!(refusal_code(Method::GET, unclear), Some("invalid_host"));
        }
    }
}
