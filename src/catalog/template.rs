//! The file that `axed agents init` writes: every key of an agent file with its description, and its default or an example.

use crate::catalog::agent_toml::{inline_value, multiline_string};
use crate::config::models::table::SHIPPED;
use crate::domain::agent::AgentSettings;
use crate::domain::agent::model_ref::ModelRef;
use crate::settings::section::{Audience, Kind, Section, Setting, Visitor, join_lines};

/// Characters of a line of a description.
const WIDTH: usize = 116;
/// The keys at the top that are set. All others are comments.
const SET_KEYS: [&str; 2] = ["model", "system_prompt"];

/// The model of a new agent.
pub fn default_model() -> ModelRef {
    default_models().next().unwrap_or_else(ModelRef::unset)
}

fn default_models() -> impl Iterator<Item = ModelRef> {
    let models = SHIPPED.defaults.iter();
    models.filter_map(|model| model.parse().ok())
}

/// Returns a valid agent file for this name.
pub fn template(name: &str, model: &ModelRef) -> String {
    let settings = AgentSettings {
        model: model.clone(),
        fallback_models: default_models().skip(1).take(1).collect(),
        system_prompt:
            "You are a careful assistant. Answer in plain words, and say so when you do not know.\n"
                .to_owned(),
        ..AgentSettings::default()
    };
    let mut table = Template::default();
    settings.visit(&mut table);
    let Template { keys, tables, .. } = table;
    // A name contains only letters, digits, dots, dashes and underscores, so TOML needs no escapes.
    format!(
        "# An agent. Its name is this file's name without \".toml\".\n\
         # Every key is here; a key behind a # shows its default or an example.\n\
         # To test it, save a run that went well, and play it back after each change, without a model:\n\
         #   axed runs save RUN tests/{name}.toml && axed test\n\
         \n\
         name = \"{name}\"\n{keys}{tables}"
    )
}

/// The script of a new agent whose model is one.
pub fn script_template(name: &str) -> String {
    format!(
        "# The replies of scripted/{name}, one for each turn; the last one is repeated.\n\
         # {{{{input}}}} is the last message, {{{{result.1}}}} the first result of the turn before.\n\
         [[replies]]\n\
         text = \"You wrote: {{{{input}}}}\"\n\
         \n\
         # A reply that calls a tool of the agent:\n\
         # [[replies]]\n\
         # text = \"I look.\"\n\
         # [[replies.tool_calls]]\n\
         # name = \"list_directory\"\n\
         # arguments = {{ path = \".\" }}\n"
    )
}

/// One table: TOML has the keys of a table before the tables in it.
#[derive(Default)]
struct Template {
    path: String,
    keys: String,
    tables: String,
}

impl Visitor for Template {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, value: &T) {
        let key = setting.key;
        // A file has no null.
        let about = join_lines(setting.about).replace("null means", "unset means");
        let about = comment(&about);
        let mut inner = Self {
            path: format!("{}{key}.", self.path),
            ..Self::default()
        };
        if kind.visit_section(&mut inner) {
            let path = inner.path.trim_end_matches('.');
            let (keys, tables) = (inner.keys, inner.tables);
            let section = format!("\n{about}[{path}]\n{keys}{tables}");
            self.tables.push_str(&section);
            return;
        }
        let example = setting.example.map(str::to_owned);
        match example.or_else(|| written(&kind.show(value, Audience::Operator))) {
            Some(example) if example.contains('\n') && example.starts_with('[') => {
                // A list of tables is more than a key without its #.
                let mark = if example.starts_with("[[") {
                    "#   "
                } else {
                    "# "
                };
                let lines = example.lines();
                let lines = lines.map(|line| format!("{mark}{line}").trim_end().to_owned());
                let lines: Vec<String> = lines.collect();
                let table = format!("\n{about}{}\n", lines.join("\n"));
                self.tables.push_str(&table);
            }
            Some(value) => {
                let is_set = self.path.is_empty() && SET_KEYS.contains(&key);
                let mark = if is_set { "" } else { "# " };
                self.keys
                    .push_str(&format!("{about}{mark}{key} = {value}\n"));
            }
            None => self.keys.push_str(&about),
        }
    }
}

fn written(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::String(text) => Some(multiline_string(text)),
        value => inline_value(value),
    }
}

/// The text as lines of comments.
fn comment(text: &str) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for word in text.split(' ') {
        let length = word.chars().count() + 1;
        if width == 0 || width + length > WIDTH {
            lines.push_str(if width == 0 { "#" } else { "\n#" });
            width = 0;
        }
        lines.push(' ');
        lines.push_str(word);
        width += length;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::{default_model, template};
    use crate::catalog::read::read;

    #[test]
    fn every_key_has_a_value_or_an_example() {
        insta::assert_snapshot!(template("helper", &default_model()));
    }

    #[test]
    fn it_passes_the_check_as_it_is_and_with_every_key_uncommented() {
        let plain = template("helper-1", &default_model());
        let file =
            read("helper-1", Path::new("helper-1.toml"), plain.as_bytes()).expect("an agent");
        assert_eq!(file.agent.name, "helper-1");
        assert_eq!(file.warnings, []);

        let is_key = |line: &str| {
            let key = line.split(" = ").next().unwrap_or_default();
            let is_plain = |c: char| c.is_ascii_lowercase() || matches!(c, '_' | '0'..='9');
            line.contains(" = ") && key.chars().all(is_plain)
        };
        let uncomment = |line: &str| match line.strip_prefix("# ") {
            Some(line) if is_key(line) || line.starts_with('[') => line.to_owned(),
            _ => line.to_owned(),
        };
        let full: Vec<String> = plain.lines().map(uncomment).collect();
        let read = read(
            "helper-1",
            Path::new("helper-1.toml"),
            full.join("\n").as_bytes(),
        );
        let agent = read.expect("an agent").agent;
        assert_eq!(agent.delegation.max_depth, Some(3));
        assert_eq!(agent.delegation.timeout, Some(Duration::from_secs(120)));
        assert_eq!(agent.sub_agents, ["researcher", "critic"]);
        assert_eq!(agent.memory.max_entries, 100);
        assert_eq!(agent.allowed_hosts, ["docs.rs", "*.wikipedia.org"]);
        assert!(agent.webhook.is_some());
    }
}
