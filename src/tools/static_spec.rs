//! What models read about a tool whose name and arguments are the same for every agent.

use std::sync::Arc;

use schemars::JsonSchema;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolSpec, empty_arguments};

/// Made once for a tool.
pub struct StaticSpec {
    name: &'static str,
    description: &'static str,
    /// `None` if the type has no valid schema; then the arguments are not checked before they are parsed.
    pub schema: Option<Schema>,
}

impl StaticSpec {
    /// `Arguments` is the type of the tool's arguments.
    pub fn new<Arguments: JsonSchema>(name: &'static str, description: &'static str) -> Self {
        Self {
            name,
            description,
            schema: Schema::for_type::<Arguments>().ok(),
        }
    }

    pub fn to_spec(&self) -> ToolSpec {
        let parameters = self.schema.as_ref().map(|schema| Arc::clone(schema.raw()));
        let parameters = parameters.unwrap_or_else(empty_arguments);
        ToolSpec::new(self.name, self.description, &parameters)
    }
}
