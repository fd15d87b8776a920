//! Reads `[[scorers]]` of an agent file.

use serde_json::{Map, Value};

use crate::catalog::schedules::{check_list, read_name};
use crate::domain::agent::is_agent_name;
use crate::domain::expect::Expect;
use crate::domain::scorer::{MAX_SCORERS, Scorer, ScorerKind};
use crate::settings::kinds::check_variable_name;
use crate::settings::table_reader::TableReader;
use crate::ssrf;

#[derive(Clone, Copy)]
enum Kind {
    Judge,
    Assert,
    Http,
}

/// Returns the scorers in the file's order; invalid ones are reported as problems.
pub fn read(top: &mut TableReader<'_>, key: &'static str) -> Vec<Scorer> {
    let node = top.peek(key);
    let scorers = top.table_list(key, parse_scorer);
    let scorers: Vec<Scorer> = scorers.into_iter().flatten().collect();
    let names = scorers.iter().map(|scorer| scorer.name.as_str());
    if let (Err(why), Some(node)) = (check_list(names, MAX_SCORERS), node) {
        top.push_invalid(&node, key, &why);
    }
    scorers
}

fn parse_scorer(t: &mut TableReader<'_>) -> Option<Scorer> {
    let name = read_name(t);
    let has_kind = t.peek("kind").is_some();
    let kinds = [
        ("judge", Kind::Judge),
        ("assert", Kind::Assert),
        ("http", Kind::Http),
    ];
    let kind = t.one_of("kind", &kinds);
    if !has_kind {
        t.push_missing("kind", "is required: judge, assert or http");
    }
    let needed = match kind {
        Some(Kind::Judge) => ("agent", "is required: the agent that judges"),
        Some(Kind::Assert) => ("expect", "is required, such as { contains = \"total\" }"),
        Some(Kind::Http) => ("url", "is required: the service that scores"),
        None => ("kind", ""),
    };
    if t.peek(needed.0).is_none() && kind.is_some() {
        t.push_missing(needed.0, needed.1);
    }
    let agent = t.parsed_text("agent", check_agent);
    let expect = t.json_table("expect", check_expect);
    let url = t.parsed_text("url", |text| match ssrf::parse_url(text) {
        Ok(url) => Ok(String::from(url)),
        Err(error) => Err(error.to_string()),
    });
    let secret_env = t.parsed_text("secret_env", check_variable_name);
    let sample = t.number("sample", 0.0..=1.0).unwrap_or(1.0);
    let per_day_usd = t.number("per_day_usd", 0.0..=f64::MAX);
    let kind = match kind? {
        Kind::Judge => ScorerKind::Judge { agent: agent? },
        Kind::Assert => ScorerKind::Assert { expect: expect? },
        Kind::Http => ScorerKind::Http {
            url: url?,
            secret_env,
        },
    };
    Some(Scorer {
        name: name?,
        kind,
        sample,
        per_day_usd,
    })
}

fn check_agent(text: &str) -> Result<String, String> {
    match is_agent_name(text) {
        true => Ok(text.to_owned()),
        false => Err("is no name of an agent".to_owned()),
    }
}

fn check_expect(table: &Map<String, Value>) -> Result<(), String> {
    let expect: Expect =
        serde_json::from_value(Value::Object(table.clone())).map_err(|error| error.to_string())?;
    match expect.judge.is_empty() {
        true => Ok(()),
        false => Err("has judge; make it a scorer of its own, with kind = \"judge\"".to_owned()),
    }
}
