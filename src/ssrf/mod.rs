//! SSRF guard for URLs chosen by clients or models: only public addresses can be reached, unless the operator allows a
//! host.

use std::collections::BTreeSet;
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use url::{Host, Url};

pub mod ssrf_client;

/// Most characters of a URL.
const MAX_URL: usize = 2048;

/// Why a URL may not be requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SsrfError {
    #[error("{0} must be reached by https, or be listed in {1}")]
    NotHttps(String, &'static str),
    /// The address, or every address of the name, is not public.
    #[error("{host} is at {address}, which is not a public address; {list} can allow the host")]
    NotPublic {
        /// The host as the URL names it.
        host: String,
        /// One of its addresses.
        address: IpAddr,
        /// The configuration key that can allow the host.
        list: &'static str,
    },
    #[error("{0} could not be resolved: {1}")]
    Unresolved(String, String),
}

/// Why a text is not accepted as a URL. The message follows the name of a field, and does not repeat the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("is longer than {max} characters", max = MAX_URL)]
    TooLong,
    #[error("is not a URL ({0})")]
    Invalid(#[from] url::ParseError),
    #[error("must begin with http:// or https://")]
    NotHttp,
    #[error("must not hold a user or password")]
    HasCredentials,
}

/// A text that is not accepted as a host pattern. The message follows the name of a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "has {0:?}, which is no host; write names such as example.com or *.example.com, or addresses, without scheme, port \
     and path"
)]
pub struct InvalidHostPattern(String);

/// Parses `http(s)://host[:port]/…`. A user or password is rejected, because records and responses contain the URL.
pub fn parse_url(text: &str) -> Result<Url, UrlError> {
    if text.len() > MAX_URL {
        return Err(UrlError::TooLong);
    }
    let mut url = Url::parse(text)?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(UrlError::NotHttp);
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(UrlError::HasCredentials);
    }
    url.set_fragment(None);
    Ok(url)
}

/// The URL without its query, which may hold a secret.
pub fn redact_query(url: &str) -> String {
    match Url::parse(url) {
        Ok(mut url) => {
            url.set_query(None);
            url.into()
        }
        Err(_) => String::new(),
    }
}

/// Whether a URL's host is this machine, by name or by address.
pub fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// The innermost cause of a failed request, if there is one. The outer errors only say that it failed, and contain the
/// URL, whose query may hold a secret.
pub fn root_cause(error: &dyn Error) -> Option<String> {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.last().map(ToString::to_string)
}

/// Parses a host that an agent allows: a name, an address, or `*.` and a name for all hosts below that name.
pub fn parse_host_pattern(text: &str) -> Result<String, InvalidHostPattern> {
    let invalid = || InvalidHostPattern(text.to_owned());
    let (wildcard, name) = match text.strip_prefix("*.") {
        Some(name) => ("*.", name),
        None => ("", text),
    };
    if name.parse::<Ipv6Addr>().is_ok() {
        return match wildcard {
            "" => Ok(normalize_host(name)),
            _ => Err(invalid()),
        };
    }
    // As in URLs: names in other scripts become ASCII, addresses get their usual spelling.
    let host = Host::parse(name).map_err(|_| invalid())?;
    let is_name = matches!(host, Host::Domain(_));
    let host = normalize_host(&host.to_string());
    match host.is_empty() || host.contains('*') || (!is_name && !wildcard.is_empty()) {
        true => Err(invalid()),
        false => Ok(format!("{wildcard}{host}")),
    }
}

/// Whether the pattern matches this host.
pub fn matches_pattern(pattern: &str, host: &str) -> bool {
    let host = normalize_host(host);
    match pattern.strip_prefix('*') {
        // The suffix includes its dot: evil-example.com is not below example.com.
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => host == pattern,
    }
}

/// Allows requests to public addresses by HTTPS, and any requests to hosts that the operator has named.
#[derive(Clone, Debug)]
pub struct SsrfGuard {
    allowed_hosts: BTreeSet<String>,
    list: &'static str,
    allows_http: bool,
}

impl SsrfGuard {
    /// Exempts these hosts. `list` is the configuration key that names them.
    pub fn new(allowed_hosts: impl IntoIterator<Item = String>, list: &'static str) -> Self {
        Self {
            allowed_hosts: allowed_hosts.into_iter().collect(),
            list,
            allows_http: false,
        }
    }

    /// Allows plain HTTP as well, for requests that hold no secret.
    pub fn allow_http(mut self) -> Self {
        self.allows_http = true;
        self
    }

