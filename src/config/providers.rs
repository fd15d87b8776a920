//! The `[providers.<name>]` sections, with the keys and addresses that the environment holds for them.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Uri};
use secrecy::SecretString;

use crate::config::document::{Node, Origin, Table, Value};
use crate::config::load::{MAX_PRICE, Place, is_plain_name, set, variable_name};
use crate::config::models::{Override, Sampling};
use crate::config::presets::{PRESETS, Preset, preset};
use crate::config::section::{MAX_COUNT, Section};
use crate::config::{BATCH_POLL, MAX_REPLY, OpenAiApi, Provider, ProviderKind};
use crate::domain::agent::{Effort, check_extra};
use crate::domain::service::Service;

const KINDS: [(&str, ProviderKind); 4] = [
    ("anthropic", ProviderKind::Anthropic),
    ("openai", ProviderKind::Openai),
    ("ollama", ProviderKind::Ollama),
    ("scripted", ProviderKind::Scripted),
];
const APIS: [(&str, OpenAiApi); 2] = [
    ("responses", OpenAiApi::Responses),
    ("chat", OpenAiApi::Chat),
];
/// The port that Ollama takes where its address names none.
const OLLAMA_PORT: u16 = 11_434;

/// Adds the providers that are there without being configured.
pub(in crate::config) fn add_builtin(top: &mut Table) {
    let empty = || Node {
        origin: Origin::File { line: 1, column: 1 },
        value: Value::Table(Table::new()),
    };
    let providers = top.entry("providers".to_owned()).or_insert_with(empty);
    if let Value::Table(providers) = &mut providers.value {
        let presets = PRESETS.iter().map(|preset| preset.name);
        for name in ["anthropic", "openai", "ollama"].into_iter().chain(presets) {
            providers.entry(name.to_owned()).or_insert_with(empty);
        }
    }
}

/// One provider's section.
pub(in crate::config) fn read(name: &str, s: &mut Section<'_>, place: &Place<'_>) -> Provider {
    check_name(name, s);
    let kind = kind(name, s);
    // Read for every kind, so that a key of another kind is told as that and not as unknown.
    let version = only_for(s, kind, ProviderKind::Anthropic, "version", header_text);
    let fields = |text: &str| match text {
        "max_tokens" | "max_completion_tokens" => Ok(text.to_owned()),
        _ => Err("must be one of: max_tokens, max_completion_tokens".to_owned()),
    };
    let max_tokens_field = only_for(s, kind, ProviderKind::Openai, "max_tokens_field", fields);
    let preset = preset(name).filter(|_| kind == ProviderKind::Openai);
    let api = api(s, kind);
    let key_env = s.checked("api_key_env", variable);
    let key_env = key_env.unwrap_or_else(|| usual_key(name, preset, place));
    let written = base_url(name, s, place);
    let written_base = written.clone();
    let own = preset.filter(|_| written.is_none());
    let (preset_url, missing_address) = match own.map(|own| own.base_url(place.environment)) {
        Some(Ok(url)) => (Some(url), None),
        Some(Err(variable)) => (None, Some(variable)),
        None => (None, None),
    };
    // Also at an address that is written: Azure's and Bedrock's are a customer's own.
    let own_field = preset.filter(|preset| preset.max_completion_tokens);
    let own_field = own_field.map(|_| "max_completion_tokens".to_owned());
    let positive = |number: u64| usize::try_from(number).ok().filter(|number| *number > 0);
    Provider {
        kind,
        api_key: api_key(s, place, &key_env),
        key_env,
        is_preset: own.is_some(),
        missing_address,
        base_url: written.or(preset_url),
        headers: s.texts_by_name("headers", header),
        max_concurrent: s.whole("max_concurrent", 0..=MAX_COUNT).and_then(positive),
        timeout: s.seconds("timeout", 0).filter(|time| !time.is_zero()),
        version,
        max_tokens_field: max_tokens_field.or(own_field),
        api,
        max_reply: s.size("max_reply").unwrap_or(MAX_REPLY),
        scripts: scripts(s, kind, place),
        batch_poll: s
            .number("batch_poll", 0.01..=3600.0)
            .map_or(BATCH_POLL, Duration::from_secs_f64),
        services: services(name, s, kind, written_base.as_deref()),
        models: s.named("models", |_, s| model(s)),
    }
}

