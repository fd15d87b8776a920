//! Takes over into a recording what a test sent instead of what is recorded. Comments, `[expect]` and the rest of the file
//! stay as they are.

use std::collections::BTreeMap;

use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, Value as TomlValue};

use crate::domain::ignore::Ignore;
use crate::domain::recording::{Recording, RunRecording, ToolRecording};
use crate::engine::recording::playback::observed::ObservedRun;
use crate::engine::recording::text::{array, toml_value};

/// The file's text with what was observed. Runs and turns that the recording lacks are not added.
///
/// # Errors
/// The text is no TOML.
pub fn accept(
    text: &str,
    recording: &Recording,
    ignore: &Ignore,
    observed: &BTreeMap<String, ObservedRun>,
) -> Result<String, toml_edit::TomlError> {
    let mut document: DocumentMut = text.parse()?;
    let mut added_tools = Vec::new();
    for (index, recorded) in recording.runs.iter().enumerate() {
        let Some(now) = observed.get(&recorded.path) else {
            continue;
        };
        let runs = document["runs"].as_array_of_tables_mut();
        let Some(table) = runs.and_then(|runs| runs.get_mut(index)) else {
            continue;
        };
        let mut run = AcceptedRun {
            table,
            ignore,
            recorded,
        };
        run.set_preamble(now);
        run.set_results(now);
        run.set_followups(now);
        let ids = tool_ids(recording, now, &mut added_tools);
        if ids != recorded.tools {
            set(run.table, "tools", array(&ids));
        }
    }
    if !added_tools.is_empty() {
        let tools = document
            .entry("tools")
            .or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        if let Some(tools) = tools.as_array_of_tables_mut() {
            for tool in added_tools {
                tools.push(tool_table(&tool));
            }
        }
    }
    Ok(document.to_string())
}

struct AcceptedRun<'a> {
    table: &'a mut Table,
    ignore: &'a Ignore,
    recorded: &'a RunRecording,
}

impl AcceptedRun<'_> {
    fn set_preamble(&mut self, now: &ObservedRun) {
        let recorded = self.recorded;
        if recorded.definition != now.definition {
            set(self.table, "definition", now.definition.as_str());
        }
        let texts = [
            ("model", Some(&recorded.model), Some(&now.model)),
            ("effort", recorded.effort.as_ref(), now.effort.as_ref()),
            ("system", Some(&recorded.system), Some(&now.system)),
            ("memory", recorded.memory.as_ref(), now.memory.as_ref()),
            ("message", Some(&recorded.message), Some(&now.message)),
        ];
        for (key, recorded, now) in texts {
            match (recorded, now) {
                (Some(recorded), Some(now)) if self.ignore.is_same(recorded, now) => {}
                (_, Some(now)) => set(self.table, key, now.as_str()),
                (Some(_), None) => drop(self.table.remove(key)),
                (None, None) => {}
            }
        }
        let params = serde_json::Value::Object(now.params.clone());
        let jsons = [
            (
                "params",
                !now.params.is_empty(),
                recorded.params == now.params,
                Some(&params),
            ),
            (
                "response_format",
                now.response_format.is_some(),
                recorded.response_format == now.response_format,
                now.response_format.as_ref(),
            ),
        ];
        for (key, is_set, is_same, json) in jsons {
            match json {
                _ if is_same => {}
                Some(json) if is_set => {
                    let value = toml_value(json);
                    let value = value.unwrap_or_else(|| json.to_string().into());
                    set(self.table, key, value);
                }
                _ => drop(self.table.remove(key)),
            }
        }
    }

    fn set_results(&mut self, now: &ObservedRun) {
        let Some(tables) = array_of_tables(self.table, "results") else {
            return;
        };
        for (table, recorded) in tables.iter_mut().zip(&self.recorded.results) {
            let Some(result) = now.results.get(&(recorded.turn, recorded.position)) else {
                continue;
            };
            if !self.ignore.is_same(&recorded.text, &result.text) {
                set(table, "text", result.text.as_str());
            }
            match (recorded.is_error, result.is_error) {
                (false, true) => set(table, "is_error", true),
                (true, false) => drop(table.remove("is_error")),
                _ => {}
            }
        }
    }

    fn set_followups(&mut self, now: &ObservedRun) {
        let Some(tables) = array_of_tables(self.table, "turns") else {
            return;
        };
        for (table, recorded) in tables.iter_mut().zip(&self.recorded.turns) {
            let followup = now.followups.get(&recorded.turn);
            if let (Some(recorded), Some(now)) = (&recorded.followup, followup)
                && !self.ignore.is_same(recorded, now)
            {
                set(table, "followup", now.as_str());
            }
        }
    }
}

fn array_of_tables<'t>(table: &'t mut Table, key: &str) -> Option<&'t mut ArrayOfTables> {
    table.get_mut(key)?.as_array_of_tables_mut()
}

/// Sets a value and keeps the comments at its key.
fn set(table: &mut Table, key: &str, value: impl Into<TomlValue>) {
    match table.get_mut(key).and_then(Item::as_value_mut) {
        Some(old) => {
            let decor = old.decor().clone();
            *old = value.into();
            *old.decor_mut() = decor;
        }
        None => drop(table.insert(key, Item::Value(value.into()))),
    }
}

/// The ids of the run's tools. Those that the recording has not are added to `added`.
fn tool_ids(
    recording: &Recording,
    now: &ObservedRun,
    added: &mut Vec<ToolRecording>,
) -> Vec<String> {
    let of_servers = recording.mcp.iter().flat_map(|server| &server.tools);
    let recorded: Vec<&ToolRecording> = of_servers.chain(&recording.tools).collect();
    let ids = now.tools.iter().map(|tool| {
        let is_same = |known: &ToolRecording| {
            known.name() == tool.id
                && known.description == tool.description
                && known.parameters == tool.parameters
        };
        let known = recorded.iter().copied().chain(added.iter());
        if let Some(known) = known.into_iter().find(|known| is_same(known)) {
            return known.id.clone();
        }
        let used = |id: &str| {
            recorded.iter().any(|known| known.id == id) || added.iter().any(|it| it.id == id)
        };
        let numbered = (2..).map(|number| format!("{}#{number}", tool.id));
        let mut candidates = std::iter::once(tool.id.clone()).chain(numbered);
        let id = candidates.find(|id| !used(id)).unwrap_or_default();
        added.push(ToolRecording {
            id: id.clone(),
            ..tool.clone()
        });
        id
    });
    ids.collect()
}

fn tool_table(tool: &ToolRecording) -> Table {
    let mut table = Table::new();
    set(&mut table, "id", tool.id.as_str());
    set(&mut table, "description", tool.description.as_str());
    set(&mut table, "parameters", tool.parameters.as_str());
    table
}
