//! Parts of requests in the form that recordings have. Pure.

use serde_json::{Map, Value};

use crate::domain::agent::params::Params;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::content::Content;
use crate::domain::message::{ToolResult, ToolSpec};
use crate::domain::recording::ToolRecording;

/// The parameters of a request as a recording has them.
pub struct NeutralParams {
    pub effort: Option<String>,
    pub response_format: Option<Value>,
    /// Without those that have their default.
    pub others: Map<String, Value>,
}

pub fn neutral_params(params: &Params) -> NeutralParams {
    let fields = |params: &Params| match serde_json::to_value(params) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(_) => Map::new(),
    };
    let defaults = fields(&Params::default());
    let mut others = fields(params);
    others.remove("effort");
    others.remove("response_format");
    others.retain(|key, value| defaults.get(key) != Some(value));
    let response_format = match &params.response_format {
        ResponseFormat::Text => None,
        format => serde_json::to_value(format).ok(),
    };
    NeutralParams {
        effort: params.effort.map(|effort| effort.as_str().to_owned()),
        response_format,
        others,
    }
}

/// The content as text, with placeholders for images and files.
pub fn plain_text(content: &Content) -> String {
    content.clone().into_redacted().to_plain_text().into_owned()
}

/// The text of a result, with placeholders for its images and files.
pub fn result_text(result: &ToolResult) -> String {
    let mut text = result.content.clone();
    for attachment in &result.attachments {
        text.push_str(&format!("\n{}]", attachment.placeholder()));
    }
    text
}

pub fn tool_recording(spec: &ToolSpec) -> ToolRecording {
    ToolRecording {
        id: spec.name.clone(),
        description: spec.description.clone(),
        parameters: spec.parameters.get().to_owned(),
    }
}
