//! The `[providers.<name>]` sections, with keys and addresses from the environment.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};
use secrecy::{ExposeSecret, SecretString};

use crate::config::environment::{env_value, is_valid_name, variable_name};
use crate::config::load_context::LoadContext;
use crate::config::models::lookup::{Models, ProviderModels};
use crate::config::models::row::ModelRow;
use crate::config::presets::{PRESETS, Preset, find_preset, is_openai_host};
use crate::config::secrets::{is_secret_set, read_secret, source_variable};
use crate::config::{
    DEFAULT_BATCH_POLL, DEFAULT_MAX_REPLY, DEFAULT_SCRIPTS, OpenAiApi, Provider, ProviderKind,
};
use crate::domain::rate_limit::Limits;
use crate::domain::service::Service;
use crate::settings::choice::Choice;
use crate::settings::document::{Node, Origin, Table, Value};
use crate::settings::kinds::FilePath;
use crate::settings::kinds::check_variable_name;
use crate::settings::section::Kind;
use crate::settings::table_reader::{MAX_COUNT, TableReader};

/// Ollama's port if its address names none.
const OLLAMA_PORT: u16 = 11_434;

/// Adds the providers that need no configuration.
pub(in crate::config) fn add_builtin(top: &mut Table, context: &LoadContext<'_>) {
    let empty = || Node {
        origin: Origin::File { line: 1, column: 1 },
        value: Value::Table(Table::new()),
    };
    let providers = top.entry("providers".to_owned()).or_insert_with(empty);
    if let Value::Table(providers) = &mut providers.value {
        let presets = PRESETS.iter().map(|preset| preset.name);
        let has_scripts = context.config_dir.join(DEFAULT_SCRIPTS).is_dir();
        let scripted = has_scripts.then_some("scripted");
        let builtin = ["anthropic", "openai", "ollama"].into_iter();
        for name in builtin.chain(scripted).chain(presets) {
            providers.entry(name.to_owned()).or_insert_with(empty);
        }
    }
}

pub(in crate::config) fn read(
    name: &str,
    s: &mut TableReader<'_>,
    context: &LoadContext<'_>,
    shipped: &Models,
) -> Provider {
    check_name(name, s);
    let kind = read_kind(name, s);
    // Read for every kind, so that the error for another kind's key says so, instead of calling it unknown.
    let version = text_for_kind(
        s,
        kind,
        ProviderKind::Anthropic,
        "version",
        check_header_value,
    );
    let check_field = |text: &str| match text {
        "max_tokens" | "max_completion_tokens" => Ok(text.to_owned()),
        _ => Err("must be one of: max_tokens, max_completion_tokens".to_owned()),
    };
    let max_tokens_field = text_for_kind(
        s,
        kind,
        ProviderKind::Openai,
        "max_tokens_field",
        check_field,
    );
    let preset = find_preset(name).filter(|_| kind == ProviderKind::Openai);
    let api = read_api(s, kind);
    let key_env = s.parsed_text("api_key_env", check_variable_name);
    let key_env = key_env.unwrap_or_else(|| default_key_variable(name, preset, context));
    let configured_url = read_base_url(name, s, context);
    let configured_base = configured_url.clone();
    let used_preset = preset.filter(|_| configured_url.is_none());
    let (preset_url, missing_address) =
        match used_preset.map(|own| own.base_url(context.environment)) {
            Some(Ok(url)) => (Some(url), None),
            Some(Err(variable)) => (None, Some(variable)),
            None => (None, None),
        };
    let positive = |number: u64| usize::try_from(number).ok().filter(|number| *number > 0);
    let base_url = configured_url.or(preset_url);
    let table = sold_service(kind, base_url.as_deref()).map_or(name, |(service, _)| service);
    let is_priced = |model: &str| {
        let facts = [name, table].map(|provider| shipped.get(provider, model));
        facts.into_iter().flatten().any(|it| it.price.is_some())
    };
    Provider {
        kind,
        api_key: read_api_key(s, context, &key_env),
        key_env,
        is_preset: used_preset.is_some(),
        missing_address,
        base_url,
        headers: s.texts_by_name("headers", parse_header),
        max_concurrent: s
            .integer("max_concurrent", 0..=MAX_COUNT)
            .and_then(positive),
        timeout: s.seconds("timeout", 0).filter(|time| !time.is_zero()),
        version,
        max_tokens_field,
        api,
        max_reply: s.size("max_reply").unwrap_or(DEFAULT_MAX_REPLY),
        scripts: read_scripts(s, kind, context),
        batch_poll: s
            .number("batch_poll", 0.01..=3600.0)
            .map_or(DEFAULT_BATCH_POLL, Duration::from_secs_f64),
        services: read_services(name, s, kind, configured_base.as_deref()),
        limits: s.tables_by_name("limits", read_limits),
        models: s.tables_by_name("models", |model, s| {
            ModelRow::read(s, !kind.is_free() && !is_priced(model))
        }),
    }
}

