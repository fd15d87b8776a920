//! Writes a recording as TOML that people read and edit: in the order of the run, without what has its default.

use std::fmt::Write;

use serde_json::{Map, Value};
use toml_edit::{InlineTable, Value as TomlValue};

use crate::domain::recording::{
    CallRecording, CompactionRecording, HistoryMessage, OutcomeRecording, Recording,
    ResultRecording, RunRecording, ToolRecording, TurnRecording, UsageRecording, arguments_text,
};

/// The deepest nesting that is written as TOML; its readers refuse more than 80 levels.
const MAX_DEPTH: usize = 32;

/// The recording with `header` as its first comment, which may have several lines.
pub fn to_toml(recording: &Recording, header: &str) -> String {
    let mut file = Writer::default();
    for line in header.lines() {
        file.line(&format!("# {line}"));
    }
    file.key("version", i64::from(recording.version));
    file.key("agent", recording.agent.as_str());
    file.key("input", recording.input.as_str());
    file.line("# Regular expressions of what differs each time, such as times and ids.");
    file.key("ignore", array(&recording.ignore));
    if !recording.request.is_empty() {
        file.header("[request]");
        file.fields(&recording.request);
    }
    file.header("[expect]");
    file.key("completed", recording.expect.completed.unwrap_or_default());
    for run in &recording.runs {
        write_run(&mut file, run);
    }
    for server in &recording.mcp {
        file.header("[[mcp]]");
        file.key("server", server.server.as_str());
        for tool in &server.tools {
            write_tool(&mut file, "[[mcp.tools]]", tool);
        }
    }
    for tool in &recording.tools {
        write_tool(&mut file, "[[tools]]", tool);
    }
    file.text
}

fn write_run(file: &mut Writer, run: &RunRecording) {
    file.header("[[runs]]");
    file.key("path", run.path.as_str());
    file.key("agent", run.agent.as_str());
    file.key("definition", run.definition.as_str());
    file.key("model", run.model.as_str());
    if let Some(effort) = &run.effort {
        file.key("effort", effort.as_str());
    }
    if !run.params.is_empty() {
        file.json("params", &Value::Object(run.params.clone()));
    }
    if let Some(format) = &run.response_format {
        file.json("response_format", format);
    }
    if !run.tools.is_empty() {
        file.key("tools", array(&run.tools));
    }
    if !run.system.is_empty() {
        file.key("system", run.system.as_str());
    }
    if let Some(memory) = &run.memory {
        file.key("memory", memory.as_str());
    }
    file.key("message", run.message.as_str());
    if let Some(error) = &run.error {
        let mut table = InlineTable::new();
        table.insert("category", error.category.as_str().into());
        table.insert("message", error.message.as_str().into());
        if !error.added.is_empty() {
            table.insert("added", array(&error.added).into());
        }
        file.key("error", table);
    }
    if let Some(reason) = &run.cancelled {
        file.key("cancelled", reason.as_str());
    }
    if let Some(compaction) = &run.compaction {
        file.key("compaction", compaction_table(compaction));
    }
    for message in &run.history {
        write_history(file, message);
    }
    for turn in &run.turns {
        write_turn(file, turn);
        let results = run.results.iter();
        for result in results.filter(|result| result.turn == turn.turn) {
            write_result(file, result);
        }
    }
}

fn write_history(file: &mut Writer, message: &HistoryMessage) {
    file.header("[[runs.history]]");
    file.key("role", message.role.as_str());
    if !message.content.is_empty() {
        file.key("content", message.content.as_str());
    }
    for call in &message.calls {
        write_call(file, "[[runs.history.calls]]", call);
    }
    for result in &message.results {
        file.header("[[runs.history.results]]");
        file.key("call", result.call.as_str());
        file.key("text", result.text.as_str());
        if result.is_error {
            file.key("is_error", true);
        }
    }
}

fn write_turn(file: &mut Writer, turn: &TurnRecording) {
    file.header("[[runs.turns]]");
    file.key("turn", i64::from(turn.turn));
    if !turn.added.is_empty() {
        file.key("added", array(&turn.added));
    }
    if !turn.reply.is_empty() {
        file.key("reply", turn.reply.as_str());
    }
    if let Some(model) = &turn.model {
        file.key("model", model.as_str());
    }
    if let Some(stop_reason) = &turn.stop_reason {
        file.key("stop_reason", stop_reason.as_str());
    }
    if let Some(usage) = turn.usage {
        file.key("usage", usage_table(usage));
    }
    if turn.outcome != OutcomeRecording::Complete {
        file.key("outcome", turn.outcome.as_str());
    }
    if let Some(followup) = &turn.followup {
        file.key("followup", followup.as_str());
    }
    if let Some(compaction) = &turn.compaction {
        file.key("compaction", compaction_table(compaction));
    }
    for call in &turn.calls {
        write_call(file, "[[runs.turns.calls]]", call);
    }
}

