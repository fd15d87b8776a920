//! Reads a document's tables strictly: every key that is not read is an error, and every error names its key. Does
//! not know what the keys mean.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::civil::Date;
use serde_json::{Map, Value as Json};

use crate::settings::choice::Choice;
use crate::settings::document::{self, Node, Origin, Problem, ProblemKind, Table, Value};
use crate::settings::known_keys::{KnownKeys, UnknownKey, printable, quote_key};
use crate::settings::quantity::{parse_bytes, parse_integer, parse_seconds};

/// Maximum number of seconds or things of a key: more than a century, and more than any semaphore or table holds.
pub const MAX_COUNT: u64 = u32::MAX as u64;

/// Reads a table with `read`; `~` in paths is `home`. Returns its value, and all problems in the file's order. If a key is unknown, `read` also
/// reads `sample`, a document with every optional table, to find the tables that know the key.
pub fn read_table<T>(
    table: Table,
    sample: &str,
    home: Option<&Path>,
    read: impl Fn(&mut TableReader<'_>) -> T,
) -> (T, Vec<Problem>) {
    let (value, pass) = read_all(table, home, &read);
    let Pass {
        mut problems,
        unknown_keys,
        ..
    } = pass;
    if !unknown_keys.is_empty() {
        let known_keys = known_keys(sample, home, &read);
        let placed = unknown_keys.into_iter().map(|key| known_keys.explain(key));
        problems.extend(placed);
    }
    // A stable sort: problems at one position keep the order in which they were found.
    problems.sort_by(|a, b| a.origin.cmp(&b.origin));
    (value, problems)
}

/// The keys that `read` asks for in a sample document.
pub fn known_keys<T>(
    sample: &str,
    home: Option<&Path>,
    read: impl Fn(&mut TableReader<'_>) -> T,
) -> KnownKeys {
    let sample = document::parse(sample.as_bytes()).unwrap_or_default();
    read_all(sample, home, read).1.known_keys
}

fn read_all<T>(
    table: Table,
    home: Option<&Path>,
    read: impl Fn(&mut TableReader<'_>) -> T,
) -> (T, Pass) {
    let mut pass = Pass {
        home: home.map(Path::to_owned),
        ..Pass::default()
    };
    let top = Origin::File { line: 1, column: 1 };
    let value = read_nested(String::new(), top, table, &mut pass, read);
    (value, pass)
}

/// What one pass over a document needs, and what it finds besides the values.
#[derive(Default)]
struct Pass {
    home: Option<PathBuf>,
    problems: Vec<Problem>,
    unknown_keys: Vec<UnknownKey>,
    known_keys: KnownKeys,
}

fn read_nested<T>(
    path: String,
    origin: Origin,
    table: Table,
    pass: &mut Pass,
    read: impl FnOnce(&mut TableReader<'_>) -> T,
) -> T {
    let mut reader = TableReader {
        path,
        origin,
        table,
        known_keys: Vec::new(),
        pass,
    };
    let value = read(&mut reader);
    reader.finish();
    value
}

/// A table that is being read. A reading method returns `None` if the key is absent or wrong. It records what is
/// wrong as a problem, so that one pass finds all problems.
pub struct TableReader<'a> {
    path: String,
    origin: Origin,
    table: Table,
    known_keys: Vec<&'static str>,
    pass: &'a mut Pass,
}

impl TableReader<'_> {
    pub fn text(&mut self, key: &'static str) -> Option<String> {
        self.parsed_text(key, |text| Ok(text.to_owned()))
    }

    /// A string that `check` converts to a value. Its error follows the key's name, such as `must be a path`.
    pub fn parsed_text<T>(
        &mut self,
        key: &'static str,
        check: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let node = self.take(key)?;
        match &node.value {
            Value::String(text) | Value::Untyped(text) => match check(text) {
                Ok(value) => return Some(value),
                Err(message) => self.push_invalid(&node, key, &message),
            },
            other => self.push_wrong_type(&node, key, "a string", other),
        }
        None
    }

    /// A day: `2026-11-30`, as text or as TOML's own date.
    pub fn date(&mut self, key: &'static str) -> Option<Date> {
        let node = self.take(key)?;
        let day = match &node.value {
            Value::String(text) | Value::Untyped(text) | Value::Datetime(text) => text.parse().ok(),
            _ => None,
        };
        if day.is_none() {
            self.push_invalid(&node, key, "must be a day such as \"2026-11-30\"");
        }
        day
    }

    /// An enum by its name.
    pub fn choice<T: Choice>(&mut self, key: &'static str) -> Option<T> {
        self.parsed_text(key, |name| {
            T::named(name).ok_or_else(|| format!("must be one of: {}", T::list_names()))
        })
    }

    pub fn one_of<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        self.parsed_text(key, |text| {
            let found = choices.iter().find(|(name, _)| *name == text);
            found.map(|(_, value)| *value).ok_or_else(|| {
                let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
                format!("must be one of: {}", names.join(", "))
            })
        })
    }

    pub fn flag(&mut self, key: &'static str) -> Option<bool> {
        let node = self.take(key)?;
        match &node.value {
            Value::Boolean(flag) => return Some(*flag),
            Value::Untyped(text) if text.trim() == "true" => return Some(true),
            Value::Untyped(text) if text.trim() == "false" => return Some(false),
            other => self.push_wrong_type(&node, key, "true or false", other),
        }
        None
    }

    pub fn integer(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        let node = self.take(key)?;
        match parse_integer(&node.value, range) {
            Some(Ok(number)) => return Some(number),
            Some(Err(message)) => self.push_invalid(&node, key, &message),
            None => self.push_wrong_type(&node, key, "a whole number", &node.value),
        }
        None
    }

    /// Whole seconds, at least `min`.
    pub fn seconds(&mut self, key: &'static str, min: u64) -> Option<Duration> {
        self.integer(key, min..=MAX_COUNT).map(Duration::from_secs)
    }

    /// A duration: whole seconds, or a text such as `30d`.
    pub fn age(&mut self, key: &'static str) -> Option<Duration> {
        let node = self.take(key)?;
        let seconds = match &node.value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::String(text) | Value::Untyped(text) => parse_seconds(text),
            _ => None,
        };
        let seconds = seconds.filter(|seconds| *seconds <= MAX_COUNT);
        if seconds.is_none() {
            let message = format!(
                "must be a duration of at most {MAX_COUNT} seconds: a whole number of seconds, or text such as \"30d\" \
                 (s, m, h, d or w)"
            );
            self.push_invalid(&node, key, &message);
        }
        seconds.map(Duration::from_secs)
    }

    /// At least `min`.
    pub fn count(&mut self, key: &'static str, min: u64) -> Option<usize> {
        let count = self.integer(key, min..=MAX_COUNT)?;
        usize::try_from(count).ok()
    }

    /// A size in bytes, at least 1: a whole number, or a text such as `4 MiB`.
    pub fn size(&mut self, key: &'static str) -> Option<usize> {
        let node = self.take(key)?;
        let size = match &node.value {
            Value::Integer(number) => usize::try_from(*number).ok(),
            Value::String(text) | Value::Untyped(text) => parse_bytes(text),
            _ => None,
        };
        if size.is_none_or(|size| size == 0) {
            let message = "must be a size of at least 1 byte: a whole number of bytes, or text such as \"4 MiB\"";
            self.push_invalid(&node, key, message);
            return None;
        }
        size
    }

    pub fn number(&mut self, key: &'static str, range: RangeInclusive<f64>) -> Option<f64> {
        let node = self.take(key)?;
        let number = match &node.value {
            Value::Float(number) => *number,
            Value::Integer(number) => *number as f64,
            Value::Untyped(text) if text.trim().parse::<f64>().is_ok() => {
                text.trim().parse().unwrap_or(f64::NAN)
            }
            other => {
                self.push_wrong_type(&node, key, "a number", other);
                return None;
            }
        };
        let message = if !number.is_finite() {
            "must be a finite number".to_owned()
        } else if range.contains(&number) {
            return Some(number);
        } else if number < 0.0 {
            "must be non-negative".to_owned()
        } else if number < *range.start() {
            format!("must be at least {}", range.start())
        } else {
            format!("cannot exceed {}", range.end())
        };
        self.push_invalid(&node, key, &message);
        None
    }

    /// A list of strings. The value of a variable is split at commas.
    pub fn text_list(&mut self, key: &'static str) -> Option<Vec<String>> {
        let node = self.take(key)?;
        match &node.value {
            Value::Untyped(text) => {
                let parts = text.split(',').map(|part| part.trim().to_owned());
                Some(parts.filter(|part| !part.is_empty()).collect())
            }
            Value::Array(items) => {
                let mut texts = Vec::with_capacity(items.len());
                for item in items {
                    match &item.value {
                        Value::String(text) => texts.push(text.clone()),
                        other => {
                            self.push_wrong_type(item, key, "a list of strings", other);
                            return None;
                        }
                    }
                }
                Some(texts)
            }
            other => {
                self.push_wrong_type(&node, key, "a list of strings", other);
                None
            }
        }
    }

    /// A list of strings that are checked together. The error follows the key.
    pub fn checked_list<T>(
        &mut self,
        key: &'static str,
        check: impl FnOnce(Vec<String>) -> Result<T, String>,
    ) -> Option<T> {
        let node = self.peek(key)?;
        let texts = self.text_list(key)?;
        let checked = check(texts);
        checked
            .map_err(|why| self.push_invalid(&node, key, &why))
            .ok()
    }

    /// A list of strings, each of them parsed. An error follows the key, and each wrong string has one.
    pub fn parsed_list<T>(
        &mut self,
        key: &'static str,
        mut parse: impl FnMut(&str) -> Result<T, String>,
    ) -> Option<Vec<T>> {
        let node = self.peek(key)?;
        let texts = self.text_list(key)?;
        let mut values = Vec::with_capacity(texts.len());
        for text in &texts {
            match parse(text) {
                Ok(value) => values.push(value),
                Err(why) => self.push_invalid(&node, key, &why),
            }
        }
        Some(values)
    }

    /// A nested table; an absent one is read as an empty one.
    pub fn nested<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut TableReader<'_>) -> T,
    ) -> T {
        let path = self.full(key);
        let origin = self.origin_of(key);
        let table = self.table(key);
        read_nested(path, origin, table, self.pass, read)
    }

    /// A table of tables, under names that the user chose.
    pub fn tables_by_name<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&str, &mut TableReader<'_>) -> T,
    ) -> BTreeMap<String, T> {
        let (path, table) = (self.full(key), self.table(key));
        self.read_tables(&path, table, &mut read)
    }

    /// All tables that are left, under names that the user chose.
    pub fn remaining_tables<T>(
        &mut self,
        mut read: impl FnMut(&str, &mut TableReader<'_>) -> T,
    ) -> BTreeMap<String, T> {
        let (path, table) = (self.path.clone(), std::mem::take(&mut self.table));
        self.read_tables(&path, table, &mut read)
    }

    fn read_tables<T>(
        &mut self,
        path: &str,
        tables: Table,
        read: &mut dyn FnMut(&str, &mut TableReader<'_>) -> T,
    ) -> BTreeMap<String, T> {
        let mut values = BTreeMap::new();
        for (name, node) in tables {
            // A name may contain dots and slashes, so it is quoted as in TOML.
            let path = join(path, &quote_key(&name));
            match node.value {
                Value::Table(table) => {
                    let value = read_nested(path, node.origin, table, self.pass, |reader| {
                        read(&name, reader)
                    });
                    values.insert(name, value);
                }
                other => self.push_error(
                    node.origin,
                    format!("{path} must be a table, not {}", other.type_name()),
                ),
            }
        }
        values
    }

    pub fn table_list<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(&mut TableReader<'_>) -> T,
    ) -> Vec<T> {
        let Some(node) = self.take(key) else {
            return Vec::new();
        };
        let Value::Array(items) = node.value else {
            self.push_wrong_type(&node, key, "a list of tables", &node.value);
            return Vec::new();
        };
        let mut values = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let path = format!("{}[{index}]", self.full(key));
            match item.value {
                Value::Table(table) => {
                    values.push(read_nested(path, item.origin, table, self.pass, &mut read));
                }
                other => self.push_error(
                    item.origin,
                    format!("{path} must be a table, not {}", other.type_name()),
                ),
            }
        }
        values
    }

    /// A table of strings, under names that the user chose.
    pub fn texts_by_name<T>(
        &mut self,
        key: &'static str,
        check: impl Fn(&str, &str) -> Result<T, String>,
    ) -> BTreeMap<String, T> {
        let mut values = BTreeMap::new();
        for (name, node) in self.table(key) {
            let path = format!("{}.{}", self.full(key), quote_key(&name));
            match &node.value {
                Value::String(text) | Value::Untyped(text) => match check(&name, text) {
                    Ok(value) => drop(values.insert(name, value)),
                    Err(message) => self.push_error(node.origin, format!("{path} {message}")),
                },
                other => {
                    let text = format!("{path} must be a string, not {}", other.type_name());
                    self.push_error(node.origin, text);
                }
            }
        }
        values
    }

    /// A table of counts of at least `min`, under names that the user chose. The error of `check` follows the name.
    pub fn counts_by_name(
        &mut self,
        key: &'static str,
        min: u64,
        check: impl Fn(&str) -> Result<(), String>,
    ) -> BTreeMap<String, usize> {
        let mut values = BTreeMap::new();
        for (name, node) in self.table(key) {
            let count = parse_integer(&node.value, min..=MAX_COUNT).unwrap_or_else(|| {
                let found = node.value.type_name();
                Err(format!("must be a whole number, not {found}"))
            });
            match check(&name).and(count) {
                Ok(count) => {
                    values.insert(name, usize::try_from(count).unwrap_or(usize::MAX));
                }
                Err(message) => {
                    let text = format!("{}.{} {message}", self.full(key), quote_key(&name));
                    self.push_error(node.origin, text);
                }
            }
        }
        values
    }

    /// A table as JSON, its keys in the file's order. The error of `check` follows the key.
    pub fn json_table(
        &mut self,
        key: &'static str,
        check: impl FnOnce(&Map<String, Json>) -> Result<(), String>,
    ) -> Option<Map<String, Json>> {
        let node = self.take(key)?;
        match node.to_json() {
            Json::Object(object) => match check(&object) {
                Ok(()) => return Some(object),
                Err(message) => self.push_invalid(&node, key, &message),
            },
            _ => self.push_wrong_type(&node, key, "a table", &node.value),
        }
        None
    }

    /// Takes the value, still to be read.
    pub fn take_node(&mut self, key: &'static str) -> Option<Node> {
        self.take(key)
    }

    /// Returns the value and leaves it in the table.
    pub fn peek(&mut self, key: &'static str) -> Option<Node> {
        self.known_keys.push(key);
        self.table.get(key).cloned()
    }

    /// Accepts the key whatever its value is.
    pub fn ignore(&mut self, key: &'static str) {
        self.take(key);
    }

    /// Records an error if the key is set: it belongs in `place`.
    pub fn misplaced(&mut self, key: &'static str, place: &str) {
        if let Some(node) = self.table.remove(key) {
            let text = format!("{} belongs {place}", self.full(key));
            self.push_error(node.origin, text);
        }
    }

    /// Records an error if a key is set that this version does not support. Values that disable the feature are
    /// accepted.
    pub fn reject_if_set(&mut self, key: &'static str) {
        let Some(node) = self.take(key) else { return };
        let is_disabled = match &node.value {
            Value::Boolean(flag) => !flag,
            Value::Array(items) => items.is_empty(),
            Value::Table(table) => table.is_empty(),
            Value::Untyped(text) => text.trim() == "false",
            _ => false,
        };
        if !is_disabled {
            let text = format!(
                "{} is not supported by this version of axed; remove it",
                self.full(key)
            );
            self.push_error(node.origin, text);
        }
    }

    /// Whether no key is left to read.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Whether the key's value comes from a variable or a flag.
    pub fn is_from_env_or_flag(&self, key: &str) -> bool {
        let node = self.table.get(key);
        node.is_some_and(|node| matches!(node.origin, Origin::External(_)))
    }

    /// Records that a required key is absent. `message` follows the key.
    pub fn push_missing(&mut self, key: &'static str, message: &str) {
        let text = format!("{} {message}", self.full(key));
        self.push(self.origin.clone(), text, ProblemKind::RuleViolation);
    }

    /// Records that the key's value breaks a rule. `why` follows the key.
    pub fn push_invalid(&mut self, node: &Node, key: &'static str, why: &str) {
        let text = format!("{} {why}", self.full(key));
        self.push(node.origin.clone(), text, ProblemKind::RuleViolation);
    }

    /// Records that the name of this table, which the user chose, is wrong. `why` follows the name.
    pub fn push_invalid_name(&mut self, why: &str) {
        let text = format!("{} {why}", self.path);
        self.push_error(self.origin.clone(), text);
    }

    /// Records that a value refers to nothing. The text does not follow the key.
    pub fn push_wrong_reference(&mut self, node: &Node, text: String) {
        self.push(node.origin.clone(), text, ProblemKind::WrongReference);
    }

    /// The number of problems so far.
    pub fn count_problems(&self) -> usize {
        self.pass.problems.len()
    }

    /// Removes the wrong references after this number of problems.
    pub fn remove_wrong_references(&mut self, after: usize) {
        let later = self.pass.problems.split_off(after);
        let others = later.into_iter();
        let others = others.filter(|problem| problem.kind != ProblemKind::WrongReference);
        self.pass.problems.extend(others);
    }

    /// The home directory of the user that runs this process.
    pub fn home(&self) -> Option<&Path> {
        self.pass.home.as_deref()
    }

    /// Records that the document is malformed.
    pub fn push_error(&mut self, origin: Origin, text: String) {
        self.push(origin, text, ProblemKind::Malformed);
    }

    fn push(&mut self, origin: Origin, text: String, kind: ProblemKind) {
        self.pass.problems.push(Problem {
            origin,
            text,
            hint: None,
            kind,
        });
    }

    /// Position of the key, or of its table if the key is absent.
    fn origin_of(&self, key: &str) -> Origin {
        let node = self.table.get(key);
        node.map_or(&self.origin, |node| &node.origin).clone()
    }

    fn take(&mut self, key: &'static str) -> Option<Node> {
        self.known_keys.push(key);
        self.table.remove(key)
    }

    fn table(&mut self, key: &'static str) -> Table {
        let Some(node) = self.take(key) else {
            return Table::new();
        };
        match node.value {
            Value::Table(table) => table,
            ref other => {
                self.push_wrong_type(&node, key, "a table", other);
                Table::new()
            }
        }
    }

    fn push_wrong_type(&mut self, node: &Node, key: &'static str, expected: &str, found: &Value) {
        let text = format!(
            "{} must be {expected}, not {}",
            self.full(key),
            found.type_name()
        );
        self.push_error(node.origin.clone(), text);
    }

    fn full(&self, key: &str) -> String {
        join(&self.path, key)
    }

    fn finish(mut self) {
        let known = &mut self.pass.known_keys;
        known.add(&self.path, &self.known_keys);
        for (key, node) in std::mem::take(&mut self.table) {
            self.pass.unknown_keys.push(UnknownKey {
                origin: node.origin,
                table: self.path.clone(),
                key: printable(&key),
                known_here: self.known_keys.clone(),
            });
        }
    }
}

