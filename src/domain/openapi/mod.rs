//! OpenAPI documents (3.0 and 3.1), and their operations as tools. Documents may be hostile: references are only followed
//! within the document, and sizes and depths have limits.

use crate::domain::openapi::document::{Document, Entries, Entry};
use crate::domain::openapi::operation::Operation;
use crate::settings::suggestion;

pub mod document;
pub mod operation;
mod schema;

/// The most names of operations in an error.
const MAX_SHOWN_NAMES: usize = 10;

/// The operation with this `operationId`, or with this method and path: `GET /pets`. The headers in `set_headers` are
/// no arguments.
///
/// # Errors
/// The second half of a sentence that begins with the document.
pub fn operation(
    document: &Document,
    wanted: &str,
    set_headers: &[&str],
) -> Result<Operation, String> {
    let all = document.entries();
    let found = all
        .operations
        .iter()
        .find(|entry| entry.id() == Some(wanted) || entry.address() == wanted);
    match found {
        Some(entry) => operation::build(document, entry, set_headers)
            .map_err(|why| format!("cannot make a tool of {wanted}: {why}")),
        None => Err(format!(
            "has no operation \"{wanted}\"; {}{}",
            hint(wanted, &all.operations),
            describe_unreadable_path(wanted, &all)
        )),
    }
}

/// The names of the operations for an error: `it has: …`.
pub fn describe_operations(document: &Document) -> String {
    let all = document.entries();
    let names = list_names(&all.operations);
    format!("{names}{}", describe_unreadable_path("", &all))
}

/// Why a path has no operations: that of the wanted one, or else the first.
fn describe_unreadable_path(wanted: &str, entries: &Entries<'_>) -> String {
    let wanted_path = wanted.split_once(' ').map(|(_, path)| path);
    let paths = &entries.unreadable_paths;
    let unreadable = paths.iter().find(|(path, _)| Some(*path) == wanted_path);
    match unreadable.or(paths.first()) {
        Some((path, why)) => format!(" (its path {path} is left out: {why})"),
        None => String::new(),
    }
}

fn hint(wanted: &str, entries: &[Entry<'_>]) -> String {
    let addresses: Vec<String> = entries.iter().map(Entry::address).collect();
    let ids = entries.iter().filter_map(Entry::id);
    let known = ids.chain(addresses.iter().map(String::as_str));
    match suggestion::closest(wanted, known) {
        Some(name) => format!("did you mean \"{name}\"?"),
        None => list_names(entries),
    }
}

fn list_names(entries: &[Entry<'_>]) -> String {
    if entries.is_empty() {
        return "it has none".to_owned();
    }
    let shown = entries.iter().take(MAX_SHOWN_NAMES);
    let shown: Vec<String> = shown
        .map(|it| it.id().map_or_else(|| it.address(), str::to_owned))
        .collect();
    let more = match entries.len().saturating_sub(MAX_SHOWN_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("it has: {}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{describe_operations, operation};
    use crate::domain::openapi::document::Document;

    #[test]
    fn a_path_that_leads_nowhere_costs_no_other_operation() {
        let document = json!({"openapi": "3.1.0", "paths": {
            "/first": {"$ref": "./first.yaml"},
            "/second": {"$ref": "./second.yaml"},
            "/pets": {"get": {"operationId": "listPets"}},
        }});
        let document = Document::parse(&document.to_string()).expect("a document");
        assert!(operation(&document, "listPets", &[]).is_ok());
        for (wanted, expected) in [
            (
                "listPet",
                "did you mean \"listPets\"? (its path /first is left out: \"./first.yaml\"",
            ),
            (
                "GET /second",
                "(its path /second is left out: \"./second.yaml\" is in another document",
            ),
        ] {
            let error = operation(&document, wanted, &[]).map(drop);
            let error = error.expect_err(wanted);
            assert!(error.contains(expected), "{error}");
        }
        let names = describe_operations(&document);
        assert!(
            names.starts_with("it has: listPets (its path /first"),
            "{names}"
        );
    }
}
