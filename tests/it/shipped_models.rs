//! The models that shipped files name: the table has each, and none had ended when the table was made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, iter};

use axed::config::models::names::canonical;
use axed::config::models::table::SHIPPED;
use jiff::civil::Date;
use regex::Regex;

/// What users see of the repository.
const SHIPPED_FILES: [&str; 12] = [
    "README.md",
    "CONTRIBUTING.md",
    "docker-compose.yml",
    "docs",
    "agents",
    "config",
    "deploy",
    "clients",
    "src/catalog/template.rs",
    "src/cli",
    "src/web/openapi",
    "tests/guide",
];
/// Bare names of models by which users would look for them.
const BARE_NAMES: &str = r"\b(?:claude-(?:[a-z]+-\d|\d)|gpt-\d|gemini-\d|grok-\d)[\w.-]*";

fn files(path: &Path) -> Vec<PathBuf> {
    match fs::read_dir(path) {
        Ok(entries) => {
            let is_own = |path: &PathBuf| !path.ends_with("node_modules");
            let paths = entries.flatten().map(|entry| entry.path());
            let paths = paths.filter(is_own);
            paths.flat_map(|path| files(&path)).collect()
        }
        Err(_) => vec![path.to_owned()],
    }
}

/// The last days of the known models by name, each with its service.
fn known_models() -> BTreeMap<(String, String), Option<Date>> {
    let rows = SHIPPED.rows.iter().flat_map(|(service, models)| {
        let service = service.clone();
        let models = models.iter();
        models.map(move |(model, row)| ((service.clone(), model.clone()), row.retires))
    });
    rows.collect()
}

/// What is wrong with the models that a text names.
struct ModelNames {
    known: BTreeMap<(String, String), Option<Date>>,
    /// A service of the table and a model.
    qualified: Regex,
    bare: Regex,
    /// A line that sets a model, or lists models in a table: whatever has the form of a model is one.
    setting: Regex,
}

impl ModelNames {
    fn new() -> Self {
        let services: Vec<&str> = SHIPPED.rows.keys().map(String::as_str).collect();
        let qualified = format!(
            r"\b({})/([A-Za-z0-9][\w./-]*[A-Za-z0-9])",
            services.join("|")
        );
        let pattern = |pattern: &str| Regex::new(pattern).expect("a pattern");
        Self {
            known: known_models(),
            qualified: pattern(&qualified),
            bare: pattern(BARE_NAMES),
            setting: pattern(r#"\bmodel"?\s*[:=]|\bfallback_models\b|--model\b|^\|.*`"#),
        }
    }

    fn last_days(&self, service: Option<&str>, name: &str) -> Vec<Option<Date>> {
        // A service may have its own form of a maker's name.
        let is_same = |model: &str| model == name || model == canonical(name);
        let matches = self.known.iter().filter(|((of, model), _)| {
            is_same(model) && service.is_none_or(|service| service == of)
        });
        matches.map(|(_, last_day)| *last_day).collect()
    }

    /// The number of names in the line, and what is wrong with them.
    fn check(&self, line: &str) -> (usize, Vec<String>) {
        let is_setting = self.setting.is_match(line);
        let with_service = self.qualified.captures_iter(line).filter_map(|found| {
            let (service, name) = (found.get(1)?.as_str(), found.get(2)?.as_str());
            // Links and paths also have a service and a slash.
            let is_model = is_setting
                || self.bare.is_match(name)
                || !self.last_days(Some(service), name).is_empty();
            is_model.then_some((Some(service), name))
        });
        let without = self.bare.find_iter(line);
        let without = without.map(|found| (None, found.as_str().trim_end_matches(['.', '-'])));
        let names: Vec<(Option<&str>, &str)> = with_service.chain(without).collect();
        let as_of = SHIPPED.as_of.expect("a day of the table");
        let has_ended = |last_day: &Option<Date>| last_day.is_some_and(|day| day < as_of);
        let faults = names.iter().filter_map(|(service, name)| {
            match self.last_days(*service, name).as_slice() {
                [] => Some(format!("{name} is not in src/config/models.toml")),
                days if days.iter().all(has_ended) => Some(format!("{name} has ended: {days:?}")),
                _ => None,
            }
        });
        (names.len(), faults.collect())
    }
}

#[test]
fn shipped_files_name_models_that_the_table_has_and_that_go_on() {
    let names = ModelNames::new();
    assert!(names.known.len() > 100, "{}", names.known.len());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let paths = SHIPPED_FILES
        .iter()
        .flat_map(|path| files(&root.join(path)));
    let mut faults = Vec::new();
    let mut checked = 0;
    for path in paths {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        for (line, number) in text.lines().zip(1..) {
            let (count, found) = names.check(line);
            checked += count;
            let place = |fault| format!("{}:{number}: {fault}", path.display());
            faults.extend(found.into_iter().map(place));
        }
    }
    assert!(checked > 50, "{checked}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unknown_and_ended_models_are_found_in_a_file() {
    let names = ModelNames::new();
    for line in [
        "model = \"anthropic/never-made\"",
        "# fallback_models = [\"openai/o99\"]",
        "\"model\": \"openai/gpt-99\"",
        "axed run solo --model gemini/unknown",
        "for example claude-sonnet-99 or others",
        "model = \"anthropic/claude-opus-4-1\"",
        "uses claude-3-haiku.",
    ] {
        assert_eq!(names.check(line).1.len().min(1), 1, "{line}");
    }
    for line in [
        "model = \"anthropic/claude-sonnet-5-5\"",
        "bedrock/us.anthropic.claude-opus-5-5-v1:0 and openrouter/anthropic/claude-opus-5.5",
        "see deploy/anthropic/readme.md",
        "model = \"vllm/own\"",
    ] {
        assert!(names.check(line).1.is_empty(), "{:?}", names.check(line));
    }
}

#[test]
fn the_default_models_are_known_and_go_on() {
    let known = known_models();
    assert!(!SHIPPED.defaults.is_empty());
    for name in &SHIPPED.defaults {
        let (service, model) = name.split_once('/').expect("provider/model");
        let last_day = known.get(&(service.to_owned(), model.to_owned()));
        let last_day = last_day.unwrap_or_else(|| panic!("{name} is not in the table"));
        let is_current = last_day.is_none_or(|day| Some(day) > SHIPPED.as_of);
        assert!(is_current, "{name} ends on {last_day:?}");
    }
}

#[test]
fn every_successor_is_in_the_table_and_does_not_end_before() {
    let known = known_models();
    for (service, models) in &SHIPPED.rows {
        for (model, row) in models {
            let Some(successor) = &row.successor else {
                continue;
            };
            let seen = iter::successors(Some(successor), |name| {
                SHIPPED.rows[service].get(*name)?.successor.as_ref()
            });
            assert!(seen.take(20).count() < 20, "{model} is its own successor");
            let last_day = known.get(&(service.clone(), successor.clone()));
            let last_day = last_day.unwrap_or_else(|| panic!("{model}: no {successor}"));
            let is_later = last_day.is_none_or(|day| Some(day) > row.retires);
            assert!(is_later, "{model}: {successor} ends on {last_day:?}");
        }
    }
}
