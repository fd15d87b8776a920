//! The JSON Schema of a section, as views show it.

use std::borrow::Cow;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value as Json};

use crate::settings::section::{Kind, Section, Setting, Visitor, join_lines};

/// A type whose schema is that of a section's view.
pub struct SectionSchema<S>(PhantomData<S>);

impl<S: Section> JsonSchema for SectionSchema<S> {
    fn schema_name() -> Cow<'static, str> {
        S::SCHEMA.into()
    }

    fn schema_id() -> Cow<'static, str> {
        format!("{}::{}", module_path!(), S::SCHEMA).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        section_schema::<S>(generator, &[])
    }
}

/// The schema of a section's view without these keys.
pub fn section_schema<S: Section>(generator: &mut SchemaGenerator, omitted: &[&str]) -> Schema {
    let mut visitor = SchemaVisitor {
        generator,
        omitted,
        properties: Map::new(),
        required: Vec::new(),
        section: PhantomData::<S>,
    };
    S::default().visit(&mut visitor);
    let (properties, required) = (visitor.properties, visitor.required);
    let mut schema = json_schema!({"type": "object", "properties": properties});
    schema.insert("description".to_owned(), join_lines(S::ABOUT).into());
    if !required.is_empty() {
        schema.insert("required".to_owned(), required.into());
    }
    schema
}

struct SchemaVisitor<'g, S> {
    generator: &'g mut SchemaGenerator,
    omitted: &'g [&'g str],
    properties: Map<String, Json>,
    required: Vec<&'static str>,
    section: PhantomData<S>,
}

impl<S: Section> Visitor for SchemaVisitor<'_, S> {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, _value: &T) {
        if self.omitted.contains(&setting.key) {
            return;
        }
        let mut schema = kind.schema(self.generator);
        schema["description"] = join_lines(setting.about).into();
        self.properties.insert(setting.key.to_owned(), schema);
        if !S::OMITS_UNSET && !K::OMITS_NULL {
            self.required.push(setting.key);
        }
    }
}
