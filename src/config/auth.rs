//! The `[auth]` section: the keys of clients. It knows a key only by its hash, and nothing of HTTP.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::environment::is_valid_name;
use crate::config::key_hash::KeyHash;
use crate::config::{Auth, ClientKey, KeyScope};
use crate::domain::glob;
use crate::settings::choice::Choice;
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;

impl ClientKey {
    /// The scope `admin` includes all others.
    pub fn has_scope(&self, scope: KeyScope) -> bool {
        self.is_admin() || self.scopes.contains(&scope)
    }

    pub fn is_admin(&self) -> bool {
        self.scopes.contains(&KeyScope::Admin)
    }

    /// Whether the key can see this agent.
    pub fn can_use_agent(&self, agent: &str) -> bool {
        let agents = self.agents.as_ref();
        agents.is_none_or(|agents| agents.is_match(agent))
    }
}

pub(in crate::config) fn read(s: &mut TableReader<'_>) -> Auth {
    let mut names_by_hash = BTreeMap::new();
    let keys = s.tables_by_name("keys", |name, s| read_key(name, s, &mut names_by_hash));
    Auth {
        keys: keys.into_values().flatten().map(Arc::new).collect(),
    }
}

/// `None` if the hash or the scopes are missing or invalid.
fn read_key(
    name: &str,
    s: &mut TableReader<'_>,
    names_by_hash: &mut BTreeMap<KeyHash, String>,
) -> Option<ClientKey> {
    if !is_valid_name(name) {
        s.push_invalid_name(
            "is not a valid key name: up to 64 letters, digits, - _ . without two _ in a row",
        );
    }
    let sha256 = read_hash(name, s, names_by_hash);
    let scopes = read_scopes(s);
    let agents = read_agent_globs(s);
    let webhook_secret_env = s.parsed_text("webhook_secret_env", check_variable_name);
    Some(ClientKey {
        name: name.to_owned(),
        sha256: sha256?,
        scopes: scopes?,
        agents,
        webhook_secret_env,
    })
}

fn read_hash(
    name: &str,
    s: &mut TableReader<'_>,
    names_by_hash: &mut BTreeMap<KeyHash, String>,
) -> Option<KeyHash> {
    let Some(node) = s.peek("sha256") else {
        let message = "is required: the SHA-256 of the key in hex, as axed keys new prints it";
        s.push_missing("sha256", message);
        s.ignore("sha256");
        return None;
    };
    // The text may be the key itself, pasted here by mistake, so the error must not repeat it.
    let hash = s.parsed_text("sha256", |hex| {
        KeyHash::parse_hex(hex).ok_or_else(|| {
            "must be the SHA-256 of the key, 64 digits in hex, and not the key itself".to_owned()
        })
    })?;
    if let Some(other) = names_by_hash.insert(hash, name.to_owned()) {
        let message = format!("is also the hash of auth.keys.{other}; a key has one name");
        s.push_invalid(&node, "sha256", &message);
    }
    Some(hash)
}

fn read_scopes(s: &mut TableReader<'_>) -> Option<Vec<KeyScope>> {
    if s.peek("scopes").is_none() {
        s.push_missing(
            "scopes",
            &format!("is required: one or more of: {}", KeyScope::list_names()),
        );
        s.ignore("scopes");
        return None;
    };
    s.checked_list("scopes", |texts| {
        let known = KeyScope::list_names();
        if texts.is_empty() {
            return Err(format!("must contain at least one of: {known}"));
        }
        let scopes = texts.iter().map(|text| {
            KeyScope::named(text)
                .ok_or_else(|| format!("contains {text:?}, which is not one of: {known}"))
        });
        scopes.collect()
    })
}

/// `None` means all agents.
fn read_agent_globs(s: &mut TableReader<'_>) -> Option<glob::Matcher> {
    let node = s.peek("agents")?;
    let patterns = s.text_list("agents").filter(|texts| !texts.is_empty())?;
    let is_blank = patterns.iter().any(|pattern| pattern.trim().is_empty());
    let globs = match is_blank {
        true => Err("contains a blank pattern; \"*\" means all agents".to_owned()),
        false => glob::Matcher::for_names(&patterns),
    };
    globs
        .map_err(|message| s.push_invalid(&node, "agents", &message))
        .ok()
}
