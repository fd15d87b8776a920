//! Puts the environment's variables into the configuration's tables: `AXED_<SECTION>__<KEY>` sets a key, and of a key
//! that can be secret, `AXED_<SECTION>__<KEY>_FILE` names a file with its value.

use secrecy::ExposeSecret;

use crate::config::environment::{Environment, env_value, variable_name};
use crate::config::secrets::{SecretError, read_secret, without_file_suffix};
use crate::settings::document::{self, Node, Origin, Problem, ProblemKind, Table, Value};

/// Sets the value of every `AXED_<SECTION>__<KEY>`, and of every secret key from the file that
/// `AXED_<SECTION>__<KEY>_FILE` names. Unknown keys are found later, like those of the file. Returns the problems of
/// files with secrets.
pub(in crate::config) fn apply_environment(
    table: &mut Table,
    environment: &Environment,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for name in environment.keys() {
        let (Some(path), Some(value)) = (variable_path(name), env_value(environment, name)) else {
            continue;
        };
        let origin = Origin::External(name.clone());
        let Some(secret) = secret_of_file_variable(name) else {
            set_at_path(table, &[], &path, &origin, parse_variable(value, &origin));
            continue;
        };
        let path = variable_path(secret).unwrap_or_default();
        match read_secret(environment, secret) {
            Ok(text) => {
                let text = text.iter().map(ExposeSecret::expose_secret).collect();
                set_at_path(table, &[], &path, &origin, Value::Untyped(text));
            }
            Err(error) => problems.push(secret_problem(error)),
        }
    }
    problems
}

/// The path of the key that an `AXED_<SECTION>__<KEY>` sets.
fn variable_path(name: &str) -> Option<Vec<&str>> {
    let path = name.strip_prefix("AXED_")?;
    path.contains("__").then(|| path.split("__").collect())
}

/// The variable of a secret key, such as `AXED_PROVIDERS__VLLM__API_KEY`, if `name` is that variable with `_FILE`.
pub(in crate::config) fn secret_of_file_variable(name: &str) -> Option<&str> {
    let secret = without_file_suffix(name)?;
    let path = variable_path(secret)?;
    let path: Vec<String> = path.iter().map(|part| part.to_ascii_lowercase()).collect();
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    is_secret(&path).then_some(secret)
}

/// Whether the key at this path can hold a secret.
pub(in crate::config) fn is_secret(path: &[&str]) -> bool {
    matches!(
        path,
        ["auth", "keys", _, "sha256"]
            | ["data", "url" | "listen_url"]
            | ["providers", _, "api_key"]
            | ["providers", _, "headers", _]
            | ["telemetry", "otlp_headers", _]
            | ["tools", "web_search", "url"]
    )
}

pub(in crate::config) fn secret_problem(error: SecretError) -> Problem {
    Problem {
        origin: Origin::External(error.variable),
        text: error.reason,
        hint: None,
        kind: ProblemKind::Malformed,
    }
}

/// A list or table if the text is one in TOML, else text that is converted to the type that its key expects.
fn parse_variable(text: &str, origin: &Origin) -> Value {
    if text.starts_with(['[', '{'])
        && let Ok(mut table) = document::parse(format!("value = {text}").as_bytes())
        && table.len() == 1
        && let Some(mut node) = table.remove("value")
    {
        set_origin(&mut node, origin);
        return node.value;
    }
    Value::Untyped(text.to_owned())
}

/// Sets the origin of the node and of everything in it.
fn set_origin(node: &mut Node, origin: &Origin) {
    node.origin = origin.clone();
    match &mut node.value {
        Value::Array(items) => items.iter_mut().for_each(|item| set_origin(item, origin)),
        Value::Table(table) => table.values_mut().for_each(|node| set_origin(node, origin)),
        _ => {}
    }
}

/// Sets the value at a path of parts of a variable's name, and creates the tables on the way.
pub(in crate::config) fn set_at_path(
    table: &mut Table,
    parents: &[&str],
    path: &[&str],
    origin: &Origin,
    value: Value,
) {
    let Some((part, rest)) = path.split_first() else {
        return;
    };
    let key = resolve_key(table, parents, part);
    let origin_here = origin.clone();
    if rest.is_empty() {
        let node = Node {
            origin: origin_here,
            value,
        };
        table.insert(key, node);
        return;
    }
    let node = table.entry(key).or_insert_with(|| Node {
        origin: origin_here,
        value: Value::Table(Table::new()),
    });
    // If the file has something other than a table here, the reader reports that.
    if let Value::Table(child) = &mut node.value {
        let parents: Vec<&str> = parents.iter().chain([part]).copied().collect();
        set_at_path(child, &parents, rest, origin, value);
    }
}

/// The key that a part of a variable's name means: an existing one, else the part in lower case. In headers, `_`
/// becomes `-`; names of models keep their case.
fn resolve_key(table: &Table, parents: &[&str], part: &str) -> String {
    let upper = variable_name(part);
    let lower = part.to_ascii_lowercase();
    if table.contains_key(&lower) {
        return lower;
    }
    if let Some(existing) = table.keys().find(|key| variable_name(key) == upper) {
        return existing.clone();
    }
    match parents {
        [section] if section.eq_ignore_ascii_case("prices") => part.to_owned(),
        [_, _, table] if table.eq_ignore_ascii_case("headers") => lower.replace('_', "-"),
        [_, _, table] if table.eq_ignore_ascii_case("models") => part.to_owned(),
        _ => lower,
    }
}
