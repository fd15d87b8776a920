//! OpenAPI documents (3.0 and 3.1), and their operations as tools. Documents may be hostile: references are only followed
//! within the document, and sizes and depths have limits.

use crate::domain::openapi::document::{Document, Entry};
use crate::domain::openapi::operation::Operation;
use crate::domain::suggestion;

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
    let all = document.entries()?;
    let found = all
        .iter()
        .find(|entry| entry.id() == Some(wanted) || entry.address() == wanted);
    match found {
        Some(entry) => operation::build(document, entry, set_headers)
            .map_err(|why| format!("cannot make a tool of {wanted}: {why}")),
        None => Err(format!(
            "has no operation \"{wanted}\"; {}",
            hint(wanted, &all)
        )),
    }
}

/// The names of the operations for an error: `it has: …`.
///
/// # Errors
/// The second half of a sentence that begins with the document.
pub fn describe_operations(document: &Document) -> Result<String, String> {
    Ok(list_names(&document.entries()?))
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