/// What the service allows in a minute of one model, of all models whose names begin alike, or of each other one.
fn read_limits(models: &str, s: &mut TableReader<'_>) -> Limits {
    if models.is_empty() || models.trim_end_matches('*').contains('*') || models.ends_with("**") {
        s.push_invalid_name(
            "is neither a model nor the beginning of the names of several: \"*\" may only be its last character",
        );
    }
    [
        "requests_per_minute",
        "input_tokens_per_minute",
        "output_tokens_per_minute",
        "tokens_per_minute",
    ]
    .map(|key| s.integer(key, 1..=MAX_COUNT))
}

/// The service whose models a provider sells, by its address, and whether its requests stay within a region.
pub(in crate::config) fn sold_service(
    kind: ProviderKind,
    base_url: Option<&str>,
) -> Option<(&'static str, bool)> {
    let (service, host) = match kind {
        ProviderKind::Anthropic => ("anthropic", "api.anthropic.com"),
        ProviderKind::Openai => ("openai", "api.openai.com"),
        ProviderKind::Ollama | ProviderKind::Scripted => return None,
    };
    let Some(base_url) = base_url else {
        return Some((service, false));
    };
    let url: Uri = base_url.parse().ok()?;
    let subdomain = url.host()?.strip_suffix(host)?;
    let is_regional = subdomain.ends_with('.');
    (is_regional || subdomain.is_empty()).then_some((service, is_regional))
}

pub(in crate::config) fn provider_models(provider: &Provider) -> ProviderModels {
    let sold = sold_service(provider.kind, provider.base_url.as_deref());
    ProviderModels {
        service: sold.map(|(service, _)| service),
        is_regional: sold.is_some_and(|(_, is_regional)| is_regional),
        has_own_models: provider.kind.is_free(),
        overrides: provider.models.clone(),
    }
}

/// The configured service tiers. The default is those of OpenAI's and Anthropic's own services, also if they are
/// configured under another name.
fn read_services(
    name: &str,
    s: &mut TableReader<'_>,
    kind: ProviderKind,
    base_url: Option<&str>,
) -> Vec<Service> {
    let host = base_url.and_then(|base| base.parse::<Uri>().ok());
    let host = host
        .as_ref()
        .and_then(Uri::host)
        .map(str::to_ascii_lowercase);
    let host = host.as_deref();
    let (official_name, is_official_host, supported) = match kind {
        ProviderKind::Anthropic => (
            "anthropic",
            host.is_none_or(|host| host == "api.anthropic.com"),
            &[Service::Batch][..],
        ),
        ProviderKind::Openai => (
            "openai",
            host.is_none_or(is_openai_host),
            &[Service::Flex, Service::Batch][..],
        ),
        ProviderKind::Ollama | ProviderKind::Scripted => ("", false, &[][..]),
    };
    let is_official = find_preset(name).is_none() && (name == official_name || is_official_host);
    let default_services = match is_official {
        true => supported.to_vec(),
        false => Vec::new(),
    };
    let Some(node) = s.peek("services") else {
        return default_services;
    };
    let names = s.text_list("services").unwrap_or_default();
    let known_services = Service::NAMES
        .iter()
        .filter(|(_, service)| *service != Service::Default);
    let find_service = |name: &String| known_services.clone().find(|(known, _)| known == name);
    if let Some(unknown) = names.iter().find(|name| find_service(name).is_none()) {
        let known: Vec<&str> = known_services.clone().map(|(name, _)| *name).collect();
        let message = format!(
            "contains {unknown:?}, which is not one of: {}",
            known.join(", ")
        );
        s.push_invalid(&node, "services", &message);
    }
    let is_supported =
        |name: &String| find_service(name).is_none_or(|(_, service)| supported.contains(service));
    if let Some(other) = names.iter().find(|name| !is_supported(name)) {
        let message = format!("contains {other:?}, which this kind of provider does not offer");
        s.push_invalid(&node, "services", &message);
    }
    names
        .iter()
        .filter_map(find_service)
        .map(|(_, service)| *service)
        .collect()
}

