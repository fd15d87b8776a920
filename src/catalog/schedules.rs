//! Reads and checks `[[schedules]]` of an agent file, and reads the keys that they share with `[[triggers]]`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::tz::{self, TimeZone};
use serde_json::{Map, Value as Json};

use crate::domain::agent::{Agent, is_agent_name};
use crate::domain::calendar::time_zone;
use crate::domain::cron::Cron;
use crate::domain::json_schema::compiled::Mismatch;
use crate::domain::schedule::{
    EvalBaseline, MAX_SCHEDULES, Missed, Overlap, Schedule, ScheduleInput, ScheduledEval,
};
use crate::settings::document::{Problem, ProblemKind, Value};
use crate::settings::positions::Positions;
use crate::settings::suggestion;
use crate::settings::table_reader::TableReader;
use crate::validation;

/// As in requests for runs.
const MAX_LABELS: usize = 64;
const MAX_LABEL_KEY: usize = 64;
const MAX_LABEL_VALUE: usize = 256;

/// Returns the schedules in the file's order; invalid ones are reported as problems.
pub fn read(top: &mut TableReader<'_>, key: &'static str) -> Vec<Schedule> {
    let node = top.peek(key);
    let schedules = top.table_list(key, parse_schedule);
    let schedules: Vec<Schedule> = schedules.into_iter().flatten().collect();
    let names = schedules.iter().map(|schedule| schedule.name.as_str());
    if let (Err(why), Some(node)) = (check_list(names, MAX_SCHEDULES), node) {
        top.push_invalid(&node, key, &why);
    }
    schedules
}

/// Checks that there are not too many, and that each has its own name.
pub fn check_list<'n>(names: impl Iterator<Item = &'n str>, max: usize) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for name in names {
        // Names that differ only in case would be confused.
        if !seen.insert(name.to_ascii_lowercase()) {
            return Err(format!(
                "has two entries named \"{name}\"; name one otherwise"
            ));
        }
    }
    match seen.len() > max {
        true => Err(format!("cannot have more than {max} entries")),
        false => Ok(()),
    }
}

fn parse_schedule(s: &mut TableReader<'_>) -> Option<Schedule> {
    let name = read_name(s);
    let has_cron = s.peek("cron").is_some();
    let cron = s.parsed_text("cron", Cron::parse);
    if !has_cron {
        s.push_missing("cron", "is required, such as \"30 9 * * mon-fri\"");
    }
    let zone = match s.peek("timezone").is_some() {
        true => s.parsed_text("timezone", parse_zone),
        false => Some(("UTC".to_owned(), TimeZone::UTC)),
    };
    let input = read_input(s, "input");
    let eval = read_eval(s, input.is_some());
    let overlaps = [
        ("skip", Overlap::Skip),
        ("queue", Overlap::Queue),
        ("allow", Overlap::Allow),
    ];
    let overlap = s.one_of("overlap", &overlaps).unwrap_or_default();
    let missed = [("skip", Missed::Skip), ("once", Missed::Once)];
    let missed = s.one_of("missed", &missed).unwrap_or_default();
    let labels = read_labels(s);
    let key = read_text(s, "key");
    let (timezone, zone) = zone?;
    Some(Schedule {
        name: name?,
        cron: cron?,
        timezone,
        zone,
        input,
        eval,
        overlap,
        missed,
        labels,
        key,
    })
}

fn read_eval(schedule: &mut TableReader<'_>, has_input: bool) -> Option<ScheduledEval> {
    let node = schedule.peek("eval");
    let of_runs = [
        ("input", has_input),
        ("labels", schedule.peek("labels").is_some()),
    ];
    for (key, is_set) in of_runs {
        if let (true, Some(node)) = (is_set, &node) {
            let why = format!("cannot stand beside {key}, which is for runs");
            schedule.push_invalid(node, "eval", &why);
        }
    }
    schedule.nested("eval", |eval| {
        let has_dataset = eval.peek("dataset").is_some();
        let dataset = eval.parsed_text("dataset", |name| match is_agent_name(name) {
            true => Ok(name.to_owned()),
            false => Err("must be the name of a dataset".to_owned()),
        });
        if node.is_some() && !has_dataset {
            eval.push_missing("dataset", "is required: the name of a dataset");
        }
        let against = eval.one_of("against", &[("last", EvalBaseline::Last)]);
        Some(ScheduledEval {
            dataset: dataset?,
            against,
        })
    })
}

