//! What a response shows of its request, as it is kept with the run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::domain::agent::params::Effort;

/// What a response shows of its request.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Echo {
    pub model: String,
    pub instructions: Option<String>,
    pub previous_response_id: Option<String>,
    pub conversation: Option<String>,
    pub tool_choice: Value,
    pub format: Value,
    pub effort: Option<Effort>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub max_output_tokens: Option<u32>,
    pub metadata: BTreeMap<String, String>,
    pub user: Option<String>,
    pub background: bool,
    pub store: bool,
    /// How many messages of the run's prompt are those of the request.
    pub messages: usize,
}