/// The tiers that a service sells: those that are configured, else those of OpenAI's and Anthropic's own services, and of
/// what is configured in their place.
fn services(
    name: &str,
    s: &mut Section<'_>,
    kind: ProviderKind,
    base_url: Option<&str>,
) -> Vec<Service> {
    let (own, host, all) = match kind {
        ProviderKind::Anthropic => ("anthropic", "://api.anthropic.com", &[Service::Batch][..]),
        ProviderKind::Openai => (
            "openai",
            "://api.openai.com",
            &[Service::Flex, Service::Batch][..],
        ),
        ProviderKind::Ollama | ProviderKind::Scripted => ("", "", &[][..]),
    };
    let is_own =
        preset(name).is_none() && (name == own || base_url.is_none_or(|base| base.contains(host)));
    let usual = match is_own {
        true => all.to_vec(),
        false => Vec::new(),
    };
    let Some(node) = s.peek("services") else {
        return usual;
    };
    let names = s.texts("services").unwrap_or_default();
    let sold = Service::ALL
        .iter()
        .filter(|(_, service)| *service != Service::Default);
    let named = |name: &String| sold.clone().find(|(known, _)| known == name);
    if let Some(unknown) = names.iter().find(|name| named(name).is_none()) {
        let known: Vec<&str> = sold.clone().map(|(name, _)| *name).collect();
        let why = format!("has {unknown:?}, which is none of: {}", known.join(", "));
        s.rule(&node, "services", &why);
    }
    let is_spoken = |name: &String| named(name).is_none_or(|(_, service)| all.contains(service));
    if let Some(other) = names.iter().find(|name| !is_spoken(name)) {
        let why = format!("has {other:?}, which this kind of provider has not");
        s.rule(&node, "services", &why);
    }
    names
        .iter()
        .filter_map(named)
        .map(|(_, service)| *service)
        .collect()
}

/// What the configuration says of one model.
fn model(s: &mut Section<'_>) -> Override {
    let price = |s: &mut Section<'_>, key| s.number(key, 0.0..=MAX_PRICE);
    let sampling = [
        ("always", Sampling::Always),
        ("without_effort", Sampling::WithoutEffort),
        ("never", Sampling::Never),
    ];
    let max_output = s.whole("max_output", 1..=MAX_COUNT);
    Override {
        input: price(s, "input"),
        output: price(s, "output"),
        cache_read: price(s, "cache_read"),
        cache_write: price(s, "cache_write"),
        cache_write_1h: price(s, "cache_write_1h"),
        batch: s.number("batch", 0.0..=1.0),
        flex: s.number("flex", 0.0..=1.0),
        context_window: s.whole("context_window", 1..=MAX_COUNT),
        max_output: max_output.and_then(|tokens| u32::try_from(tokens).ok()),
        images: s.flag("images"),
        pdf: s.flag("pdf"),
        reasoning: s.flag("reasoning"),
        effort: efforts(s),
        sampling: s.one_of("sampling", &sampling),
        responses: s.flag("responses"),
        extra: s.checked_json("extra", check_extra).unwrap_or_default(),
    }
}

/// The levels that a model takes, the least first.
fn efforts(s: &mut Section<'_>) -> Option<Vec<Effort>> {
    let node = s.peek("effort")?;
    let names = s.texts("effort")?;
    let level = |name: &String| Effort::ALL.iter().find(|(known, _)| known == name);
    let mut levels = Vec::with_capacity(names.len());
    for name in &names {
        match level(name) {
            Some((_, level)) => levels.push(*level),
            None => {
                let known: Vec<&str> = Effort::ALL.iter().map(|(name, _)| *name).collect();
                let why = format!("has {name:?}, which is none of: {}", known.join(", "));
                s.rule(&node, "effort", &why);
            }
        }
    }
    levels.sort_unstable();
    levels.dedup();
    Some(levels)
}

fn check_name(name: &str, s: &mut Section<'_>) {
    if !is_plain_name(name) {
        s.wrong_name(
            "is no provider's name: up to 64 letters, digits, - _ . without two _ in a row",
        );
    }
}