fn join(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}

#[cfg(test)]
mod tests {
    use super::read_table;
    use crate::settings::document::{format_problems, parse};

    fn problems(text: &str) -> String {
        let table = match parse(text.as_bytes()) {
            Ok(table) => table,
            Err(problems) => return format_problems(&problems, "f.toml", "\n"),
        };
        let ((), problems) = read_table(table, "", None, |top| {
            top.text("name");
            top.nested("limits", |limits| {
                limits.integer("max_turns", 1..=50);
                limits.size("files");
                limits.number("share", 0.0..=1.0);
            });
            top.reject_if_set("later");
        });
        format_problems(&problems, "f.toml", "\n")
    }

    #[test]
    fn every_problem_names_position_and_key() {
        let text = "nmae = 1\n[limits]\nmax_turns = 51\n  max_turn = 2\nfiles = \"4 cows\"\nshare = -0.1\n";
        assert_eq!(
            problems(text),
            "f.toml:1:1: unknown key \"nmae\"; did you mean \"name\"?\n\
             f.toml:3:1: limits.max_turns cannot exceed 50\n\
             f.toml:4:3: unknown key \"limits.max_turn\"; did you mean \"limits.max_turns\"?\n\
             f.toml:5:1: limits.files must be a size of at least 1 byte: a whole number of bytes, or text such as \"4 MiB\"\n\
             f.toml:6:1: limits.share must be non-negative"
        );
        assert_eq!(
            problems("name = 3"),
            "f.toml:1:1: name must be a string, not a whole number"
        );
        assert_eq!(
            problems("limits.max_turns = 99999999999999999999"),
            "f.toml:1:8: limits.max_turns cannot exceed 50"
        );
        assert_eq!(
            problems("limits = 1"),
            "f.toml:1:1: limits must be a table, not a whole number"
        );
        assert_eq!(
            problems("zzz = 1"),
            "f.toml:1:1: unknown key \"zzz\"; the keys known here are: later, limits, name"
        );
    }

    #[test]
    fn a_key_that_is_only_peeked_at_counts_as_known() {
        let table = parse(b"fils = 1").expect("a table");
        let (_, problems) = read_table(table, "", None, |top| top.peek("files"));
        assert_eq!(
            format_problems(&problems, "f.toml", "\n"),
            "f.toml:1:1: unknown key \"fils\"; did you mean \"files\"?"
        );
    }

    #[test]
    fn disabled_unsupported_keys_are_accepted() {
        assert_eq!(problems("later = []"), "");
        assert_eq!(problems("later = false"), "");
        assert_eq!(
            problems("later = 1"),
            "f.toml:1:1: later is not supported by this version of axed; remove it"
        );
    }
}
