//! Lists what is in force, key by key, with the source of each value. Secrets are masked.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use crate::config::clients::Clients;
use crate::config::cluster::Cluster;
use crate::config::environment::{Environment, env_value};
use crate::config::providers::base_url_variables;
use crate::config::secrets::{is_secret_set, source_variable};
use crate::config::variables::is_secret;
use crate::config::waits::Waits;
use crate::config::{
    Agents, Commands, Config, Data, Limits, Logins, RetentionLimit, Runs, Server, Tools, Webhooks,
};
use crate::settings::document::{Node, Origin, Table, Value};
use crate::settings::known_keys::{KnownKeys, quote_key};
use crate::settings::section::{Audience, Kind, Section, Setting, Visitor};

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
    let defaults = defaults();
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

/// The default values of the keys that have one, by path.
fn defaults() -> BTreeMap<String, Json> {
    let mut defaults = Defaults::default();
    defaults.add("server", &Server::default());
    defaults.add("agents", &Agents::default());
    defaults.add("data", &Data::default());
    defaults.add("data.retention", &RetentionLimit::default());
    defaults.add("cluster", &Cluster::default());
    defaults.add("runs", &Runs::default());
    defaults.add("limits", &Limits::default());
    defaults.add("tools", &Tools::default());
    defaults.add("tools", &Commands::default());
    defaults.add("clients", &Clients::default());
    defaults.add("wait", &Waits::default());
    defaults.add("logins", &Logins::default());
    defaults.add("webhooks", &Webhooks::default());
    let mut by_path = defaults.by_path;
    by_path.remove("cluster.node");
    // Those of the keys that have readers of their own.
    let others = [
        ("server.trusted_proxies", json!([])),
        ("server.cors.origins", json!([])),
        ("server.cors.credentials", json!(false)),
        ("data.requests", json!("full")),
        ("data.redact", json!([])),
        ("tools.allow_commands", json!(false)),
        ("tools.pass_env", json!([])),
    ];
    by_path.extend(others.map(|(path, value)| (path.to_owned(), value)));
    by_path
}

#[derive(Default)]
struct Defaults {
    table: String,
    by_path: BTreeMap<String, Json>,
}

impl Defaults {
    fn add<S: Section>(&mut self, table: &str, section: &S) {
        table.clone_into(&mut self.table);
        section.visit(self);
    }
}

impl Visitor for Defaults {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, value: &T) {
        let path = format!("{}.{}", self.table, setting.key);
        let outer = std::mem::replace(&mut self.table, path.clone());
        if !kind.visit_section(self) {
            let shown = kind.show(value, Audience::Operator);
            if !shown.is_null() {
                self.by_path.insert(path, shown);
            }
        }
        self.table = outer;
    }
}