fn kind(name: &str, s: &mut Section<'_>) -> ProviderKind {
    let by_name = KINDS.iter().find(|(kind, _)| *kind == name);
    let is_known = by_name.is_some() || preset(name).is_some();
    if !is_known && s.peek("kind").is_none() {
        let why = "must be given, one of: anthropic, openai, ollama, scripted";
        s.missing("kind", why);
    }
    let kind = s.one_of("kind", &KINDS);
    kind.or(by_name.map(|(_, kind)| *kind))
        .unwrap_or(ProviderKind::Openai)
}

/// The variable that holds the key where the file names none: of a well-known service's variables the first that is set.
fn usual_key(name: &str, preset: Option<&Preset>, place: &Place<'_>) -> String {
    let Some(Preset { keys, .. }) = preset else {
        return format!("{}_API_KEY", variable_name(name));
    };
    let mut keys = keys.iter().copied();
    let first = keys.clone().next().unwrap_or_default();
    let is_set = |key: &&str| set(place.environment, key).is_some();
    keys.find(is_set).unwrap_or(first).to_owned()
}

/// Which of OpenAI's wires a service is spoken to on.
fn api(s: &mut Section<'_>, kind: ProviderKind) -> Option<OpenAiApi> {
    let node = s.peek("api")?;
    let api = s.one_of("api", &APIS);
    if kind != ProviderKind::Openai {
        refuse_for_kind(s, &node, "api", ProviderKind::Openai);
    }
    api
}

/// A text that means something to one kind only.
fn only_for(
    s: &mut Section<'_>,
    kind: ProviderKind,
    wanted: ProviderKind,
    key: &'static str,
    check: impl FnOnce(&str) -> Result<String, String>,
) -> Option<String> {
    let node = s.peek(key)?;
    let value = s.checked(key, check)?;
    if kind != wanted {
        refuse_for_kind(s, &node, key, wanted);
    }
    Some(value)
}

fn refuse_for_kind(s: &mut Section<'_>, node: &Node, key: &'static str, wanted: ProviderKind) {
    let word = KINDS.iter().find(|(_, kind)| *kind == wanted);
    let word = word.map_or("", |(word, _)| *word);
    s.rule(node, key, &format!("is only for kind = \"{word}\""));
}

fn scripts(s: &mut Section<'_>, kind: ProviderKind, place: &Place<'_>) -> Vec<PathBuf> {
    let Some(node) = s.peek("scripts") else {
        return Vec::new();
    };
    let scripts = place.paths(s, "scripts").unwrap_or_default();
    if kind != ProviderKind::Scripted {
        refuse_for_kind(s, &node, "scripts", ProviderKind::Scripted);
    }
    let in_config_dir = |path: PathBuf| place.config_dir.join(path);
    scripts.into_iter().map(in_config_dir).collect()
}

/// The key: axed's own variable for it, the service's variable, the file.
fn api_key(s: &mut Section<'_>, place: &Place<'_>, key_env: &str) -> Option<SecretString> {
    let is_ours = s.is_from_outside("api_key");
    // Blank is a place kept for a key, as in a variable.
    let written = s.checked("api_key", |text| match text.trim() {
        "" => Ok(None),
        text => secret(text).map(Some),
    });
    let written = written.flatten();
    if is_ours {
        return written;
    }
    match set(place.environment, key_env).map(secret) {
        Some(Ok(key)) => Some(key),
        Some(Err(why)) => {
            s.fault(Origin::Outside(key_env.to_owned()), why);
            None
        }
        None => written,
    }
}

/// The address: axed's own variables for it, the service's variable, the file.
fn base_url(name: &str, s: &mut Section<'_>, place: &Place<'_>) -> Option<String> {
    let is_ours = s.is_from_outside("base_url");
    let written = s.checked("base_url", address);
    let ours = (format!("AXED_{}_BASE_URL", variable_name(name)), false);
    let theirs = match name {
        "anthropic" | "openai" => Some((format!("{}_BASE_URL", variable_name(name)), false)),
        "ollama" => Some(("OLLAMA_HOST".to_owned(), true)),
        _ => None,
    };
    let mut variables = vec![ours];
    if !is_ours {
        variables.extend(theirs);
    }
    for (variable, is_host) in variables {
        let Some(text) = set(place.environment, &variable) else {
            continue;
        };
        let found = match is_host {
            true => ollama_address(text),
            false => address(text),
        };
        return match found {
            Ok(found) => Some(found),
            Err(why) => {
                s.fault(Origin::Outside(variable), why);
                None
            }
        };
    }
    written
}