fn check_name(name: &str, s: &mut TableReader<'_>) {
    if !is_valid_name(name) {
        s.push_invalid_name(
            "is not a valid provider name: up to 64 letters, digits, - _ . without two _ in a row",
        );
    }
}

fn read_kind(name: &str, s: &mut TableReader<'_>) -> ProviderKind {
    let by_name = ProviderKind::named(name);
    let is_known = by_name.is_some() || find_preset(name).is_some();
    if !is_known && s.peek("kind").is_none() {
        let message = "is required, one of: anthropic, openai, ollama, scripted";
        s.push_missing("kind", message);
    }
    let kind = s.choice("kind");
    kind.or(by_name).unwrap_or(ProviderKind::Openai)
}

/// The variable for the key if the file names none: of a well-known service's variables, the first one that is set.
fn default_key_variable(name: &str, preset: Option<&Preset>, context: &LoadContext<'_>) -> String {
    let Some(Preset {
        key_variables: keys,
        ..
    }) = preset
    else {
        return format!("{}_API_KEY", variable_name(name));
    };
    let mut keys = keys.iter().copied();
    let first = keys.clone().next().unwrap_or_default();
    let is_set = |key: &&str| is_secret_set(context.environment, key);
    keys.find(is_set).unwrap_or(first).to_owned()
}

fn read_api(s: &mut TableReader<'_>, kind: ProviderKind) -> Option<OpenAiApi> {
    let node = s.peek("api")?;
    let api = s.choice("api");
    if kind != ProviderKind::Openai {
        reject_for_kind(s, &node, "api", ProviderKind::Openai);
    }
    api
}

/// A string that only one kind of provider supports.
fn text_for_kind(
    s: &mut TableReader<'_>,
    kind: ProviderKind,
    required: ProviderKind,
    key: &'static str,
    check: impl FnOnce(&str) -> Result<String, String>,
) -> Option<String> {
    let node = s.peek(key)?;
    let value = s.parsed_text(key, check)?;
    if kind != required {
        reject_for_kind(s, &node, key, required);
    }
    Some(value)
}

fn reject_for_kind(
    s: &mut TableReader<'_>,
    node: &Node,
    key: &'static str,
    required: ProviderKind,
) {
    let why = format!("is only for kind = \"{}\"", required.as_str());
    s.push_invalid(node, key, &why);
}

fn read_scripts(
    s: &mut TableReader<'_>,
    kind: ProviderKind,
    context: &LoadContext<'_>,
) -> Vec<PathBuf> {
    let Some(node) = s.peek("scripts") else {
        let default = context.config_dir.join(DEFAULT_SCRIPTS);
        let is_used = kind == ProviderKind::Scripted && default.is_dir();
        return Vec::from_iter(is_used.then_some(default));
    };
    let mut scripts: Vec<PathBuf> = Vec::new();
    FilePath.read(s, "scripts", &mut scripts);
    if kind != ProviderKind::Scripted {
        reject_for_kind(s, &node, "scripts", ProviderKind::Scripted);
    }
    let in_config_dir = |path: PathBuf| context.config_dir.join(path);
    scripts.into_iter().map(in_config_dir).collect()
}

