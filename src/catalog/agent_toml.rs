//! Prints an agent's settings as a file that defines the same agent.

use serde_json::{Map, Value};

use crate::domain::agent::Agent;
use crate::settings::positions::Positions;
use crate::settings::section::{Audience, show_section};

/// The agent as a TOML file, with every default filled in. Keys that are unset and have no default are left out.
pub fn to_toml(agent: &Agent, audience: Audience) -> String {
    write(agent, show_section(&agent.settings, audience))
}

/// The agent as a TOML file with the keys that its file has, and without what may be secret.
pub fn to_client_toml(agent: &Agent, positions: &Positions) -> String {
    let mut settings = show_section(&agent.settings, Audience::Client);
    settings.retain(|key, value| {
        if let Value::Object(entries) = value {
            let path = |name: &str| format!("{key}.{}", bare_key(name));
            entries.retain(|name, _| positions.get(&path(name)).is_some());
        }
        positions.get(key).is_some()
    });
    write(agent, settings)
}

fn write(agent: &Agent, settings: Map<String, Value>) -> String {
    let mut file = TomlWriter(format!("name = {}\n", basic_string(&agent.name)));
    file.table(&[], &settings);
    file.0
}

struct TomlWriter(String);

impl TomlWriter {
    /// Writes the keys of a table, then the tables in it: a key below a table's header would belong to that table.
    fn table(&mut self, path: &[&str], entries: &Map<String, Value>) {
        for (key, value) in entries {
            let has_header = has_header(path.len(), value);
            if let (false, Some(value)) = (has_header, multiline_value(value)) {
                self.0.push_str(&format!("{} = {value}\n", bare_key(key)));
            }
        }
        for (key, value) in entries {
            let path = [path, &[key.as_str()]].concat();
            match value {
                Value::Object(entries) if has_header(path.len() - 1, value) => {
                    self.header("[", &path, "]");
                    self.table(&path, entries);
                }
                Value::Array(tables) if has_header(path.len() - 1, value) => {
                    for entries in tables.iter().filter_map(Value::as_object) {
                        self.header("[[", &path, "]]");
                        self.list_item(entries);
                    }
                }
                _ => {}
            }
        }
    }

    /// Tables in a table of a list are on one line: they would look like keys of the list otherwise.
    fn list_item(&mut self, entries: &Map<String, Value>) {
        for (key, value) in entries {
            if let Some(value) = inline_value(value) {
                self.0.push_str(&format!("{} = {value}\n", bare_key(key)));
            }
        }
    }

    fn header(&mut self, open: &str, path: &[&str], close: &str) {
        let keys: Vec<String> = path.iter().map(|key| bare_key(key)).collect();
        self.0
            .push_str(&format!("\n{open}{}{close}\n", keys.join(".")));
    }
}

/// Whether a value of a table at this depth is written below a header of its own: tables down to the second level, and lists
/// of tables at the top. A schema would nest deeper than a file may.
fn has_header(depth: usize, value: &Value) -> bool {
    match value {
        Value::Object(_) => depth < 2,
        Value::Array(values) => {
            depth == 0 && !values.is_empty() && values.iter().all(Value::is_object)
        }
        _ => false,
    }
}

/// A value whose text keeps its lines.
fn multiline_value(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(multiline_string(text)),
        value => inline_value(value),
    }
}

/// A TOML string; several lines stay several lines.
pub fn multiline_string(text: &str) -> String {
    if !text.contains('\n') {
        return basic_string(text);
    }
    let lines: Vec<_> = text
        .split('\n')
        .map(|line| {
            let line_string = basic_string(line);
            line_string[1..line_string.len() - 1].to_owned()
        })
        .collect();
    format!("\"\"\"\n{}\"\"\"", lines.join("\n"))
}

/// A JSON string is a TOML string, except that TOML escapes DEL, too.
fn basic_string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A key, quoted if TOML needs quotes.
fn bare_key(key: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match !key.is_empty() && key.chars().all(is_bare) {
        true => key.to_owned(),
        false => basic_string(key),
    }
}

/// A JSON value on one line; `None` for null, which TOML does not have.
pub fn inline_value(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::String(text) => basic_string(text),
        Value::Array(values) => {
            let values: Vec<_> = values.iter().filter_map(inline_value).collect();
            format!("[{}]", values.join(", "))
        }
        Value::Object(entries) => {
            let entries = entries.iter().filter_map(|(key, value)| {
                Some(format!("{} = {}", bare_key(key), inline_value(value)?))
            });
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{TomlWriter, inline_value, multiline_string};

    #[test]
    fn strings_are_escaped_and_keep_their_lines() {
        assert_eq!(
            multiline_string("a \"b\" \\ \u{7f}"),
            r#""a \"b\" \\ \u007f""#
        );
        assert_eq!(
            multiline_string("two\n\"\"\"\n"),
            "\"\"\"\ntwo\n\\\"\\\"\\\"\n\"\"\""
        );
    }

    #[test]
    fn a_schema_fits_on_one_line() {
        let schema = json!({"type": "object", "a b": {"enum": [1, 2.5, null, "x"]}});
        assert_eq!(
            inline_value(&schema).as_deref(),
            Some(r#"{ type = "object", "a b" = { enum = [1, 2.5, "x"] } }"#)
        );
    }

    #[test]
    fn tables_follow_the_keys_of_their_parent() {
        let settings = json!({
            "list": [], "params": {"extra": {"a b": {"c": 1}}, "stop": ["x"]},
            "servers": [{"name": "s", "env": {"A": "b"}}], "unset": null, "stream": false,
        });
        let mut file = TomlWriter(String::new());
        file.table(&[], settings.as_object().expect("an object"));
        assert_eq!(
            file.0,
            "list = []\nstream = false\n\n[params]\nstop = [\"x\"]\n\n[params.extra]\n\"a b\" = { c = 1 }\n\
             \n[[servers]]\nname = \"s\"\nenv = { A = \"b\" }\n"
        );
    }
}