/// An http or https address without credentials, query and the slash at its end.
fn address(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.contains("${") {
        return Err("must be an address as it stands: variables are not expanded here".to_owned());
    }
    let wrong = || "must be an http or https address such as http://localhost:8000/v1".to_owned();
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let authority = uri.authority().ok_or_else(wrong)?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return Err(wrong());
    }
    if authority.as_str().contains('@') {
        return Err(
            "must not hold credentials; use api_key, api_key_env or headers for them".to_owned(),
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
        return Err(wrong());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// `OLLAMA_HOST` as Ollama's own programs read it: a host, a port, both, or an address. What it listens on everywhere
/// is asked on loopback.
fn ollama_address(text: &str) -> Result<String, String> {
    let text = text.trim().trim_matches(['"', '\'']);
    let (scheme, rest, usual_port) = match text.split_once("://") {
        Some(("http", rest)) => ("http", rest, None),
        Some(("https", rest)) => ("https", rest, None),
        Some(_) => return address(text),
        None => ("http", text, Some(OLLAMA_PORT)),
    };
    let (host_and_port, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, ""),
    };
    // Colons within brackets, or more than one without, belong to an IPv6 address.
    let bare_v6 = host_and_port.parse::<std::net::Ipv6Addr>().is_ok();
    let (host, port) = match host_and_port.rsplit_once(':') {
        Some((host, port)) if !bare_v6 && !port.ends_with(']') => (host, Some(port.to_owned())),
        _ => (host_and_port, None),
    };
    let port = port.or(usual_port.map(|port| port.to_string()));
    let host = match host.trim_matches(['[', ']']) {
        "" | "0.0.0.0" => "127.0.0.1".to_owned(),
        "::" => "[::1]".to_owned(),
        v6 if v6.contains(':') => format!("[{v6}]"),
        host => host.to_owned(),
    };
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    address(&format!("{scheme}://{host}{port}{path}"))
}

/// A key. Its error must not show it.
fn secret(text: &str) -> Result<SecretString, String> {
    let text = text.trim();
    if text.contains("${") {
        let why =
            "is taken as it stands: variables are not expanded here; name one with api_key_env";
        return Err(why.to_owned());
    }
    match HeaderValue::from_str(text) {
        Ok(value) if value.to_str().is_ok() => Ok(SecretString::from(text)),
        _ => Err("holds characters that no key has".to_owned()),
    }
}

fn header(name: &str, value: &str) -> Result<SecretString, String> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| "is no header's name".to_owned())?;
    header_text(value).map(SecretString::from)
}

fn header_text(text: &str) -> Result<String, String> {
    match HeaderValue::from_str(text) {
        Ok(value) if value.to_str().is_ok() => Ok(text.to_owned()),
        _ => Err("holds characters that no header may have".to_owned()),
    }
}

/// A variable's name. Its error must not show it: a key pasted here by mistake is still a key.
fn variable(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = !text.is_empty()
        && text.chars().all(is_plain)
        && !text.starts_with(|c: char| c.is_ascii_digit());
    match is_name {
        true => Ok(text.to_owned()),
        false => Err("must be the name of an environment variable, not a key".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::{address, ollama_address};

    #[test]
    fn an_address_is_plain_http() {
        assert_eq!(
            address("http://localhost:8000/v1/"),
            Ok("http://localhost:8000/v1".to_owned())
        );
        assert_eq!(
            address("https://[::1]:1/"),
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
            assert!(address(bad).is_err(), "{bad}");
        }
        let why = address("http://user:pass@x").expect_err("an error");
        assert!(
            why.contains("credentials") && !why.contains("pass@"),
            "{why}"
        );
    }

    #[test]
    fn ollamas_variable_is_read_as_ollama_reads_it() {
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
            assert_eq!(ollama_address(text), Ok(address.to_owned()), "{text}");
        }
        assert!(ollama_address("box:port").is_err());
        assert!(ollama_address("ftp://box").is_err());
    }
}