/// The API key: axed's own variable beats the service's variable, which beats the file.
fn read_api_key(
    s: &mut TableReader<'_>,
    context: &LoadContext<'_>,
    key_env: &str,
) -> Option<SecretString> {
    let is_overridden = s.is_from_env_or_flag("api_key");
    // A blank key means no key, as in a variable.
    let configured = s.parsed_text("api_key", |text| match text.trim() {
        "" => Ok(None),
        text => parse_api_key(text).map(Some),
    });
    let configured = configured.flatten();
    if is_overridden {
        return configured;
    }
    let key = match read_secret(context.environment, key_env) {
        Ok(Some(key)) => parse_api_key(key.expose_secret())
            .map_err(|message| (source_variable(context.environment, key_env), message)),
        Ok(None) => return configured,
        Err(error) => Err((error.variable, error.reason)),
    };
    key.map_err(|(variable, message)| s.push_error(Origin::External(variable), message))
        .ok()
}

/// The base URL: axed's own variables beat the service's variable, which beats the file.
fn read_base_url(name: &str, s: &mut TableReader<'_>, context: &LoadContext<'_>) -> Option<String> {
    let is_overridden = s.is_from_env_or_flag("base_url");
    let configured = s.parsed_text("base_url", parse_base_url);
    for (variable, is_host) in base_url_variables(name, is_overridden) {
        let Some(text) = env_value(context.environment, &variable) else {
            continue;
        };
        let parsed = match is_host {
            true => parse_ollama_host(text),
            false => parse_base_url(text),
        };
        return match parsed {
            Ok(found) => Some(found),
            Err(message) => {
                s.push_error(Origin::External(variable), message);
                None
            }
        };
    }
    configured
}

/// The variables that may hold a provider's base URL, the strongest first, and whether each holds a host as Ollama has it.
/// A value from a variable or flag of the configuration overrides the service's own variable.
pub(in crate::config) fn base_url_variables(
    name: &str,
    is_overridden: bool,
) -> Vec<(String, bool)> {
    let axed_variable = (format!("AXED_{}_BASE_URL", variable_name(name)), false);
    let service_variable = match name {
        "anthropic" | "openai" => Some((format!("{}_BASE_URL", variable_name(name)), false)),
        "ollama" => Some(("OLLAMA_HOST".to_owned(), true)),
        _ => None,
    };
    let mut variables = vec![axed_variable];
    if !is_overridden {
        variables.extend(service_variable);
    }
    variables
}

/// Checks an http or https URL without credentials and query, and strips the trailing slash.
fn parse_base_url(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.contains("${") {
        return Err("must be a literal address: variables are not expanded here".to_owned());
    }
    let invalid = || "must be an http or https address such as http://localhost:8000/v1".to_owned();
    let uri: Uri = text.parse().map_err(|_| invalid())?;
    let authority = uri.authority().ok_or_else(invalid)?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return Err(invalid());
    }
    if authority.as_str().contains('@') {
        return Err(
            "must not contain credentials; use api_key, api_key_env or headers for them".to_owned(),
        );
    }
    if uri.query().is_some() || text.contains('#') {
        return Err("must be an address without ? and #".to_owned());
    }
    let has_port = authority
        .as_str()
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.ends_with(']'));
    if has_port && uri.port_u16().is_none() {
        return Err(invalid());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// Parses `OLLAMA_HOST` as Ollama's own programs do: a host, a port, both, or a URL. An unspecified address becomes
/// loopback.
fn parse_ollama_host(text: &str) -> Result<String, String> {
    let text = text.trim().trim_matches(['"', '\'']);
    let (scheme, rest, default_port) = match text.split_once("://") {
        Some(("http", rest)) => ("http", rest, None),
        Some(("https", rest)) => ("https", rest, None),
        Some(_) => return parse_base_url(text),
        None => ("http", text, Some(OLLAMA_PORT)),
    };
    let (host_and_port, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    // Colons in brackets, or more than one colon without brackets, belong to an IPv6 address.
    let is_bare_v6 = host_and_port.parse::<std::net::Ipv6Addr>().is_ok();
    let (host, port) = match host_and_port.rsplit_once(':') {
        Some((host, port)) if !is_bare_v6 && !port.ends_with(']') => (host, Some(port.to_owned())),
        _ => (host_and_port, None),
    };
    let port = port.or(default_port.map(|port| port.to_string()));
    let host = match host.trim_matches(['[', ']']) {
        "" | "0.0.0.0" => "127.0.0.1".to_owned(),
        "::" => "[::1]".to_owned(),
        v6 if v6.contains(':') => format!("[{v6}]"),
        host => host.to_owned(),
    };
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    parse_base_url(&format!("{scheme}://{host}{port}{path}"))
}

/// The error must not repeat the key.
fn parse_api_key(text: &str) -> Result<SecretString, String> {
    let text = text.trim();
    if text.contains("${") {
        let message =
            "is taken literally: variables are not expanded here; name one with api_key_env";
        return Err(message.to_owned());
    }
    match HeaderValue::from_str(text) {
        Ok(value) if value.to_str().is_ok() => Ok(SecretString::from(text)),
        _ => Err("contains characters that a key cannot have".to_owned()),
    }
}

fn parse_header(name: &str, value: &str) -> Result<SecretString, String> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| "is not a valid header name".to_owned())?;
    check_header_value(value).map(SecretString::from)
}

