//! Finds where a field belongs that a request has in the wrong place.

use schemars::{JsonSchema, schema_for};
use serde_json::Value;

use crate::domain::agent::AgentSettings;
use crate::settings::section::{Kind, Section, Setting, Visitor};

/// Objects within objects of a body that are searched.
const MAX_DEPTH: usize = 3;

/// What to say about a field that belongs elsewhere in the body: `it belongs in "params"`. `None` if no object of the body
/// has such a field. `parent` is the path of the object that has it wrongly; empty for the body itself.
pub fn place_in_body<T: JsonSchema>(field: &str, parent: &str) -> Option<String> {
    let schema = schema_for!(T);
    let mut search = FieldSearch {
        root: schema.as_value(),
        field,
        places: Vec::new(),
    };
    search.visit(schema.as_value(), String::new(), MAX_DEPTH);
    search.places.retain(|place| place != parent);
    search.places.sort_unstable();
    let places = search.places.iter().map(|place| match place.as_str() {
        "" => "at the top of the body".to_owned(),
        place => format!("in \"{place}\""),
    });
    let places: Vec<String> = places.collect();
    (!places.is_empty()).then(|| format!("it belongs {}", places.join(" or ")))
}

/// Searches the objects that a schema describes, without those in lists.
struct FieldSearch<'s> {
    root: &'s Value,
    field: &'s str,
    /// The paths of the objects that have the field, with dots.
    places: Vec<String>,
}

impl FieldSearch<'_> {
    fn visit(&mut self, schema: &Value, path: String, depth: usize) {
        let Some(properties) = self.properties(schema).cloned() else {
            return;
        };
        if properties.contains_key(self.field) {
            self.places.push(path.clone());
        }
        if depth == 0 {
            return;
        }
        for (name, schema) in &properties {
            let path = match path.as_str() {
                "" => name.clone(),
                path => format!("{path}.{name}"),
            };
            self.visit(schema, path, depth - 1);
        }
    }

    /// The properties of an object, behind references and of an optional one.
    fn properties<'v>(&'v self, schema: &'v Value) -> Option<&'v serde_json::Map<String, Value>> {
        if let Some(reference) = schema["$ref"].as_str() {
            return self.properties(self.root.pointer(reference.strip_prefix('#')?)?);
        }
        if let Some(choices) = schema["anyOf"].as_array() {
            return choices.iter().find_map(|choice| self.properties(choice));
        }
        schema["properties"].as_object()
    }
}

/// What to say about a field that only an agent's file has: `only an agent's file sets it, in [limits]`.
pub fn place_in_agent_file(field: &str) -> Option<String> {
    let mut search = KeySearch {
        key: field,
        table: "",
        found: None,
    };
    AgentSettings::default().visit(&mut search);
    let place = match search.found? {
        "" => String::new(),
        table => format!(", in [{table}]"),
    };
    Some(format!("only an agent's file sets it{place}"))
}

/// Searches the keys of agent files for one; the first table that has it wins.
struct KeySearch<'k> {
    key: &'k str,
    table: &'static str,
    found: Option<&'static str>,
}

impl Visitor for KeySearch<'_> {
    fn setting<T, K: Kind<T>>(&mut self, setting: &Setting, kind: &K, _value: &T) {
        if setting.key == self.key {
            self.found.get_or_insert(self.table);
        }
        let outer = std::mem::replace(&mut self.table, setting.key);
        kind.visit_section(self);
        self.table = outer;
    }
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;

    use super::{place_in_agent_file, place_in_body};
    use crate::web::body::json_body::Object;

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only the schema is read")]
    struct Body {
        input: Option<String>,
        params: Option<Object<Inner>>,
        budget: Object<Inner>,
        messages: Vec<Item>,
    }

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only the schema is read")]
    struct Inner {
        max_tokens: Option<u64>,
    }

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only the schema is read")]
    struct Item {
        role: String,
    }

    #[test]
    fn a_field_in_the_wrong_object_is_shown_its_place() {
        let place = |field, parent| place_in_body::<Body>(field, parent);
        let expected = "it belongs in \"budget\" or in \"params\"";
        assert_eq!(place("max_tokens", "").as_deref(), Some(expected));
        let expected = "it belongs at the top of the body";
        assert_eq!(place("input", "params").as_deref(), Some(expected));
        assert_eq!(place("input", ""), None);
        assert_eq!(place("role", ""), None);
        for (field, expected) in [
            (
                "max_turns",
                Some("only an agent's file sets it, in [limits]"),
            ),
            ("tools", Some("only an agent's file sets it")),
            ("retry", Some("only an agent's file sets it")),
            ("nothing", None),
        ] {
            assert_eq!(place_in_agent_file(field).as_deref(), expected, "{field}");
        }
    }
}
