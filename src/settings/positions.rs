//! The positions of a document's keys, for messages about values that were read.

use std::collections::BTreeMap;

use crate::settings::document::{Node, Origin, Problem, ProblemKind, Table, Value};
use crate::settings::known_keys::quote_key;

/// Keys and list items with a position. Further ones have that of their table.
const MAX_POSITIONS: usize = 10_000;

/// By path: `tools`, `tools["grep"]` (see [`item`]), `params.temperature`, `mcp_servers[0].command`, `prices."openai/gpt-6-sol".input`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Positions(BTreeMap<String, Origin>);

impl Positions {
    pub fn of(table: &Table) -> Self {
        let mut positions = Self::default();
        positions.add_table("", table);
        positions
    }

    /// The position of the key itself; `None` if the document does not have it.
    pub fn get(&self, path: &str) -> Option<&Origin> {
        self.0.get(path)
    }

    /// The line of the key, from 1.
    pub fn line(&self, path: &str) -> Option<usize> {
        self.get(path)?.line()
    }

    /// The last line of a key or list item in the table at a path.
    pub fn last_line(&self, path: &str) -> Option<usize> {
        let prefix = format!("{path}.");
        let below = self.0.range(prefix.clone()..);
        let below = below.take_while(|(path, _)| path.starts_with(&prefix));
        below.filter_map(|(_, origin)| origin.line()).max()
    }

    /// The position of the key, or else of the closest table or list around it.
    pub fn find(&self, path: &str) -> Origin {
        let mut path = path;
        loop {
            if let Some(origin) = self.0.get(path) {
                return origin.clone();
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return Origin::Whole,
            }
        }
    }

    /// The names of the keys of the table at a path, without quotes.
    pub fn tables(&self, path: &str) -> Vec<String> {
        let prefix = format!("{path}.");
        let below = self.0.range(prefix.clone()..);
        let below = below.map_while(|(path, _)| path.strip_prefix(&prefix));
        let names = below.filter_map(|rest| match rest.strip_prefix('"') {
            Some(quoted) => quoted.strip_suffix('"').filter(|it| !it.contains('"')),
            None => Some(rest).filter(|it| !it.contains(['.', '['])),
        });
        names.map(str::to_owned).collect()
    }

    pub fn warning(&self, path: &str, text: String) -> Problem {
        self.problem(path, text, ProblemKind::Warning)
    }

    pub fn problem(&self, path: &str, text: String, kind: ProblemKind) -> Problem {
        Problem {
            origin: self.find(path),
            text,
            hint: None,
            kind,
        }
    }

    fn add_table(&mut self, path: &str, table: &Table) {
        for (key, node) in table {
            let key = quote_key(key);
            let path = match path {
                "" => key,
                path => format!("{path}.{key}"),
            };
            self.add(path, node);
        }
    }

    fn add(&mut self, path: String, node: &Node) {
        if self.0.len() >= MAX_POSITIONS {
            return;
        }
        match &node.value {
            Value::Table(table) => self.add_table(&path, table),
            Value::Array(items) => {
                for (index, node) in items.iter().enumerate() {
                    let path = match &node.value {
                        Value::String(text) => item(&path, text),
                        _ => format!("{path}[{index}]"),
                    };
                    self.add(path, node);
                }
            }
            _ => {}
        }
        // Of equal items, the first one.
        self.0.entry(path).or_insert_with(|| node.origin.clone());
    }
}

/// The path of a string in a list, by its text: reading a list may drop duplicates, so an index would mislead.
pub fn item(list: &str, text: &str) -> String {
    format!("{list}[\"{text}\"]")
}

#[cfg(test)]
mod tests {
    use super::{Positions, item};
    use crate::settings::document::{Origin, parse};

    #[test]
    fn a_key_without_a_position_has_that_of_its_table() {
        let text =
            "tools = [\"a\",\n  \"b\"]\n[params]\ntemperature = 1\n[[mcp_servers]]\nname = \"x\"\n";
        let positions = Positions::of(&parse(text.as_bytes()).expect("a table"));
        for (path, line) in [
            ("tools", 1),
            (&item("tools", "b"), 2),
            (&item("tools", "c.d[0]"), 1),
            ("params.temperature", 4),
            ("params.top_p", 3),
            ("mcp_servers[0].name", 6),
        ] {
            let found = positions.find(path);
            assert!(
                matches!(found, Origin::File { line: at, .. } if at == line),
                "{path}: {found:?}"
            );
        }
        assert_eq!(positions.find("model"), Origin::Whole);
        assert_eq!(positions.tables("params"), ["temperature"]);
        assert!(positions.tables("tools").is_empty());
    }
}
