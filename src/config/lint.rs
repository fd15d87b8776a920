//! Finds what is suspicious in a valid configuration: settings without effect, and things that it names and that do not
//! exist. Blocking I/O.

use crate::config::Config;
use crate::config::secrets::is_process_secret_set;
use crate::settings::document::Problem;
use crate::settings::known_keys::quote_key;
use crate::settings::positions::{Positions, item};
use crate::settings::suggestion;

pub fn lint(config: &Config, positions: &Positions) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut warn = |path: &str, text: String, hint: Option<String>| {
        problems.push(positions.warning(path, text).with_hint(hint));
    };
    let server = &config.server;
    let addresses = [
        ("server.listen", Some(server.listen)),
        ("server.metrics_listen", server.metrics_listen),
    ];
    for (path, address) in addresses {
        let is_open = |address: &std::net::SocketAddr| !address.ip().is_loopback();
        if let (Some(address), true) = (address.filter(is_open), config.auth.keys.is_empty()) {
            let text = format!(
                "{path} {address} is not a loopback address, and no keys are configured, so that only --insecure-no-auth starts"
            );
            warn(path, text, Some("axed keys new prints a key".to_owned()));
        }
    }
    if server.default_timeout > server.max_timeout {
        let text = "server.default_timeout is above server.max_timeout, which holds for all runs";
        warn("server.default_timeout", text.to_owned(), None);
    }
    if config.data.listen_url.is_some() && config.data.url.is_none() {
        let text = "data.listen_url has no effect without data.url: runs are recorded in data.dir";
        warn("data.listen_url", text.to_owned(), None);
    }
    let (loop_warn, loop_stop) = (config.limits.loop_warn, config.limits.loop_stop);
    if loop_stop > 0 && loop_warn >= loop_stop {
        let text = "limits.loop_warn is not below limits.loop_stop, so that runs fail without a hint before";
        warn("limits.loop_warn", text.to_owned(), None);
    }
    for dir in &config.agents.dirs {
        if !dir.is_dir() {
            let shown = dir.display().to_string();
            let path = item("agents.dirs", &shown);
            warn(&path, format!("there is no agents directory {shown}"), None);
        }
    }
    for root in &config.tools.roots {
        if !root.is_dir() {
            let shown = root.display().to_string();
            let path = item("tools.roots", &shown);
            let text = format!("tools.roots names {shown}, which is not a directory");
            warn(&path, text, None);
        }
    }
    for (path, variable) in secret_variables(config) {
        if !is_process_secret_set(&variable) {
            let text = format!("{path} names the variable {variable}, which is not set");
            warn(&path, text, None);
        }
    }
    for budget in &config.budgets {
        let path = format!("budgets.{}", quote_key(&budget.name));
        let keys = || config.auth.keys.iter().map(|key| key.name.as_str());
        if let Some(key) = budget
            .key
            .as_deref()
            .filter(|key| keys().all(|it| it != *key))
        {
            let hint = suggestion::did_you_mean(key, keys());
            let text = format!("{path}.match names the key {key}, but there is no such key");
            warn(&path, text, hint);
        }
    }
    for model in positions.tables("prices") {
        let provider = model.split('/').next().unwrap_or_default();
        if !config.providers.contains_key(provider) {
            let known = config.providers.keys().map(String::as_str);
            let hint = suggestion::did_you_mean(provider, known);
            let path = format!("prices.{}", quote_key(&model));
            let text = format!("{path}: there is no provider \"{provider}\"");
            warn(&path, text, hint);
        }
    }
    problems
}

/// The variables that must hold secrets, with the keys that name them.
fn secret_variables(config: &Config) -> Vec<(String, String)> {
    let keys = config.auth.keys.iter().map(|key| {
        let path = format!("auth.keys.{}.webhook_secret_env", quote_key(&key.name));
        (path, key.webhook_secret_env.clone())
    });
    let search = config.tools.web_search.as_ref();
    let search = search.and_then(|search| search.api_key_env.clone());
    let budgets = config.budgets.iter().map(|budget| {
        let path = format!("budgets.{}.webhook.secret_env", quote_key(&budget.name));
        let webhook = budget.webhook.as_ref();
        (path, webhook.and_then(|webhook| webhook.secret_env.clone()))
    });
    let others = [
        ("webhooks.secret_env", config.webhooks.secret_env.clone()),
        ("tools.web_search.api_key_env", search),
    ];
    let others = others
        .into_iter()
        .map(|(path, variable)| (path.to_owned(), variable));
    let all = keys.chain(budgets).chain(others);
    all.filter_map(|(path, variable)| Some((path, variable?)))
        .collect()
}
