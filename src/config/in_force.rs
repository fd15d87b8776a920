//! Lists what is in force, key by key, with the source of each value. Secrets are masked.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use crate::config::Config;
use crate::config::environment::{Environment, env_value};
use crate::config::providers::base_url_variables;
use crate::config::secrets::{is_secret_set, source_variable};
use crate::config::variables::is_secret;
use crate::settings::document::{Node, Origin, Table, Value};
use crate::settings::known_keys::{KnownKeys, quote_key};

/// Stands for a secret.
const MASK: &str = "***";

/// A key of the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingInForce {
    /// The path of its table.
    pub table: String,
    pub key: String,
    /// `None` if it is not set and has no default value.
    pub value: Option<Json>,
    /// `None` for the default.
    pub origin: Option<Origin>,
}

/// By table and key.
type Settings = BTreeMap<(String, String), (Option<Json>, Option<Origin>)>;

/// Every key that is set in `table`, which has the merged sources, and the defaults of all others.
pub(in crate::config) fn list(
    table: &Table,
    known_keys: &KnownKeys,
    config: &Config,
    environment: &Environment,
) -> Vec<SettingInForce> {
    let mut settings = Settings::new();
    add_table(&mut settings, &[], table);
    add_providers(&mut settings, config, environment);
    let mut defaults = defaults(config);
    defaults.extend(tool_defaults(config));
    for (path, key) in known_keys.settings() {
        let full = format!("{path}.{key}");
        let is_table =
            |set: &(String, String)| set.0 == full || set.0.starts_with(&format!("{full}."));
        if !settings.keys().any(is_table) {
            let default = defaults.get(full.as_str()).cloned();
            settings
                .entry((path.to_owned(), key.to_owned()))
                .or_insert((default, None));
        }
    }
    let settings = settings.into_iter();
    let settings = settings.map(|((table, key), (value, origin))| SettingInForce {
        table,
        key,
        value,
        origin,
    });
    settings.collect()
}

fn add_table(settings: &mut Settings, path: &[&str], table: &Table) {
    for (key, node) in table {
        let full = [path, &[key.as_str()]].concat();
        match &node.value {
            Value::Table(table) => add_table(settings, &full, table),
            _ => {
                let value = match is_secret(&full) {
                    true => MASK.into(),
                    false => shown(node),
                };
                let origin = Some(node.origin.clone());
                settings.insert((join(path), quote_key(key)), (Some(value), origin));
            }
        }
    }
}

fn join(path: &[&str]) -> String {
    let keys: Vec<String> = path.iter().map(|key| quote_key(key)).collect();
    keys.join(".")
}

/// The value as written; the text of a variable as the number or the truth value that it means.
fn shown(node: &Node) -> Json {
    match &node.value {
        Value::Untyped(text) => match serde_json::from_str(text.trim()) {
            Ok(value @ (Json::Bool(_) | Json::Number(_))) => value,
            _ => text.as_str().into(),
        },
        _ => node.to_json(),
    }
}

/// The keys and addresses that providers have from variables of their services.
fn add_providers(settings: &mut Settings, config: &Config, environment: &Environment) {
    for (name, provider) in &config.providers {
        let table = format!("providers.{}", quote_key(name));
        let mut add = |key: &str, value: Json, variable: String| {
            let row = (table.clone(), key.to_owned());
            let is_overridden = |(_, origin): &(Option<Json>, Option<Origin>)| {
                matches!(origin, Some(Origin::External(_)))
            };
            if !settings.get(&row).is_some_and(is_overridden) {
                let origin = Some(Origin::External(variable));
                settings.insert(row, (Some(value), origin));
            }
        };
        if is_secret_set(environment, &provider.key_env) {
            let variable = source_variable(environment, &provider.key_env);
            add("api_key", MASK.into(), variable);
        }
        let variables = base_url_variables(name, false).into_iter();
        let mut variables = variables.map(|(variable, _)| variable);
        let used = variables.find(|variable| env_value(environment, variable).is_some());
        if let (Some(variable), Some(url)) = (used, &provider.base_url) {
            add("base_url", url.as_str().into(), variable);
        }
    }
}

