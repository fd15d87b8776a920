//! The fields of a start form for the input that an agent takes: those of its `[input_schema]`, else a text and pictures.

use maud::{Markup, html};
use serde_json::{Map, Value};

use crate::web::console::format;

/// Fields that a form may have; the input of a larger schema is written as JSON.
const MAX_FIELDS: usize = 40;

/// `schema` is the agent's `[input_schema]`, if it has one; `given` is what the fields contain.
pub fn fields(schema: Option<&str>, given: Option<&str>) -> Markup {
    let Some(schema) = schema else {
        return html! {
            label for="input" { "Input" }
            textarea #input name="input" rows="4" { (given.unwrap_or_default()) }
            label for="pictures" { "Pictures" }
            input #pictures type="file" accept="image/png,image/jpeg,image/webp,image/gif" multiple data-pictures="input";
        };
    };
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    match properties(&schema) {
        Some(properties) => object_fields(&schema, properties, &parse(given)),
        None => html! {
            label for="input" { "Input, as JSON" }
            textarea.code #input name="input" data-type="json" rows="8" spellcheck="false" required { (given.map(format::pretty_json).unwrap_or_default()) }
        },
    }
}

fn parse(given: Option<&str>) -> Value {
    given
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// The properties, if each can have a field of its own. The name of a field has dots between the names of properties.
fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    let properties = schema.get("properties")?.as_object()?;
    let is_plain = |name: &String| !name.is_empty() && !name.contains('.');
    let fits = (1..=MAX_FIELDS).contains(&properties.len());
    (fits && properties.keys().all(is_plain)).then_some(properties)
}

fn object_fields(schema: &Value, properties: &Map<String, Value>, given: &Value) -> Markup {
    let required = schema.get("required").and_then(Value::as_array);
    let is_required =
        |name: &str| required.is_some_and(|names| names.iter().any(|it| it.as_str() == Some(name)));
    html! {
        @for (name, property) in properties {
            @let id = format!("input-{name}");
            @let required = is_required(name);
            label for=(id) {
                (property.get("title").and_then(Value::as_str).unwrap_or(name))
                @if !required { " (optional)" }
            }
            (field(&id, &format!("input.{name}"), property, given.get(name), required))
            @if let Some(description) = property.get("description").and_then(Value::as_str) {
                p.muted.small { (description) }
            }
        }
    }
}

fn field(id: &str, name: &str, property: &Value, given: Option<&Value>, required: bool) -> Markup {
    let kind = property.get("type").and_then(Value::as_str);
    let default = given.or_else(|| property.get("default"));
    let default = default.map(|default| match default {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    });
    let default = default.unwrap_or_default();
    if let Some(values) = property.get("enum").and_then(Value::as_array) {
        let options = values.iter().map(|value| (value.to_string(), shown(value)));
        return choice(id, name, options.collect(), &default, required);
    }
    match kind {
        Some("string") => html! {
            textarea id=(id) name=(name) rows="2" required[required] { (default) }
        },
        Some("integer" | "number") => html! {
            input id=(id) name=(name) data-type="decimal" inputmode="decimal" value=(default) required[required];
        },
        Some("boolean") => {
            let options = ["true", "false"].map(|it| (it.to_owned(), it.to_owned()));
            choice(id, name, options.into(), &default, required)
        }
        _ => html! {
            textarea.code id=(id) name=(name) data-type="json" rows="4" placeholder="JSON" spellcheck="false" required[required] { (default) }
        },
    }
}

/// Options with their JSON and what is shown.
fn choice(
    id: &str,
    name: &str,
    options: Vec<(String, String)>,
    default: &str,
    required: bool,
) -> Markup {
    html! {
        select id=(id) name=(name) data-type="json" required[required] {
            option value="" { "" }
            @for (json, text) in &options { option value=(json) selected[text == default] { (text) } }
        }
    }
}

fn shown(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::fields;

    #[test]
    fn each_property_has_a_field_of_its_type() {
        let schema = r#"{"type":"object","required":["city"],"properties":{
            "city":{"type":"string","description":"<Where>"},"days":{"type":"integer","default":3},
            "unit":{"enum":["C","F"]},"places":{"type":"array"}}}"#;
        let html = fields(Some(schema), None).into_string();
        for part in [
            r#"<textarea id="input-city" name="input.city" rows="2" required>"#,
            "&lt;Where&gt;",
            r#"name="input.days" data-type="decimal" inputmode="decimal" value="3""#,
            r#"<option value="&quot;C&quot;">C</option>"#,
            r#"name="input.places" data-type="json""#,
        ] {
            assert!(html.contains(part), "{part} is missing in {html}");
        }
        let any = fields(Some(r#"{"properties":{"a.b":{}}}"#), None).into_string();
        assert!(any.contains("Input, as JSON"), "{any}");
        let filled = fields(Some(schema), Some(r#"{"city":"Oslo","unit":"F"}"#)).into_string();
        assert!(filled.contains(">Oslo</textarea>"), "{filled}");
        assert!(
            filled.contains(r#"<option value="&quot;F&quot;" selected>F</option>"#),
            "{filled}"
        );
        assert!(
            fields(None, Some("go"))
                .into_string()
                .contains(">go</textarea>")
        );
    }
}
