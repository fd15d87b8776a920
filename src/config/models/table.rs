//! A table of models as a file has it: `src/config/models.toml`, which ships with axed, or the file that the configuration
//! names.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::LazyLock;

use jiff::civil::Date;

use crate::config::models::row::ModelRow;
use crate::settings::document::{self, MAX_FILE_BYTES, Problem};
use crate::settings::table_reader::{self, TableReader};

/// A document with every table, for messages about unknown keys.
const SAMPLE: &str = "[\"<name>\".\"<name>\"]\nlong = { }\nprices = [{ }]";

/// The table that ships with axed.
pub static SHIPPED: LazyLock<ModelTable> = LazyLock::new(|| {
    let text = include_str!("../models.toml");
    parse(text.as_bytes(), &|_, _| true).unwrap_or_default()
});

#[derive(Clone, Debug, Default)]
pub struct ModelTable {
    /// The day on which the table was compared with its sources.
    pub as_of: Option<Date>,
    /// The models for those who name none, as `provider/model`: one a service, the usual one first.
    pub defaults: Vec<String>,
    /// By provider and model.
    pub rows: BTreeMap<String, BTreeMap<String, ModelRow>>,
}

/// `has_price` tells whether the price of a provider's model is known without the table.
///
/// # Errors
/// Everything that is wrong with the text.
pub fn parse(
    text: &[u8],
    has_price: &dyn Fn(&str, &str) -> bool,
) -> Result<ModelTable, Vec<Problem>> {
    let read = |top: &mut TableReader<'_>| ModelTable {
        as_of: top.date("as_of"),
        defaults: top.text_list("defaults").unwrap_or_default(),
        rows: top.remaining_tables(|provider, s| {
            s.remaining_tables(|model, s| ModelRow::read(s, !has_price(provider, model)))
        }),
    };
    let (table, problems) = table_reader::read_table(document::parse(text)?, SAMPLE, None, read);
    match problems.is_empty() {
        true => Ok(table),
        false => Err(problems),
    }
}

/// # Errors
/// Why the file cannot be used, with the lines and keys that are wrong.
pub fn read_file(
    path: &Path,
    has_price: &dyn Fn(&str, &str) -> bool,
) -> Result<ModelTable, String> {
    let shown = path.display().to_string();
    let unreadable = |error: std::io::Error| format!("could not read {shown}: {error}");
    // Checked before it is opened: opening a pipe would wait for its writer.
    if !path.metadata().map_err(unreadable)?.is_file() {
        return Err(format!("{shown} is not a file"));
    }
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut text))
        .map_err(unreadable)?;
    parse(&text, has_price).map_err(|problems| document::format_problems(&problems, &shown, "; "))
}
