//! What a message says about an unknown key: the table that it belongs in, or the known key with the closest spelling.

use std::collections::{BTreeMap, BTreeSet};

use crate::settings::document::{Origin, Problem, ProblemKind};
use crate::settings::suggestion;

/// A key that belongs in more tables than this is not searched in other tables: a list of them would not help.
const MAX_TABLES: usize = 3;

/// A key that its table does not know.
#[derive(Debug)]
pub struct UnknownKey {
    pub origin: Origin,
    /// The path of its table; empty at the top.
    pub table: String,
    /// As messages show it.
    pub key: String,
    pub known_here: Vec<&'static str>,
}

/// The tables of a document that know a key, by key.
#[derive(Debug, Default)]
pub struct KnownKeys(BTreeMap<&'static str, BTreeSet<String>>);

impl KnownKeys {
    /// Adds the keys of the table at a path.
    pub fn add(&mut self, table: &str, keys: &[&'static str]) {
        for key in keys {
            let tables = self.0.entry(key).or_default();
            tables.insert(table.to_owned());
        }
    }

    /// The tables with their keys that are no tables. Omits tables whose names users choose.
    pub fn settings(&self) -> impl Iterator<Item = (&str, &'static str)> {
        let tables: BTreeSet<&str> = self.0.values().flatten().map(String::as_str).collect();
        let all = self.0.iter().flat_map(|(key, tables)| {
            let tables = tables.iter().map(String::as_str);
            tables.map(move |table| (table, *key))
        });
        let is_fixed = |table: &str| {
            let is_builtin_provider = table.starts_with("providers.");
            !is_builtin_provider && !table.contains("<name>") && !table.is_empty()
        };
        all.filter(move |(table, key)| {
            let full = join(table, key);
            let is_table = |it: &&str| *it == full || it.starts_with(&format!("{full}."));
            is_fixed(table) && !tables.iter().any(is_table)
        })
    }

    /// What the user probably meant.
    pub fn explain(&self, unknown: UnknownKey) -> Problem {
        let UnknownKey {
            origin,
            table,
            key,
            mut known_here,
        } = unknown;
        let closest_here = || suggestion::closest(&key, known_here.iter().copied());
        let hint = if let Some(places) = self.places(&key, &table) {
            format!("it belongs {places}")
        } else if let Some(suggestion) = closest_here() {
            format!("did you mean \"{}\"?", join(&table, suggestion))
        } else {
            known_here.sort_unstable();
            known_here.dedup();
            format!("the keys known here are: {}", known_here.join(", "))
        };
        Problem {
            origin,
            text: format!("unknown key \"{}\"", join(&table, &key)),
            hint: Some(hint),
            kind: ProblemKind::Malformed,
        }
    }

    /// The other tables that know the key: `in [limits]`. `None` if there are none, or too many.
    fn places(&self, key: &str, table: &str) -> Option<String> {
        let tables = self.0.get(key)?;
        let others = tables.iter().filter(|path| *path != table);
        let places: BTreeSet<String> = others.map(|path| place(path)).collect();
        let places: Vec<&str> = places.iter().map(String::as_str).collect();
        match places.as_slice() {
            [] => None,
            [only] if only == &TOP => Some(format!("{TOP}, above its first [table]")),
            _ if places.len() > MAX_TABLES => None,
            places => Some(places.join(" or ")),
        }
    }
}

const TOP: &str = "at the top of the file";

/// The table at a path: `in [limits]`, or `in [[mcp_servers]]` for `mcp_servers[0]`.
fn place(path: &str) -> String {
    // The sample documents name the tables whose names users choose like this.
    let path = path.replace("\"<name>\"", "<name>");
    match path.strip_suffix("[0]") {
        _ if path.is_empty() => TOP.to_owned(),
        Some(list) => format!("in [[{list}]]"),
        None => format!("in [{path}]"),
    }
}

fn join(table: &str, key: &str) -> String {
    match table {
        "" => key.to_owned(),
        table => format!("{table}.{key}"),
    }
}

/// The key as TOML writes it.
pub fn quote_key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match !name.is_empty() && name.chars().all(is_bare) {
        true => name.to_owned(),
        false => format!("\"{}\"", printable(name)),
    }
}

/// The key for a message: bounded, on one line.
pub fn printable(key: &str) -> String {
    let printable = key.chars().take(64).map(|c| match c.is_control() {
        true => '\u{fffd}',
        false => c,
    });
    printable.collect()
}

#[cfg(test)]
mod tests {
    use super::{KnownKeys, UnknownKey};
    use crate::settings::document::Origin;

    #[test]
    fn a_key_in_the_wrong_table_is_shown_its_place() {
        let mut known = KnownKeys::default();
        known.add("", &["name", "tools"]);
        known.add("limits", &["max_turns"]);
        known.add("params", &["temperature", "max_tokens"]);
        known.add("budget", &["max_tokens"]);
        known.add("mcp_servers[0]", &["command"]);
        known.add("prices.\"<name>\"", &["input"]);
        for (table, key, expected) in [
            (
                "",
                "max_turns",
                "unknown key \"max_turns\"; it belongs in [limits]",
            ),
            (
                "",
                "max_tokens",
                "unknown key \"max_tokens\"; it belongs in [budget] or in [params]",
            ),
            (
                "limits",
                "tools",
                "unknown key \"limits.tools\"; it belongs at the top of the file, above its first [table]",
            ),
            (
                "",
                "command",
                "unknown key \"command\"; it belongs in [[mcp_servers]]",
            ),
            (
                "",
                "input",
                "unknown key \"input\"; it belongs in [prices.<name>]",
            ),
            ("", "tool", "unknown key \"tool\"; did you mean \"tools\"?"),
            (
                "",
                "zzz",
                "unknown key \"zzz\"; the keys known here are: name, tools",
            ),
        ] {
            let problem = known.explain(UnknownKey {
                origin: Origin::Whole,
                table: table.to_owned(),
                key: key.to_owned(),
                known_here: vec!["tools", "name"],
            });
            assert_eq!(problem.message(), expected);
        }
    }
}
