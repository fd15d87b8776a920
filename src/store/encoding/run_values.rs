//! Values of a run's row: which inputs are in the row itself, labels, models, warnings.

use std::collections::BTreeMap;

use crate::domain::run::Run;
use crate::domain::usage::{ModelUsage, Usage};
use crate::domain::warning::RunWarning;
use crate::store::StoreError;

/// An input up to this size, with the task of a child run, is stored in the run's own row.
pub const MAX_INLINE_INPUT_BYTES: usize = 1024;

/// About the bytes of a part of an input, without its text.
const PART_BYTES: usize = 160;

/// Whether the input and the task are stored in the run's own row.
pub fn is_inline_input(run: &Run) -> bool {
    let parts = run
        .input
        .parts()
        .map_or(0, |parts| parts.len() * PART_BYTES);
    let task = run.task.as_ref().map_or(0, String::len);
    run.input.text_bytes() + parts + task <= MAX_INLINE_INPUT_BYTES
}

/// `None` if there are no labels.
pub fn labels_value(labels: &BTreeMap<String, String>) -> Option<String> {
    (!labels.is_empty()).then(|| serde_json::to_string(labels).unwrap_or_default())
}

pub fn labels(text: Option<&str>) -> BTreeMap<String, String> {
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// The usage of several models as JSON; `None` if there are none.
pub fn model_usage_value(models: &[ModelUsage]) -> Option<String> {
    (!models.is_empty()).then(|| serde_json::to_string(models).unwrap_or_default())
}

pub fn model_usage(text: Option<&str>) -> Vec<ModelUsage> {
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// The usage of a run by model, without tool calls, of the stored value; empty before the first reply.
pub fn resumed_models(stored: Option<&str>, run: &Run) -> Vec<ModelUsage> {
    let models = model_usage(stored);
    let has_usage = run.usage.model_calls > 0 || run.usage.unreported > 0;
    match models.is_empty() && has_usage {
        true => vec![ModelUsage {
            model: run.model.clone(),
            usage: Usage {
                tool_calls: 0,
                ..run.usage
            },
        }],
        false => models,
    }
}

/// The warnings of a run as JSON.
pub fn warnings_value(warnings: Option<&[RunWarning]>) -> Result<Option<String>, StoreError> {
    let json = warnings.map(serde_json::to_string).transpose();
    json.map_err(|error| StoreError::Backend(format!("a warning could not be written: {error}")))
}
