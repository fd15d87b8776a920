//! The named schemas of all bodies.

use std::collections::BTreeMap;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

use crate::web::openapi::tidy::{Side, simplify, tidy};

/// The schemas of all bodies. What a client may send and what the daemon sends are generated separately; types that are in
/// both have one schema.
pub struct Schemas {
    requests: SchemaGenerator,
    responses: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.meta_schema = None;
                settings.definitions_path = "/components/schemas".into();
            })
        };
        Self {
            requests: settings().for_deserialize().into_generator(),
            responses: settings().for_serialize().into_generator(),
        }
    }
}

impl Schemas {
    pub fn request_schema<T: JsonSchema>(&mut self) -> Value {
        let mut schema = self.requests.subschema_for::<T>().to_value();
        simplify(&mut schema, Side::Request);
        schema
    }

    pub fn response_schema<T: JsonSchema>(&mut self) -> Value {
        let mut schema = self.responses.subschema_for::<T>().to_value();
        simplify(&mut schema, Side::Response);
        schema
    }

    /// The schemas of a query's parameters, by name.
    pub fn query_schemas<T: JsonSchema>(&mut self) -> Map<String, Value> {
        let mut schema = T::json_schema(&mut self.requests).to_value();
        // A parameter is given or not; it is never null.
        simplify(&mut schema, Side::Response);
        let properties = schema.get_mut("properties").map(Value::take);
        match properties {
            Some(Value::Object(properties)) => properties,
            _ => Map::new(),
        }
    }

    /// Sorted by name.
    pub fn into_components(mut self) -> BTreeMap<String, Value> {
        let responses = tidy(self.responses.take_definitions(true), Side::Response);
        let mut components: BTreeMap<String, Value> = responses.into_iter().collect();
        for (name, schema) in tidy(self.requests.take_definitions(true), Side::Request) {
            let other = components.insert(name.clone(), schema);
            debug_assert!(
                other.is_none_or(|other| other == components[&name]),
                "a request and a response have different schemas named {name}; give one of them another name"
            );
        }
        components
    }
}
