//! The JSON Schema of a section of settings, as views show it.

use std::borrow::Cow;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::domain::agent::descriptions::{describe, describe_section};
use crate::domain::agent::model_ref::ModelRef;
use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::settings::{MAX_COUNT, Presence, Section, Setting, Visitor};
use crate::domain::http_tool::HttpToolView;
use crate::domain::mcp::McpServerView;
use crate::domain::schedule::Schedule;
use crate::domain::trigger::Trigger;

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
        section_schema::<S>(generator, false, &[])
    }
}

/// The schema of an optional section that is present if it is enabled.
struct EnabledSectionSchema<S>(PhantomData<S>);

impl<S: Section> JsonSchema for EnabledSectionSchema<S> {
    fn schema_name() -> Cow<'static, str> {
        S::SCHEMA.into()
    }

    fn schema_id() -> Cow<'static, str> {
        format!("{}::{}", module_path!(), S::SCHEMA).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        section_schema::<S>(generator, true, &[])
    }
}

/// The schema of a section's view without these keys; `has_enabled` adds the key `enabled`.
pub fn section_schema<S: Section>(
    generator: &mut SchemaGenerator,
    has_enabled: bool,
    omitted: &[&str],
) -> Schema {
    let mut visitor = SchemaVisitor {
        generator,
        properties: Map::new(),
        required: Vec::new(),
        omits_unset: S::OMITS_UNSET,
        section: S::SCHEMA,
    };
    if has_enabled {
        visitor.add("enabled", true, json!({"type": "boolean"}));
    }
    S::default().visit(&mut visitor);
    let (mut properties, mut required) = (visitor.properties, visitor.required);
    properties.retain(|key, _| !omitted.contains(&key.as_str()));
    required.retain(|key| !omitted.contains(key));
    let mut schema = json_schema!({"type": "object", "properties": properties});
    let description = describe_section(S::SCHEMA);
    if !description.is_empty() {
        schema.insert("description".to_owned(), description.into());
    }
    if !required.is_empty() {
        schema.insert("required".to_owned(), required.into());
    }
    schema
}

struct SchemaVisitor<'g> {
    generator: &'g mut SchemaGenerator,
    properties: Map<String, Value>,
    required: Vec<&'static str>,
    omits_unset: bool,
    /// The name of the section's schema.
    section: &'static str,
}

impl SchemaVisitor<'_> {
    fn add(&mut self, key: &'static str, is_required: bool, mut schema: Value) {
        let description = describe(self.section, key);
        if !description.is_empty() {
            schema["description"] = description.into();
        }
        self.properties.insert(key.to_owned(), schema);
        if is_required {
            self.required.push(key);
        }
    }

    fn refer_to<T: JsonSchema>(&mut self) -> Value {
        self.generator.subschema_for::<T>().to_value()
    }
}

impl Visitor for SchemaVisitor<'_> {
    fn setting(&mut self, key: &'static str, setting: Setting<'_>) {
        let nullable_text = match self.omits_unset {
            true => json!({"type": "string"}),
            false => json!({"type": ["string", "null"]}),
        };
        let schema = match setting {
            Setting::Text(_) | Setting::Url(_) => json!({"type": "string"}),
            Setting::OptionalText(_) | Setting::Path(_) | Setting::VariableName(_) => nullable_text,
            Setting::Flag(_) => json!({"type": "boolean"}),
            Setting::Texts(..) => json!({"type": "array", "items": {"type": "string"}}),
            Setting::Model(_) => self.refer_to::<ModelRef>(),
            Setting::OptionalModel(_) => self.refer_to::<Option<ModelRef>>(),
            Setting::Models(_) => self.refer_to::<Vec<ModelRef>>(),
            Setting::Choice(choice) => choice.schema(self.generator).to_value(),
            Setting::Whole(range, _) => whole_schema(*range.start(), *range.end()),
            Setting::Number(range, _) | Setting::OptionalNumber(range, _) => {
                json!({"type": "number", "minimum": range.start(), "maximum": range.end()})
            }
            Setting::Usd(max, _) => json!({"type": "number", "minimum": 0.0, "maximum": max}),
            Setting::Seconds(_) | Setting::Milliseconds(_) => whole_schema(0, MAX_COUNT),
            Setting::Schema(_) => json!({"type": ["object", "null"], "additionalProperties": {}}),
            Setting::Template(_) => nullable_text,
            Setting::ResponseFormat(_) => self.refer_to::<ResponseFormat>(),
            Setting::Extra(_) => json!({"type": "object", "additionalProperties": {}}),
            Setting::HttpTools(_) => self.refer_to::<Vec<HttpToolView<'static>>>(),
            Setting::McpServers(_) => self.refer_to::<Vec<McpServerView<'static>>>(),
            Setting::Schedules(_) => self.refer_to::<Vec<Schedule>>(),
            Setting::Triggers(_) => self.refer_to::<Vec<Trigger>>(),
        };
        self.add(key, !self.omits_unset, schema);
    }

    fn section<S: Section>(&mut self, key: &'static str, _section: &mut S) {
        let schema = self.refer_to::<SectionSchema<S>>();
        self.add(key, true, schema);
    }

    fn optional_section<S: Section>(
        &mut self,
        key: &'static str,
        presence: Presence,
        _section: &mut Option<S>,
    ) {
        let schema = match presence {
            Presence::Enabled => self.refer_to::<EnabledSectionSchema<S>>(),
            Presence::Key(_) => self.refer_to::<SectionSchema<S>>(),
        };
        self.add(key, false, schema);
    }
}

/// Omits a maximum that only prevents overflow.
fn whole_schema(min: u64, max: u64) -> Value {
    match max > MAX_COUNT {
        true => json!({"type": "integer", "format": "int64", "minimum": min}),
        false => json!({"type": "integer", "format": "int64", "minimum": min, "maximum": max}),
    }
}