fn check_header_value(text: &str) -> Result<String, String> {
    match HeaderValue::from_str(text) {
        Ok(value) if value.to_str().is_ok() => Ok(text.to_owned()),
        _ => Err("contains characters that a header cannot have".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_base_url, parse_ollama_host, sold_service};
    use crate::config::ProviderKind;

    #[test]
    fn a_service_is_known_by_its_address() {
        let (anthropic, openai) = (ProviderKind::Anthropic, ProviderKind::Openai);
        for (kind, base_url, sold) in [
            (openai, None, Some(("openai", false))),
            (
                openai,
                Some("https://api.openai.com/v1"),
                Some(("openai", false)),
            ),
            (
                openai,
                Some("https://eu.api.openai.com/v1"),
                Some(("openai", true)),
            ),
            (openai, Some("https://notapi.openai.com.example/v1"), None),
            (openai, Some("https://xapi.openai.com/v1"), None),
            (openai, Some("https://api.anthropic.com/v1"), None),
            (
                anthropic,
                Some("https://api.anthropic.com"),
                Some(("anthropic", false)),
            ),
            (ProviderKind::Ollama, None, None),
        ] {
            assert_eq!(sold_service(kind, base_url), sold, "{base_url:?}");
        }
    }

    #[test]
    fn an_address_is_plain_http() {
        assert_eq!(
            parse_base_url("http://localhost:8000/v1/"),
            Ok("http://localhost:8000/v1".to_owned())
        );
        assert_eq!(
            parse_base_url("https://[::1]:1/"),
            Ok("https://[::1]:1".to_owned())
        );
        for bad in [
            "localhost:8000",
            "ftp://x",
            "http://",
            "http://x:99999",
            "http://x?y",
            "http://x#y",
            "http://a b",
            "http://${HOST}",
            "",
        ] {
            assert!(parse_base_url(bad).is_err(), "{bad}");
        }
        let message = parse_base_url("http://user:pass@x").expect_err("an error");
        assert!(
            message.contains("credentials") && !message.contains("pass@"),
            "{message}"
        );
    }

    #[test]
    fn ollama_host_is_parsed_as_ollama_does() {
        for (text, address) in [
            ("0.0.0.0", "http://127.0.0.1:11434"),
            ("0.0.0.0:8080", "http://127.0.0.1:8080"),
            ("box", "http://box:11434"),
            ("box:1234", "http://box:1234"),
            (":1234", "http://127.0.0.1:1234"),
            ("http://box", "http://box"),
            ("https://box/ollama/", "https://box/ollama"),
            ("[::]:99", "http://[::1]:99"),
            ("::1", "http://[::1]:11434"),
            ("[fe80::1]", "http://[fe80::1]:11434"),
        ] {
            assert_eq!(parse_ollama_host(text), Ok(address.to_owned()), "{text}");
        }
        assert!(parse_ollama_host("box:port").is_err());
        assert!(parse_ollama_host("ftp://box").is_err());
    }
}
