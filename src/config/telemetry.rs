//! The `[telemetry]` section, with what the environment's `OTEL_…` variables say of traces.

use std::collections::BTreeMap;

use secrecy::SecretString;

use crate::config::document::Origin;
use crate::config::load::{Environment, Place, set};
use crate::config::section::Section;
use crate::config::{LogFormat, Otlp, Telemetry};

/// Where OTLP over HTTP takes traces, below a collector's address.
const PATH: &str = "/v1/traces";

/// Reads `[telemetry]`.
pub(in crate::config) fn read(s: &mut Section<'_>, place: &Place<'_>) -> Telemetry {
    let formats = [("human", LogFormat::Human), ("json", LogFormat::Json)];
    Telemetry {
        log: s.text("log").filter(|log| !log.trim().is_empty()),
        log_format: s.one_of("log_format", &formats),
        otlp: match cfg!(feature = "otel") {
            true => otlp(s, place.environment),
            false => without(s),
        },
    }
}

/// This binary cannot send traces: keys that ask for it are refused.
fn without(s: &mut Section<'_>) -> Option<Otlp> {
    for key in [
        "otlp_endpoint",
        "otlp_headers",
        "trace_content",
        "trace_sampling",
    ] {
        s.unsupported(key);
    }
    None
}

fn otlp(s: &mut Section<'_>, environment: &Environment) -> Option<Otlp> {
    let is_from_outside = s.is_from_outside("otlp_endpoint");
    let own = s.checked("otlp_endpoint", |text| endpoint(text).map(at_its_path));
    let standard = standard(s, environment);
    let mut headers = s.texts_by_name("otlp_headers", |_, text| {
        Ok::<_, String>(SecretString::from(text.to_owned()))
    });
    for name in [
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ] {
        headers.extend(set(environment, name).map(pairs).unwrap_or_default());
    }
    let sampling = s.number("trace_sampling", 0.0..=1.0).unwrap_or(1.0);
    let content = s.flag("trace_content").unwrap_or(false);
    let off = set(environment, "OTEL_SDK_DISABLED").is_some_and(|text| text.trim() == "true");
    // As everywhere: the environment over the file, and our own variable over the common one.
    let endpoint = match is_from_outside {
        true => own.or(standard),
        false => standard.or(own),
    };
    Some(Otlp {
        endpoint: endpoint.filter(|_| !off)?,
        headers,
        service: set(environment, "OTEL_SERVICE_NAME")
            .unwrap_or("axed")
            .to_owned(),
        sampling,
        content,
    })
}

/// What OpenTelemetry's own variables say; the one for traces names the whole URL
/// (<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>).
fn standard(s: &mut Section<'_>, environment: &Environment) -> Option<String> {
    let own = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    let common = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let (name, text) = [own, common]
        .into_iter()
        .find_map(|name| Some((name, set(environment, name)?)))?;
    match endpoint(text) {
        Ok(url) if name == own => Some(url),
        Ok(url) => Some(at_its_path(url)),
        Err(why) => {
            s.fault(Origin::Outside(name.to_owned()), format!("it {why}"));
            None
        }
    }
}

/// A collector's address. The text is not repeated in errors: it may hold a key.
fn endpoint(text: &str) -> Result<String, String> {
    let text = text.trim();
    let rest = text
        .strip_prefix("http://")
        .or(text.strip_prefix("https://"));
    let authority = rest.and_then(|rest| rest.split(['/', '?', '#']).next());
    match authority {
        None | Some("") => Err("must be a URL such as http://localhost:4318".to_owned()),
        Some(authority) if authority.contains('@') => {
            Err("must not hold a user or password (use otlp_headers)".to_owned())
        }
        Some(_) => Ok(text.to_owned()),
    }
}

fn at_its_path(url: String) -> String {
    let base = url.trim_end_matches('/');
    match base.ends_with(PATH) || base.contains(['?', '#']) {
        true => base.to_owned(),
        false => format!("{base}{PATH}"),
    }
}

/// `name=value` parted by commas, the values percent-encoded.
fn pairs(text: &str) -> BTreeMap<String, SecretString> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((
            name.trim().to_owned(),
            SecretString::from(decoded(value.trim())),
        ))
    };
    text.split(',').filter_map(pair).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        let code = more.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = code.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let (byte, after) = match (first, code) {
            (b'%', Some(code)) => (code, &more[2..]),
            _ => (*first, more),
        };
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::{at_its_path, decoded, endpoint, pairs};

    #[test]
    fn an_address_gets_its_path() {
        let shown = |text: &str| at_its_path(endpoint(text).expect("an address"));
        assert_eq!(shown("http://a:4318"), "http://a:4318/v1/traces");
        assert_eq!(shown("https://a/otlp/"), "https://a/otlp/v1/traces");
        assert_eq!(shown("http://a/v1/traces"), "http://a/v1/traces");
        for bad in ["", "a:4317", "grpc://a", "http://", "http://me:secret@a"] {
            let why = endpoint(bad).expect_err("no address");
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn headers_of_the_environment_are_read() {
        let read = pairs("authorization=Basic%20abc=, x-team = a ,junk");
        let shown: Vec<_> = read
            .iter()
            .map(|(name, value)| (name.as_str(), value.expose_secret()))
            .collect();
        assert_eq!(shown, [("authorization", "Basic abc="), ("x-team", "a")]);
        assert_eq!(decoded("100%"), "100%");
        assert_eq!(decoded("%zz%41"), "%zzA");
    }
}