    /// Checks everything that needs no name resolution.
    pub fn check(&self, url: &Url) -> Result<(), SsrfError> {
        let Some(host) = url.host() else {
            return Err(SsrfError::Unresolved(String::new(), "no host".to_owned()));
        };
        let name = normalize_host(&host.to_string());
        if self.is_allowed(&name) {
            return Ok(());
        }
        if url.scheme() != "https" && !self.allows_http {
            return Err(SsrfError::NotHttps(name, self.list));
        }
        let address = match host {
            Host::Ipv4(address) => IpAddr::V4(address),
            Host::Ipv6(address) => IpAddr::V6(address),
            Host::Domain(_) => return Ok(()),
        };
        match is_public(address) {
            true => Ok(()),
            false => Err(self.not_public_error(name, address)),
        }
    }

    /// The addresses of a name that may be connected to, with port 0. Connect to one of these: resolving the name again
    /// may return another one.
    pub async fn resolve(&self, host: &str) -> Result<Vec<SocketAddr>, SsrfError> {
        let unresolved = |reason: String| SsrfError::Unresolved(host.to_owned(), reason);
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, 0))
            .await
            .map_err(|error| unresolved(error.to_string()))?
            .collect();
        self.filter_public(host, addresses)
    }

    fn filter_public(
        &self,
        host: &str,
        addresses: Vec<SocketAddr>,
    ) -> Result<Vec<SocketAddr>, SsrfError> {
        let Some(first) = addresses.first().map(SocketAddr::ip) else {
            let reason = "the name has no address".to_owned();
            return Err(SsrfError::Unresolved(host.to_owned(), reason));
        };
        if self.is_allowed(host) {
            return Ok(addresses);
        }
        let public: Vec<SocketAddr> = addresses
            .into_iter()
            .filter(|it| is_public(it.ip()))
            .collect();
        match public.is_empty() {
            true => Err(self.not_public_error(host.to_owned(), first)),
            false => Ok(public),
        }
    }

    /// Whether the operator has named this host.
    pub fn is_allowed(&self, host: &str) -> bool {
        self.allowed_hosts.contains(&normalize_host(host))
    }

    fn not_public_error(&self, host: String, address: IpAddr) -> SsrfError {
        SsrfError::NotPublic {
            host,
            address,
            list: self.list,
        }
    }
}

/// The spelling of hosts in lists: names in lower case without a trailing dot, addresses in their usual spelling
/// without brackets.
pub fn normalize_host(host: &str) -> String {
    let host = host.trim_matches(['[', ']']);
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_string(),
        Err(_) => host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase(),
    }
}

/// The host of a URL as [`normalize_host`] spells it; empty if it has none.
pub fn host_of(url: &str) -> String {
    let url = parse_url(url).ok();
    normalize_host(url.as_ref().and_then(Url::host_str).unwrap_or_default())
}

