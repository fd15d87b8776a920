//! The models that shipped files name: the table has each, and none had ended when the table was made.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, iter};

use axed::config::models::names::canonical;
use axed::config::models::table::SHIPPED;
use jiff::civil::Date;
use regex::Regex;

/// What users see of the repository.
const SHIPPED_FILES: [&str; 10] = [
    "README.md",
    "docker-compose.yml",
    "docs",
    "agents",
    "config",
    "deploy",
    "clients",
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

#[test]
fn shipped_files_name_models_that_the_table_has_and_that_go_on() {
    let as_of = SHIPPED.as_of.expect("a day of the table");
    let known = known_models();
    assert!(known.len() > 100, "{}", known.len());
    let services: Vec<&str> = SHIPPED.rows.keys().map(String::as_str).collect();
    let qualified = format!(
        r"\b({})/([A-Za-z0-9][\w./-]*[A-Za-z0-9])",
        services.join("|")
    );
    let (qualified, bare) = (
        Regex::new(&qualified).expect("a pattern"),
        Regex::new(BARE_NAMES).expect("a pattern"),
    );
    let last_days = |service: Option<&str>, name: &str| -> Vec<Option<Date>> {
        // A service may have its own form of a maker's name.
        let is_same = |model: &str| model == name || model == canonical(name);
        let matches = known.iter().filter(|((of, model), _)| {
            is_same(model) && service.is_none_or(|service| service == of)
        });
        matches.map(|(_, last_day)| *last_day).collect()
    };
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
            let with_service = qualified.captures_iter(line).map(|found| {
                let service = services.iter().find(|it| **it == &found[1]).copied();
                (service, found[2].to_owned())
            });
            let without = bare
                .find_iter(line)
                .map(|found| (None, found.as_str().trim_end_matches(['.', '-']).to_owned()));
            // Links and paths also have a service and a slash.
            let is_model = |(service, name): &(Option<&str>, String)| {
                service.is_none() || !last_days(*service, name).is_empty() || bare.is_match(name)
            };
            for (service, name) in with_service.filter(is_model).chain(without) {
                checked += 1;
                let days = last_days(service, &name);
                let fault = match days.as_slice() {
                    [] => "is not in src/config/models.toml".to_owned(),
                    days if days.iter().all(|day| day.is_some_and(|day| day < as_of)) => {
                        format!("has ended: {days:?}")
                    }
                    _ => continue,
                };
                faults.push(format!("{}:{number}: {name} {fault}", path.display()));
            }
        }
    }
    assert!(checked > 50, "{checked}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
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