fn write_call(file: &mut Writer, header: &str, call: &CallRecording) {
    file.header(header);
    file.key("id", call.id.as_str());
    file.key("tool", call.tool.as_str());
    match &call.arguments {
        Value::Object(fields) if fields.is_empty() => {}
        arguments => write_arguments(file, arguments),
    }
}

fn write_arguments(file: &mut Writer, arguments: &Value) {
    let table = toml_value(arguments).filter(|_| arguments.is_object());
    match table {
        Some(table) => file.key("arguments", table),
        None => file.key("arguments", arguments_text(arguments)),
    }
}

fn write_result(file: &mut Writer, result: &ResultRecording) {
    file.header("[[runs.results]]");
    file.key("turn", i64::from(result.turn));
    file.key("position", integer(result.position as u64));
    file.key("tool", result.tool.as_str());
    if let Some(decision) = result.decision {
        file.key("decision", decision.as_str());
    }
    if let Some(arguments) = &result.arguments {
        write_arguments(file, arguments);
    }
    if result.reused {
        file.key("reused", true);
    }
    if result.is_error {
        file.key("is_error", true);
    }
    file.key("text", result.text.as_str());
}

fn write_tool(file: &mut Writer, header: &str, tool: &ToolRecording) {
    file.header(header);
    file.key("id", tool.id.as_str());
    file.key("description", tool.description.as_str());
    file.key("parameters", tool.parameters.as_str());
}

fn usage_table(usage: UsageRecording) -> InlineTable {
    let mut table = InlineTable::new();
    for (key, tokens) in [
        ("input", usage.input),
        ("output", usage.output),
        ("cache_read", usage.cache_read),
        ("cache_write", usage.cache_write),
        ("reasoning", usage.reasoning),
    ] {
        if tokens > 0 || matches!(key, "input" | "output") {
            table.insert(key, integer(tokens).into());
        }
    }
    table
}

fn compaction_table(compaction: &CompactionRecording) -> InlineTable {
    let mut table = InlineTable::new();
    table.insert("before", integer(compaction.before as u64).into());
    if let Some(task) = compaction.task {
        table.insert("task", integer(task as u64).into());
    }
    let results_before = integer(compaction.results_before as u64);
    table.insert("results_before", results_before.into());
    table.insert("summary", compaction.summary.as_str().into());
    table
}

fn integer(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

pub fn array(texts: &[String]) -> toml_edit::Array {
    texts.iter().map(String::as_str).collect()
}

/// The value in TOML; `None` if TOML has no such value.
pub fn toml_value(json: &Value) -> Option<TomlValue> {
    nested_value(json, 0)
}

fn nested_value(json: &Value, depth: usize) -> Option<TomlValue> {
    if depth > MAX_DEPTH {
        return None;
    }
    Some(match json {
        Value::Null => return None,
        Value::Bool(value) => TomlValue::from(*value),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => TomlValue::from(integer),
            None if number.is_f64() => TomlValue::from(number.as_f64()?),
            None => return None,
        },
        Value::String(text) => TomlValue::from(text.as_str()),
        Value::Array(values) => {
            let values = values.iter().map(|value| nested_value(value, depth + 1));
            let values: Option<toml_edit::Array> = values.collect();
            TomlValue::from(values?)
        }
        Value::Object(fields) => {
            let mut table = InlineTable::new();
            for (key, value) in fields {
                table.insert(key, nested_value(value, depth + 1)?);
            }
            TomlValue::from(table)
        }
    })
}

#[derive(Default)]
struct Writer {
    text: String,
}

impl Writer {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// The header of a table, after a blank line.
    fn header(&mut self, header: &str) {
        self.line("");
        self.line(header);
    }

    fn key(&mut self, key: &str, value: impl Into<TomlValue>) {
        let key = toml_edit::Key::new(key);
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{key} = {}", value.into());
    }

    /// JSON as a table, or as a text if it has what TOML has not.
    fn json(&mut self, key: &str, json: &Value) {
        match toml_value(json) {
            Some(value) => self.key(key, value),
            None => self.key(key, json.to_string()),
        }
    }

    fn fields(&mut self, fields: &Map<String, Value>) {
        for (key, value) in fields {
            self.json(key, value);
        }
    }
}
