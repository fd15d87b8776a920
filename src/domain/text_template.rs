//! A text with places for values of a JSON object, such as `{title}` or `{author.name}`.

use std::fmt::Write;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// The most places of one template.
const MAX_PLACES: usize = 64;

/// `{a}` is a value of an object, `{a.0.b}` one within it; `{{` and `}}` are braces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextTemplate {
    text: String,
    parts: Vec<TemplatePart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePart {
    Literal(String),
    /// The keys and indexes that lead to a value; at least one.
    Path(Vec<String>),
}

impl TextTemplate {
    /// # Errors
    /// The second half of a sentence that begins with the key.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(brace) = rest.find(['{', '}']) {
            let (before, after) = rest.split_at(brace);
            literal.push_str(before);
            if let Some(after) = after.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = after.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if let Some((place, after)) =
                after.strip_prefix('{').and_then(|it| it.split_once('}'))
            {
                parts.push(TemplatePart::Literal(std::mem::take(&mut literal)));
                parts.push(TemplatePart::Path(parse_path(place)?));
                rest = after;
            } else {
                let start: String = after.chars().take(20).collect();
                return Err(format!(
                    "has a single brace in \"{start}\"; write {{{{ or }}}} for a brace"
                ));
            }
        }
        literal.push_str(rest);
        parts.push(TemplatePart::Literal(literal));
        let places = parts.iter().filter(|it| is_path(it));
        match places.count() > MAX_PLACES {
            true => Err(format!("cannot have more than {MAX_PLACES} values")),
            false => Ok(Self {
                text: text.to_owned(),
                parts,
            }),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub fn parts(&self) -> &[TemplatePart] {
        &self.parts
    }

    /// The paths of its values, in their order.
    pub fn paths(&self) -> impl Iterator<Item = &[String]> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Literal(_) => None,
            TemplatePart::Path(path) => Some(path.as_slice()),
        })
    }

    /// Whether a schema of an object describes every value. A schema that allows further properties describes all.
    ///
    /// # Errors
    /// The second half of a sentence that begins with the key.
    pub fn check_names(&self, schema: &Value) -> Result<(), String> {
        for path in self.paths() {
            let mut schema = schema;
            for (depth, key) in path.iter().enumerate() {
                let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
                    break;
                };
                match properties.get(key) {
                    Some(property) => schema = property,
                    // At the top, such a name is a misspelled one.
                    None if depth == 0 || is_closed(schema) => {
                        let names: Vec<&str> = match properties.is_empty() {
                            true => vec!["none"],
                            false => properties.keys().map(String::as_str).collect(),
                        };
                        return Err(format!(
                            "has {{{}}}, but the schema has no property \"{key}\"; it has: {}",
                            path.join("."),
                            names.join(", ")
                        ));
                    }
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// Texts are inserted as they are, other values as JSON, missing ones and null as nothing. `None` if the result has more
    /// than `max_bytes`.
    pub fn render(&self, values: &Value, max_bytes: usize) -> Option<String> {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                TemplatePart::Literal(literal) => text.push_str(literal),
                TemplatePart::Path(path) => push_value(&mut text, find(values, path)),
            }
            if text.len() > max_bytes {
                return None;
            }
        }
        Some(text)
    }
}

/// The value at a path; `None` if there is none.
pub fn find<'v>(values: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(values, |value, key| match value {
        Value::Array(items) => items.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

/// Appends a value: a text as it is, another value as JSON, `None` and null as nothing.
pub fn push_value(text: &mut String, value: Option<&Value>) {
    match value {
        None | Some(Value::Null) => {}
        Some(Value::String(value)) => text.push_str(value),
        // Writing to a text cannot fail.
        Some(value) => drop(write!(text, "{value}")),
    }
}

fn is_path(part: &TemplatePart) -> bool {
    matches!(part, TemplatePart::Path(_))
}

fn is_closed(schema: &Value) -> bool {
    schema.get("additionalProperties") == Some(&Value::Bool(false))
}

fn parse_path(place: &str) -> Result<Vec<String>, String> {
    let is_key = |key: &str| {
        !key.is_empty()
            && key
                .chars()
                .all(|c| !c.is_whitespace() && !matches!(c, '"' | '{' | ','))
    };
    match place.split('.').all(is_key) {
        true => Ok(place.split('.').map(str::to_owned).collect()),
        false => Err(format!(
            "has {{{place}}}, which is no name of a value: write {{name}} or {{name.field}}, and {{{{ for a brace"
        )),
    }
}

impl Serialize for TextTemplate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.text.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TextTemplate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::TextTemplate;

    #[test]
    fn values_are_inserted() {
        let values = json!({
            "title": "It {title} fails", "count": 7, "author": {"name": "Ada"}, "tags": ["a", {"b": true}], "empty": null,
        });
        for (template, expected) in [
            ("no values", "no values"),
            ("{title}!", "It {title} fails!"),
            ("#{count}{empty}{none.at.all}", "#7"),
            ("{author.name} {tags.0} {tags.1.b} {tags.x}", "Ada a true "),
            ("{author}", r#"{"name":"Ada"}"#),
            ("{{title}} }}", "{title} }"),
        ] {
            let parsed = TextTemplate::parse(template).expect(template);
            assert_eq!(parsed.render(&values, 100).as_deref(), Some(expected));
            assert_eq!(parsed.render(&values, expected.len() - 1), None);
            let json = serde_json::to_string(&parsed).expect("JSON");
            let read: TextTemplate = serde_json::from_str(&json).expect("a template");
            assert_eq!(read, parsed);
        }
    }

    #[test]
    fn wrong_places_are_errors() {
        for (template, expected) in [
            ("{}", "has {}, which is no name of a value"),
            ("{a.}", "has {a.}"),
            ("{\"a\": 1}", "has {\"a\": 1}"),
            ("a { b", "has a single brace in \"{ b\""),
            ("a } b", "has a single brace"),
            (&"{a}".repeat(65), "cannot have more than 64 values"),
        ] {
            let error = TextTemplate::parse(template).expect_err(template);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn names_are_checked_against_a_schema() {
        let schema = json!({"properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": false}, "open": {"properties": {"x": {}}}, "list": {},
        }});
        let check = |text: &str| {
            let template = TextTemplate::parse(text).expect(text);
            template.check_names(&schema)
        };
        for right in ["{a}", "{a.b}", "{open.y}", "{list.0.z}", ""] {
            assert_eq!(check(right), Ok(()), "{right}");
        }
        let error = check("{b}").expect_err("unknown");
        assert_eq!(
            error,
            "has {b}, but the schema has no property \"b\"; it has: a, open, list"
        );
        assert!(check("{a.c}").is_err());
        let template = TextTemplate::parse("{any}").expect("a template");
        assert_eq!(template.check_names(&json!({"type": "object"})), Ok(()));
    }
}
