//! The `[telemetry]` section and the `OTEL_…` variables of the environment.

use std::collections::BTreeMap;

use secrecy::{ExposeSecret, SecretString};

use crate::config::environment::{Environment, env_value};
use crate::config::load_context::LoadContext;
use crate::config::secrets::read_secret;
use crate::config::{Otlp, Telemetry};
use crate::settings::document::Origin;
use crate::settings::section::read_section;
use crate::settings::table_reader::TableReader;

/// Path for traces of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";
/// OpenTelemetry's variables with headers, which may hold secrets.
pub(in crate::config) const HEADER_VARIABLES: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
];

pub(in crate::config) fn read(s: &mut TableReader<'_>, context: &LoadContext<'_>) -> Telemetry {
    Telemetry {
        otlp: match cfg!(feature = "otel") {
            true => read_otlp(s, context.environment),
            false => reject_otlp_keys(s),
        },
        ..read_section(s)
    }
}

/// Rejects the keys for traces: this binary is built without the feature `otel`.
fn reject_otlp_keys(s: &mut TableReader<'_>) -> Option<Otlp> {
    for key in [
        "otlp_endpoint",
        "otlp_headers",
        "trace_content",
        "trace_sampling",
    ] {
        s.reject_if_set(key);
    }
    None
}

fn read_otlp(s: &mut TableReader<'_>, environment: &Environment) -> Option<Otlp> {
    let is_overridden = s.is_from_env_or_flag("otlp_endpoint");
    let configured = s.parsed_text("otlp_endpoint", |text| {
        parse_endpoint(text).map(with_traces_path)
    });
    let from_otel = otel_endpoint(s, environment);
    let mut headers = s.texts_by_name("otlp_headers", |_, text| {
        Ok::<_, String>(SecretString::from(text.to_owned()))
    });
    for name in HEADER_VARIABLES {
        match read_secret(environment, name) {
            Ok(Some(text)) => headers.extend(parse_headers(text.expose_secret())),
            Ok(None) => {}
            Err(error) => s.push_error(Origin::External(error.variable), error.reason),
        }
    }
    let sampling = s.number("trace_sampling", 0.0..=1.0).unwrap_or(1.0);
    let content = s.flag("trace_content").unwrap_or(false);
    let is_disabled =
        env_value(environment, "OTEL_SDK_DISABLED").is_some_and(|text| text.trim() == "true");
    // As for all keys: the environment beats the file, and an axed variable beats the common one.
    let endpoint = match is_overridden {
        true => configured.or(from_otel),
        false => from_otel.or(configured),
    };
    Some(Otlp {
        endpoint: endpoint.filter(|_| !is_disabled)?,
        headers,
        resource: read_resource(environment),
        sampling,
        content,
    })
}

/// The attributes of the daemon, from OpenTelemetry's own variables.
fn read_resource(environment: &Environment) -> BTreeMap<String, String> {
    let defaults = [
        ("service.name", "axed"),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let defaults = defaults.map(|(name, text)| (name.to_owned(), text.to_owned()));
    let configured = env_value(environment, "OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let service = env_value(environment, "OTEL_SERVICE_NAME");
    let service = service.map(|name| ("service.name".to_owned(), name.to_owned()));
    defaults
        .into_iter()
        .chain(parse_pairs(configured))
        .chain(service)
        .collect()
}

/// The endpoint from OpenTelemetry's own variables; the one for traces holds the whole URL
/// (<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>).
fn otel_endpoint(s: &mut TableReader<'_>, environment: &Environment) -> Option<String> {
    let traces_variable = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    let common_variable = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let (name, text) = [traces_variable, common_variable]
        .into_iter()
        .find_map(|name| Some((name, env_value(environment, name)?)))?;
    match parse_endpoint(text) {
        Ok(url) if name == traces_variable => Some(url),
        Ok(url) => Some(with_traces_path(url)),
        Err(message) => {
            s.push_error(Origin::External(name.to_owned()), format!("it {message}"));
            None
        }
    }
}

/// Checks a collector's address. Errors do not repeat the text: it may hold a key.
fn parse_endpoint(text: &str) -> Result<String, String> {
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

fn with_traces_path(url: String) -> String {
    let base = url.trim_end_matches('/');
    match base.ends_with(TRACES_PATH) || base.contains(['?', '#']) {
        true => base.to_owned(),
        false => format!("{base}{TRACES_PATH}"),
    }
}

fn parse_headers(text: &str) -> BTreeMap<String, SecretString> {
    let pairs = parse_pairs(text);
    pairs.map(|(name, value)| (name, value.into())).collect()
}

/// Parses `name=value` pairs, separated by commas, with percent-encoded values.
fn parse_pairs(text: &str) -> impl Iterator<Item = (String, String)> {
    text.split(',').filter_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        let name = name.trim();
        (!name.is_empty()).then(|| (name.to_owned(), percent_decode(value.trim())))
    })
}

fn percent_decode(text: &str) -> String {
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

    use super::{parse_endpoint, parse_headers, percent_decode, with_traces_path};

    #[test]
    fn an_endpoint_gets_its_path() {
        let normalized = |text: &str| with_traces_path(parse_endpoint(text).expect("an address"));
        assert_eq!(normalized("http://a:4318"), "http://a:4318/v1/traces");
        assert_eq!(normalized("https://a/otlp/"), "https://a/otlp/v1/traces");
        assert_eq!(normalized("http://a/v1/traces"), "http://a/v1/traces");
        for bad in ["", "a:4317", "grpc://a", "http://", "http://me:secret@a"] {
            let message = parse_endpoint(bad).expect_err("no address");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn headers_of_the_environment_are_read() {
        let headers = parse_headers("authorization=Basic%20abc=, x-team = a ,junk");
        let shown: Vec<_> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.expose_secret()))
            .collect();
        assert_eq!(shown, [("authorization", "Basic abc="), ("x-team", "a")]);
        assert_eq!(percent_decode("100%"), "100%");
        assert_eq!(percent_decode("%zz%41"), "%zzA");
    }
}
