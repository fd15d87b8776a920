//! Reads the settings of an agent from the tables of its file. Collects all problems with their positions.

use std::path::PathBuf;
use std::time::Duration;

use crate::catalog::documents::AgentDocuments;
use crate::catalog::schemas::{read_object_schema, read_schema};
use crate::catalog::{http_tools, mcp_servers, schedules, triggers};
use crate::config::document::{Node, Origin, Value};
use crate::config::environment::{check_variable_name, expand_home, home_dir};
use crate::config::table_reader::TableReader;
use crate::domain::agent::model_ref::{ModelRef, ModelRefError};
use crate::domain::agent::params::check_extra;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::settings::{ListRule, MAX_COUNT, Presence, Section, Setting, Visitor};
use crate::domain::event::STORED_EVENT_NAMES;
use crate::domain::node::check_labels;
use crate::domain::text_template::TextTemplate;
use crate::domain::usage::Cost;
use crate::ssrf;

/// Fills the settings that it visits from a table. A setting keeps its default if its key is absent or its value is wrong.
pub struct FileReader<'r, 't> {
    pub table: &'r mut TableReader<'t>,
    pub models: &'r mut ModelProblems,
    pub documents: &'r AgentDocuments<'r>,
}

/// Invalid models of a file. Their errors are reported before other rule violations.
#[derive(Debug, Default)]
pub struct ModelProblems {
    /// The first required key that is missing.
    pub missing: Option<&'static str>,
    pub invalid: Vec<(Origin, ModelRefError)>,
}

impl Visitor for FileReader<'_, '_> {
    fn setting(&mut self, key: &'static str, setting: Setting<'_>) {
        let table = &mut *self.table;
        match setting {
            Setting::Text(text) => set(text, table.text(key)),
            Setting::OptionalText(text) => *text = non_blank(table.text(key)),
            Setting::Path(path) => *path = read_path(table, key),
            Setting::Flag(flag) => set(flag, table.flag(key)),
            Setting::Texts(rule, texts) => *texts = read_texts(table, key, rule),
            Setting::Model(model) => {
                let node = table.peek(key);
                match non_blank(table.text(key)) {
                    Some(text) => set(model, self.models.parse(&text, node.as_ref())),
                    None => self.models.missing = self.models.missing.or(Some(key)),
                }
            }
            Setting::OptionalModel(model) => {
                let node = table.peek(key);
                let text = non_blank(table.text(key));
                *model = text.and_then(|text| self.models.parse(&text, node.as_ref()));
            }
            Setting::Models(models) => *models = self.models.parse_list(table, key),
            Setting::Choice(choice) => {
                table.parsed_text(key, |text| choice.set(text));
            }
            Setting::Whole(range, number) => {
                if let Some(read) = table.integer(key, range) {
                    number.set(read);
                }
            }
            Setting::Number(range, number) => set(number, table.number(key, range)),
            Setting::OptionalNumber(range, number) => *number = table.number(key, range),
            Setting::Usd(max, cost) => {
                let usd = table.number(key, 0.0..=max).filter(|usd| *usd > 0.0);
                *cost = usd.map(Cost::from_usd);
            }
            Setting::Seconds(time) => {
                *time = table.seconds(key, 0).filter(|time| !time.is_zero());
            }
            Setting::Milliseconds(time) => {
                let read = table.integer(key, 0..=MAX_COUNT);
                set(time, read.map(Duration::from_millis));
            }
            Setting::VariableName(name) => *name = table.parsed_text(key, check_variable_name),
            Setting::Url(url) => {
                let parse = |text: &str| {
                    let url = ssrf::parse_url(text).map_err(|error| error.to_string())?;
                    Ok(String::from(url))
                };
                set(url, table.parsed_text(key, parse));
            }
            Setting::ResponseFormat(format) => *format = table.nested(key, read_response_format),
            Setting::Schema(schema) => {
                if let Some(node) = table.take_node(key) {
                    let read = read_object_schema(&node);
                    *schema = read
                        .map_err(|why| table.push_invalid(&node, key, &why))
                        .ok();
                }
            }
            Setting::Template(template) => {
                *template = table.parsed_text(key, TextTemplate::parse);
            }
            Setting::Extra(extra) => set(extra, table.json_table(key, check_extra)),
            Setting::HttpTools(tools) => *tools = http_tools::read(table, key, self.documents),
            Setting::McpServers(servers) => *servers = mcp_servers::read(table, key),
            Setting::Schedules(read) => *read = schedules::read(table, key),
            Setting::Triggers(read) => *read = triggers::read(table, key),
        }
    }

    fn section<S: Section>(&mut self, key: &'static str, section: &mut S) {
        let models = &mut *self.models;
        let documents = self.documents;
        self.table.nested(key, |table| {
            section.visit(&mut FileReader {
                table,
                models,
                documents,
            });
        });
    }