/// Whether an address belongs to the public internet. False for everything in IANA's special-purpose registries
/// (iana.org/assignments/iana-ipv4-special-registry, and -ipv6-).
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = match a {
        // This network, private, loopback.
        0 | 10 | 127 => true,
        // Carrier-grade NAT, 100.64.0.0/10.
        100 => b & 0xc0 == 64,
        // Link-local, including the metadata services of clouds.
        169 => b == 254,
        172 => b & 0xf0 == 16,
        // Protocol assignments, documentation, AS112, 6to4 relays, AMT, private, AS112.
        192 => matches!(
            (b, c),
            (0, 0 | 2) | (31, 196) | (52, 193) | (88, 99) | (168, _) | (175, 48)
        ),
        // Benchmarks, documentation.
        198 => b & 0xfe == 18 || (b, c) == (51, 100),
        203 => (b, c) == (0, 113),
        // Multicast, reserved, broadcast.
        224.. => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let embedded_v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        Ipv4Addr::new(a, b, c, d)
    };
    match (a, b) {
        // Addresses that embed an IPv4 address are judged by it: mapped ones, and NAT64's well-known prefix (RFC 6052).
        (0, 0) if (c, d, e, f) == (0, 0, 0, 0xffff) => is_public_v4(embedded_v4(g, h)),
        (0x64, 0xff9b) if (c, d, e, f) == (0, 0, 0, 0) => is_public_v4(embedded_v4(g, h)),
        // 6to4 (RFC 3056) has the IPv4 address after its prefix.
        (0x2002, _) => is_public_v4(embedded_v4(b, c)),
        // Teredo, benchmarks, ORCHID and others of 2001::/23; documentation.
        (0x2001, 0..=0x1ff | 0xdb8) => false,
        (0x3fff, 0..=0xfff) => false,
        // Global unicast is 2000::/3. Loopback, unspecified, unique local, link-local and multicast are outside of it.
        (0x2000..=0x3fff, _) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use super::{
        SsrfGuard, is_public, matches_pattern, normalize_host, parse_host_pattern, parse_url,
        redact_query,
    };

    const LIST: &str = "[webhooks] allow_hosts";

    #[test]
    fn only_the_public_internet_is_public() {
        let public = |text: &str| is_public(text.parse().expect("an address"));
        for private in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd12:3456::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!public(private), "{private}");
        }
        for open in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.1",
            "100.63.255.255",
            "100.128.0.1",
            "126.0.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "192.169.0.1",
            "198.17.0.1",
            "198.20.0.1",
            "223.255.255.255",
            "::ffff:1.1.1.1",
            "64:ff9b::101:101",
            "2002:101:101::1",
            "2606:4700::1111",
            "2a00:1450::1",
        ] {
            assert!(public(open), "{open}");
        }
    }

    #[test]
    fn a_url_uses_https_and_has_no_password() {
        for bad in [
            "",
            "example.com",
            "ftp://example.com",
            "https://",
            "https://me:hush@example.com",
            "https://me@example.com",
            "file:///etc/passwd",
        ] {
            let message = parse_url(bad).expect_err(bad).to_string();
            assert!(!message.contains("hush"), "{message}");
        }
        assert!(parse_url(&format!("https://a/{}", "x".repeat(2048))).is_err());
        assert_eq!(
            redact_query("https://a.b:8443/c?token=hush"),
            "https://a.b:8443/c"
        );
    }

    #[test]
    fn ip_literals_are_checked_in_every_spelling() {
        let guard = SsrfGuard::new(["internal".to_owned(), "::1".to_owned()], LIST);
        let check = |text: &str| guard.check(&parse_url(text).expect("a URL"));
        for bad in [
            "http://example.com/",
            "https://127.0.0.1/",
            "https://2130706433/",
            "https://0x7f.1/",
            "https://0177.0.0.1/",
            "https://[::ffff:127.0.0.1]/",
            "https://169.254.169.254/latest/",
        ] {
            let error = check(bad).expect_err(bad).to_string();
            assert!(error.contains(LIST), "{error}");
        }
        for good in [
            "https://example.com/",
            "https://1.1.1.1/",
            "http://internal:8080/",
            "http://INTERNAL./",
            "http://[::1]:9/",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        assert_eq!(normalize_host("[FE80:0:0::1]"), "fe80::1");
    }

    #[test]
    fn private_addresses_of_a_name_are_dropped() {
        let guard = SsrfGuard::new(["ours".to_owned()], LIST);
        let found = |texts: &[&str]| -> Vec<SocketAddr> {
            let address = |text: &&str| text.parse::<IpAddr>().expect("an address");
            texts.iter().map(address).map(|it| (it, 0).into()).collect()
        };
        let both = found(&["10.0.0.1", "1.1.1.1"]);
        assert_eq!(
            guard.filter_public("a", both.clone()),
            Ok(found(&["1.1.1.1"]))
        );
        assert_eq!(guard.filter_public("ours", both.clone()), Ok(both));
        let error = guard
            .filter_public("a", found(&["10.0.0.1"]))
            .expect_err("private");
        assert!(error.to_string().contains("10.0.0.1"), "{error}");
        assert!(guard.filter_public("a", Vec::new()).is_err());
    }

    #[test]
    fn a_pattern_matches_a_host_or_all_below_a_name() {
        let matches = |pattern: &str, host: &str| {
            let pattern = parse_host_pattern(pattern).expect(pattern);
            matches_pattern(&pattern, host)
        };
        for (pattern, host) in [
            ("example.com", "EXAMPLE.com."),
            ("*.Example.com", "a.b.example.com"),
            ("bücher.example", "xn--bcher-kva.example"),
            ("0x7f.1", "127.0.0.1"),
            ("::1", "[0:0::1]"),
        ] {
            assert!(matches(pattern, host), "{pattern} {host}");
        }
        for (pattern, host) in [
            ("example.com", "a.example.com"),
            ("*.example.com", "example.com"),
            ("*.example.com", "evil-example.com"),
            ("*.example.com", ".example.com"),
            ("example.com", "example.com.evil.org"),
        ] {
            assert!(!matches(pattern, host), "{pattern} {host}");
        }
        for bad in [
            "",
            "*",
            "*.",
            "*.*.a",
            "a*b",
            "https://a",
            "a:80",
            "a/b",
            "*.1.2.3.4",
            "a b",
        ] {
            assert!(parse_host_pattern(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn plain_http_passes_if_allowed() {
        let guard = SsrfGuard::new([], LIST).allow_http();
        let check = |text: &str| guard.check(&parse_url(text).expect("a URL"));
        assert_eq!(check("http://example.com/"), Ok(()));
        assert!(check("http://10.1/").is_err());
    }

    #[tokio::test]
    async fn this_machine_is_not_public() {
        let open = SsrfGuard::new(["localhost".to_owned()], LIST);
        assert!(!open.resolve("localhost").await.expect("allowed").is_empty());
        let shut = SsrfGuard::new([], LIST);
        assert!(shut.resolve("localhost").await.is_err());
    }
}