/// The default values of the keys that have one, besides those of tools and webhooks.
fn defaults(config: &Config) -> BTreeMap<&'static str, Json> {
    let Config {
        server,
        agents,
        data,
        runs,
        limits,
        ..
    } = config;
    let unlimited = |count: usize| match count {
        usize::MAX => 0,
        count => count,
    };
    BTreeMap::from([
        ("server.listen", json!(server.listen)),
        ("server.path_prefix", json!(server.path_prefix)),
        ("server.trusted_proxies", json!([])),
        ("server.compression", json!(server.compression)),
        ("server.cors.origins", json!([])),
        ("server.cors.credentials", json!(false)),
        ("server.max_body", json!(server.max_body)),
        ("server.max_trigger_body", json!(server.max_trigger_body)),
        ("server.body_memory", json!(server.body_memory)),
        (
            "server.max_pending_per_address",
            json!(server.max_pending_per_address),
        ),
        (
            "server.max_pending_connections",
            json!(server.max_pending_connections),
        ),
        ("server.max_wait", json!(server.max_wait.as_secs())),
        (
            "server.default_timeout",
            json!(server.default_timeout.as_secs()),
        ),
        ("server.max_timeout", json!(server.max_timeout.as_secs())),
        (
            "server.drain_timeout",
            json!(server.drain_timeout.as_secs()),
        ),
        ("agents.dirs", json!(agents.dirs)),
        ("agents.watch", json!(agents.watch)),
        ("data.dir", json!(data.dir)),
        ("data.durability", json!("process")),
        ("cluster.unique_names", json!(data.cluster.unique_names)),
        ("cluster.labels", json!([])),
        ("data.requests", json!("full")),
        ("data.redact", json!([])),
        ("data.retention.age", json!(0)),
        ("data.retention.count", json!(0)),
        ("data.usage_retention", json!("400d")),
        ("runs.max_running", json!(runs.max_running)),
        ("runs.max_queued", json!(runs.max_queued)),
        ("runs.max_queued_bytes", json!(runs.max_queued_bytes)),
        ("runs.max_tree", json!(unlimited(runs.max_tree))),
        ("runs.max_live", json!(unlimited(runs.max_live))),
        (
            "runs.max_delegations",
            json!(unlimited(runs.max_delegations)),
        ),
        ("runs.max_calls", json!(unlimited(runs.max_calls))),
        ("runs.unserved", json!("1h")),
        ("limits.loop_warn", json!(limits.loop_warn)),
        ("limits.loop_stop", json!(limits.loop_stop)),
        ("limits.context_files", json!(limits.context_files)),
        ("limits.labels", json!(limits.labels)),
        (
            "limits.conversation_bytes",
            json!(limits.conversation_bytes),
        ),
        ("limits.session_messages", json!(limits.session_messages)),
        ("limits.session_bytes", json!(limits.session_bytes)),
        ("limits.attachments", json!(limits.attachments)),
        ("limits.attachment_bytes", json!(limits.attachment_bytes)),
    ])
}

fn tool_defaults(config: &Config) -> BTreeMap<&'static str, Json> {
    let Config {
        tools,
        webhooks,
        clients,
        ..
    } = config;
    BTreeMap::from([
        ("tools.allow_commands", json!(false)),
        ("tools.allow_unconfined", json!(false)),
        ("tools.network", json!(false)),
        ("tools.max_command_processes", json!(256)),
        ("tools.max_command_memory", json!(4_u64 << 30)),
        ("tools.pass_env", json!([])),
        ("tools.roots", json!([])),
        ("tools.max_result", json!(tools.max_result)),
        ("tools.deferred_above", json!(tools.deferred_above)),
        ("tools.url_fetch.allow_hosts", json!([])),
        (
            "tools.url_fetch.timeout",
            json!(tools.url_fetch.timeout.as_secs()),
        ),
        ("clients.console", json!(clients.console)),
        ("clients.openai", json!(clients.openai)),
        ("clients.mcp", json!(clients.mcp)),
        ("clients.a2a", json!(clients.a2a)),
        ("clients.ag_ui", json!(clients.ag_ui)),
        ("clients.tool_wait", json!(clients.tool_wait.as_secs())),
        ("logins.key_env", json!(config.logins.key_env)),
        ("webhooks.allow_hosts", json!([])),
        (
            "webhooks.first_retry_ms",
            json!(webhooks.first_retry.as_millis()),
        ),
    ])
}