    fn optional_section<S: Section>(
        &mut self,
        key: &'static str,
        presence: Presence,
        section: &mut Option<S>,
    ) {
        let models = &mut *self.models;
        let documents = self.documents;
        *section = self.table.nested(key, |table| {
            let is_empty = table.is_empty();
            let is_present = match presence {
                Presence::Enabled => table.flag("enabled").unwrap_or(false),
                Presence::Key(key) => table.peek(key).is_some(),
            };
            if let (Presence::Key(key), false, false) = (presence, is_present, is_empty) {
                table.push_missing(key, "is required");
            }
            let mut read = S::default();
            let mut ignored = ModelProblems::default();
            // A disabled section may name models that do not exist yet.
            let models = if is_present { models } else { &mut ignored };
            read.visit(&mut FileReader {
                table,
                models,
                documents,
            });
            is_present.then_some(read)
        });
    }

    fn top_level_key(&mut self, key: &'static str) {
        self.table
            .misplaced(key, "at the top of the file, above its first [table]");
    }
}

impl ModelProblems {
    fn parse(&mut self, text: &str, node: Option<&Node>) -> Option<ModelRef> {
        let origin = node.map_or(Origin::Whole, |node| node.origin.clone());
        let parsed = text.parse();
        parsed
            .map_err(|error| self.invalid.push((origin, error)))
            .ok()
    }

    fn parse_list(&mut self, table: &mut TableReader<'_>, key: &'static str) -> Vec<ModelRef> {
        let list = table.peek(key);
        let texts = table.text_list(key).unwrap_or_default();
        let nodes = match list.map(|node| node.value) {
            Some(Value::Array(nodes)) => nodes,
            _ => Vec::new(),
        };
        let models = texts.iter().enumerate();
        let models = models.filter_map(|(index, text)| self.parse(text, nodes.get(index)));
        models.collect()
    }
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

pub fn non_blank(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.trim().is_empty())
}

/// A path; `~` is the home directory of the daemon's user.
fn read_path(table: &mut TableReader<'_>, key: &'static str) -> Option<PathBuf> {
    non_blank(table.text(key)).map(|text| expand_home(&text, home_dir().as_deref()))
}

fn read_texts(table: &mut TableReader<'_>, key: &'static str, rule: ListRule) -> Vec<String> {
    let node = table.peek(key);
    let texts = table.text_list(key).unwrap_or_default();
    let checked = match rule {
        ListRule::Any => return texts,
        ListRule::Unique => Ok(texts),
        ListRule::Hosts => texts
            .iter()
            .map(|text| ssrf::parse_host_pattern(text).map_err(|error| error.to_string()))
            .collect(),
        ListRule::ExtraKeys => check_extra_keys(&texts).map(|()| texts),
        ListRule::Events => check_events(&texts).map(|()| texts),
        ListRule::NodeLabels => check_labels(&texts).map(|()| texts),
    };
    if let (Err(why), Some(node)) = (&checked, &node) {
        table.push_invalid(node, key, why);
    }
    dedup(checked.unwrap_or_default())
}

fn check_extra_keys(keys: &[String]) -> Result<(), String> {
    let keys = keys.iter();
    let extra = keys.map(|key| (key.clone(), serde_json::Value::Null));
    check_extra(&extra.collect())
}

fn check_events(names: &[String]) -> Result<(), String> {
    let is_unknown = |name: &&String| !STORED_EVENT_NAMES.contains(&name.as_str());
    match names.iter().find(is_unknown) {
        Some(unknown) => {
            let known = STORED_EVENT_NAMES.join(", ");
            Err(format!("has {unknown:?}, which is none of: {known}"))
        }
        None => Ok(()),
    }
}

/// Removes duplicates; keeps the order of the first occurrences.
fn dedup(texts: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    let is_new = |text: &String| seen.insert(text.clone());
    texts.into_iter().filter(is_new).collect()
}

fn read_response_format(table: &mut TableReader<'_>) -> ResponseFormat {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Text,
        JsonObject,
        JsonSchema,
    }
    let kinds = [
        ("text", Kind::Text),
        ("json_object", Kind::JsonObject),
        ("json_schema", Kind::JsonSchema),
    ];
    let kind = table.one_of("type", &kinds).unwrap_or(Kind::Text);
    let Some(node) = table.take_node("schema") else {
        if kind == Kind::JsonSchema {
            table.push_missing("schema", "is required when type is json_schema");
        }
        return match kind {
            Kind::JsonObject => ResponseFormat::JsonObject,
            _ => ResponseFormat::Text,
        };
    };
    if kind != Kind::JsonSchema {
        table.push_invalid(&node, "schema", "is only for type = \"json_schema\"");
    }
    match read_schema(&node) {
        Ok(schema) => ResponseFormat::JsonSchema(schema),
        Err(why) => {
            table.push_invalid(&node, "schema", &why);
            ResponseFormat::Text
        }
    }
}
