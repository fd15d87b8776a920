//! The host that a request names (RFC 9112, 3.2; RFC 9113, 8.3.1). There has to be exactly one valid host: the origin guard
//! decides by it, so a request without one is refused before anything else.

use std::net::Ipv6Addr;

use axum::extract::Request;
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Version};

use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;

/// Paths for probes and scrapers. An HTTP/1.0 client, which need not send `Host`, may request them without it.
const HOST_OPTIONAL_PATHS: [&str; 3] = ["/livez", "/readyz", "/metrics"];

/// The host that the request names; `None` if the path does not need one. `path_prefix` is the prefix of every route.
pub fn requested_host(request: &Request, path_prefix: &str) -> Result<Option<Authority>, Problem> {
    let headers = request.headers();
    let mut hosts = headers.get_all(HOST).iter();
    let header = match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err(invalid("it has more than one Host header")),
        (Some(host), None) => Some(parse(host)?),
        (None, None) => None,
    };
    // An absolute target and HTTP/2's `:authority` win over the header, but an invalid header is refused too.
    let target = request.uri().authority().map(check_authority).transpose()?;
    let version = request.version();
    let is_http1 = version <= Version::HTTP_11;
    match (target, header) {
        (Some(target), Some(header)) if !is_http1 && !is_same_authority(&target, &header) => {
            Err(invalid("its Host header differs from its :authority"))
        }
        (None, None) if version <= Version::HTTP_10 && may_omit_host(request, path_prefix) => {
            Ok(None)
        }
        (_, None) if version == Version::HTTP_11 => Err(invalid("it has no Host header")),
        (None, None) => Err(invalid("it names no host")),
        (target, header) => Ok(target.or(header)),
    }
}

fn may_omit_host(request: &Request, path_prefix: &str) -> bool {
    let path = request.uri().path();
    let path = path.strip_prefix(path_prefix).unwrap_or(path);
    HOST_OPTIONAL_PATHS.contains(&path)
}

fn is_same_authority(one: &Authority, other: &Authority) -> bool {
    one.as_str().eq_ignore_ascii_case(other.as_str())
}

/// A host with an optional port.
pub fn parse_authority(bytes: &[u8]) -> Option<Authority> {
    Authority::try_from(bytes).ok().filter(is_valid)
}

fn parse(value: &HeaderValue) -> Result<Authority, Problem> {
    parse_authority(value.as_bytes()).ok_or_else(|| {
        let text = String::from_utf8_lossy(value.as_bytes());
        invalid(&format!(
            "its Host header, {}, is no host with an optional port",
            quote(&text)
        ))
    })
}

fn check_authority(authority: &Authority) -> Result<Authority, Problem> {
    match is_valid(authority) {
        true => Ok(authority.clone()),
        false => Err(invalid(&format!(
            "{} is no host with an optional port",
            quote(authority.as_str())
        ))),
    }
}

/// Whether it is an address, or a name of letters, digits, dots, dashes and underscores, with an optional port.
fn is_valid(authority: &Authority) -> bool {
    let host = authority.host();
    let is_host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            host.contains(|c: char| c.is_ascii_alphanumeric()) && host.chars().all(is_plain)
        }
    };
    // Anything else behind the host is refused: user information, or an invalid port.
    let port = authority.as_str().strip_prefix(host);
    let is_port = port.is_some_and(|port| match port.strip_prefix(':') {
        Some(port) => {
            port.bytes().all(|b| b.is_ascii_digit())
                && (port.is_empty() || authority.port_u16().is_some())
        }
        None => port.is_empty(),
    });
    is_host && is_port
}

fn invalid(why: &str) -> Problem {
    let detail = format!(
        "the request does not say which host it is for: {why}; send one Host header, such as localhost:8080"
    );
    Problem::new(ProblemCode::InvalidHost, detail)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use axum::http::Version;

    use super::requested_host;

    fn host(version: Version, uri: &str, hosts: &[&str]) -> Result<Option<String>, &'static str> {
        let mut request = Request::builder().version(version).uri(uri);
        for host in hosts {
            request = request.header("host", *host);
        }
        let request = request.body(Body::empty()).expect("a request");
        requested_host(&request, "/axed")
            .map(|host| host.map(|host| host.to_string()))
            .map_err(|problem| problem.code())
    }

    const INVALID: Result<Option<String>, &str> = Err("invalid_host");

    #[test]
    fn a_request_names_exactly_one_host() {
        let http1 = |hosts: &[&str]| host(Version::HTTP_11, "/runs", hosts);
        for fine in [
            "localhost:8080",
            "127.0.0.1",
            "[::1]:8080",
            "axed_1.local.:1",
            "a:",
        ] {
            assert_eq!(http1(&[fine]), Ok(Some(fine.to_owned())), "{fine}");
        }
        for bad in [
            "",
            "???",
            "a b",
            "a/b",
            "a@evil.example:8080",
            "evil.example:99999",
            "evil.example:8080:8080",
            "a:+1",
            "evil.example,localhost",
            "http://localhost",
            "evil%2eexample:8080",
            "[::1",
            "[zz]",
            "[::1%25eth0]",
            "[::1]x",
            ":8080",
            ".",
        ] {
            assert_eq!(http1(&[bad]), INVALID, "{bad:?}");
        }
        for hosts in [&[][..], &["a", "a"], &["a", "b"]] {
            assert_eq!(http1(hosts), INVALID, "{hosts:?}");
        }
    }

    #[test]
    fn the_target_wins_but_the_header_is_checked_too() {
        let target = "http://evil.example:8080/runs";
        let expected = Ok(Some("evil.example:8080".to_owned()));
        assert_eq!(host(Version::HTTP_11, target, &["localhost"]), expected);
        assert_eq!(host(Version::HTTP_11, target, &[]), INVALID);
        assert_eq!(host(Version::HTTP_11, target, &["???"]), INVALID);
        assert_eq!(host(Version::HTTP_2, target, &[]), expected);
        assert_eq!(
            host(Version::HTTP_2, target, &["Evil.example:8080"]),
            expected
        );
        assert_eq!(host(Version::HTTP_2, target, &["localhost"]), INVALID);
        assert_eq!(host(Version::HTTP_2, "/runs", &[]), INVALID);
        assert_eq!(host(Version::HTTP_2, "http://a@b:8080/runs", &[]), INVALID);
    }

    #[test]
    fn http_1_0_probes_may_omit_the_host() {
        for path in ["/livez", "/readyz?x=1", "/metrics", "/axed/livez"] {
            assert_eq!(host(Version::HTTP_10, path, &[]), Ok(None), "{path}");
            assert_eq!(host(Version::HTTP_11, path, &[]), INVALID, "{path}");
        }
        for path in ["/runs", "/axed/runs", "/version", "/axed/livez/x"] {
            assert_eq!(host(Version::HTTP_10, path, &[]), INVALID, "{path}");
        }
        let twice = host(Version::HTTP_10, "/livez", &["a", "a"]);
        assert_eq!(twice, INVALID);
    }
}