/// A text, or an object; a blank text means unset.
fn read_input(schedule: &mut TableReader<'_>, key: &'static str) -> Option<ScheduleInput> {
    let node = schedule.take_node(key)?;
    match (&node.value, node.to_json()) {
        (Value::String(text), _) if text.trim().is_empty() => None,
        (Value::String(text), _) => Some(ScheduleInput::Text(text.clone())),
        (Value::Table(_), Json::Object(object)) => Some(ScheduleInput::Object(object)),
        (other, _) => {
            let why = format!("must be a string or a table, not {}", other.type_name());
            schedule.push_invalid(&node, key, &why);
            None
        }
    }
}

/// Checks the inputs of an agent's schedules as requests are checked, so that none is refused only at its time.
pub fn check_inputs(agent: &Agent, positions: &Positions) -> Vec<Problem> {
    if agent.input_schema.is_none() && positions.get("input_schema").is_some() {
        // The schema has an error of its own.
        return Vec::new();
    }
    let schedules = agent.schedules.iter().enumerate();
    let schedules = schedules.filter(|(_, schedule)| schedule.eval.is_none());
    let problems = schedules.filter_map(|(index, schedule)| {
        let why = check_input(agent, schedule.input.as_ref()).err()?;
        let path = format!("schedules[{index}].input");
        Some(positions.problem(&path, format!("{path} {why}"), ProblemKind::RuleViolation))
    });
    problems.collect()
}

fn check_input(agent: &Agent, input: Option<&ScheduleInput>) -> Result<(), String> {
    let Some(schema) = &agent.input_schema else {
        return match input {
            Some(ScheduleInput::Object(_)) => {
                Err("is a table, but the agent takes a text: it has no [input_schema]".to_owned())
            }
            _ => Ok(()),
        };
    };
    let object = match input {
        None => Map::new(),
        Some(ScheduleInput::Object(object)) => object.clone(),
        Some(ScheduleInput::Text(text)) => serde_json::from_str(text).map_err(|_| {
            "must be a table, or the JSON of an object: the agent has an [input_schema]".to_owned()
        })?,
    };
    let checked = validation::check_value_blocking(Arc::clone(schema), &Json::Object(object));
    checked.map_err(|mismatches| {
        let reasons: Vec<String> = mismatches.iter().map(Mismatch::to_string).collect();
        format!("does not fit [input_schema]: {}", reasons.join("; "))
    })
}

pub fn read_name(table: &mut TableReader<'_>) -> Option<String> {
    let has_name = table.peek("name").is_some();
    let name = table.parsed_text("name", |text| match is_agent_name(text) {
        true => Ok(text.to_owned()),
        false => Err(
            "must be 1 to 64 letters, digits, dots, - and _, and begin with a letter or digit"
                .to_owned(),
        ),
    });
    if !has_name {
        table.push_missing("name", "is required");
    }
    name
}

/// A text; a blank one means unset.
pub fn read_text(table: &mut TableReader<'_>, key: &'static str) -> Option<String> {
    table.text(key).filter(|text| !text.trim().is_empty())
}

fn parse_zone(text: &str) -> Result<(String, TimeZone), String> {
    if let Some(zone) = time_zone(text) {
        let name = zone.iana_name().unwrap_or(text).to_owned();
        return Ok((name, zone));
    }
    let known: Vec<String> = tz::db().available().map(|name| name.to_string()).collect();
    let hint = suggestion::did_you_mean(text, known.iter().map(String::as_str));
    let hint = hint.unwrap_or_else(|| "use an IANA name, such as \"Europe/Berlin\"".to_owned());
    Err(format!("is no known time zone: \"{text}\"; {hint}"))
}

pub fn read_labels(table: &mut TableReader<'_>) -> BTreeMap<String, String> {
    let node = table.peek("labels");
    let labels = table.texts_by_name("labels", |name, value| {
        if !(1..=MAX_LABEL_KEY).contains(&name.chars().count()) {
            return Err(format!(
                "has no 1 to {MAX_LABEL_KEY} characters in its name"
            ));
        }
        if value.chars().count() > MAX_LABEL_VALUE {
            return Err(format!("has more than {MAX_LABEL_VALUE} characters"));
        }
        Ok(value.to_owned())
    });
    if let (true, Some(node)) = (labels.len() > MAX_LABELS, node) {
        let why = format!("cannot have more than {MAX_LABELS} labels");
        table.push_invalid(&node, "labels", &why);
    }
    labels
}
