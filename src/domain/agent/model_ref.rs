//! `provider/model`: a reference to a model of a provider.

use std::fmt;

use schemars::{JsonSchema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::settings::document::{self, Node};
use crate::settings::section::{Audience, Kind};
use crate::settings::table_reader::TableReader;

/// A model of a provider: `provider/model`, split at the first `/`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct ModelRef {
    /// The provider's configured name.
    pub provider: String,
    /// The model's name as the provider knows it.
    pub model: String,
}

/// Why a text is not a valid `provider/model`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelRefError {
    #[error("invalid model format \"{0}\": expected provider/model-name")]
    NoSlash(String),
    #[error("invalid model format \"{0}\": empty provider")]
    NoProvider(String),
    #[error("invalid model format \"{0}\": empty model name")]
    NoModel(String),
}

impl ModelRef {
    /// That of a file that names none.
    pub fn unset() -> Self {
        Self {
            provider: String::new(),
            model: String::new(),
        }
    }

    pub fn is_unset(&self) -> bool {
        self.provider.is_empty()
    }
}

/// The name of a model in a file. A blank one is unset.
pub struct ModelName;

impl ModelName {
    fn read_model(table: &mut TableReader<'_>, key: &'static str) -> Option<ModelRef> {
        let node = table.peek(key)?;
        let text = table.text(key).filter(|text| !text.trim().is_empty())?;
        parse(table, &text, &node)
    }
}

fn parse(table: &mut TableReader<'_>, text: &str, node: &Node) -> Option<ModelRef> {
    let parsed: Result<ModelRef, _> = text.parse();
    parsed
        .map_err(|error| table.push_wrong_reference(node, error.to_string()))
        .ok()
}

impl Kind<ModelRef> for ModelName {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut ModelRef) {
        if let Some(model) = Self::read_model(table, key) {
            *value = model;
        }
    }

    fn show(&self, value: &ModelRef, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator.subschema_for::<ModelRef>().to_value()
    }
}

impl Kind<Option<ModelRef>> for ModelName {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Option<ModelRef>) {
        *value = Self::read_model(table, key);
    }

    fn show(&self, value: &Option<ModelRef>, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator.subschema_for::<Option<ModelRef>>().to_value()
    }
}

impl Kind<Vec<ModelRef>> for ModelName {
    fn read(&self, table: &mut TableReader<'_>, key: &'static str, value: &mut Vec<ModelRef>) {
        let nodes = match table.peek(key).map(|node| node.value) {
            Some(document::Value::Array(nodes)) => nodes,
            _ => Vec::new(),
        };
        let texts = table.text_list(key).unwrap_or_default();
        let models = texts.iter().zip(&nodes);
        *value = models
            .filter_map(|(text, node)| parse(table, text, node))
            .collect();
    }

    fn show(&self, value: &Vec<ModelRef>, _audience: Audience) -> Value {
        json!(value)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        generator.subschema_for::<Vec<ModelRef>>().to_value()
    }
}

impl std::str::FromStr for ModelRef {
    type Err = ModelRefError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((provider, model)) = text.split_once('/') else {
            return Err(ModelRefError::NoSlash(text.to_owned()));
        };
        if provider.trim().is_empty() {
            return Err(ModelRefError::NoProvider(text.to_owned()));
        }
        if model.trim().is_empty() {
            return Err(ModelRefError::NoModel(text.to_owned()));
        }
        Ok(Self {
            provider: provider.to_owned(),
            model: model.to_owned(),
        })
    }
}

impl TryFrom<String> for ModelRef {
    type Error = ModelRefError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ModelRef> for String {
    fn from(model: ModelRef) -> Self {
        model.to_string()
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.provider, self.model)
    }
}

#[cfg(test)]
mod tests {
    use super::ModelRef;

    #[test]
    fn a_model_splits_at_its_first_slash() {
        let model: ModelRef = "vllm/meta/llama".parse().expect("a model");
        assert_eq!(
            (model.provider.as_str(), model.model.as_str()),
            ("vllm", "meta/llama")
        );
        let why = |text: &str| text.parse::<ModelRef>().expect_err("no model").to_string();
        assert_eq!(
            why("gpt"),
            "invalid model format \"gpt\": expected provider/model-name"
        );
        assert_eq!(why("/gpt"), "invalid model format \"/gpt\": empty provider");
        assert_eq!(
            why("openai/"),
            "invalid model format \"openai/\": empty model name"
        );
    }
}
