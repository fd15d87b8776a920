//! Rewrites generated schemas so that client generators make readable types from them: named variants with a discriminator,
//! enums, and no `null` that never occurs.

use serde_json::{Map, Value, json};

/// Marks a schema whose optional properties may be null in responses. Removed from the document.
pub const KEEPS_NULL: &str = "x-keeps-null";

const REF_PREFIX: &str = "#/components/schemas/";

/// The side that writes the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Clients may send null for a property that is optional.
    Request,
    /// The daemon omits a property that is optional.
    Response,
}

/// A reference to the schema of this name.
pub fn reference(name: &str) -> Value {
    json!({"$ref": format!("{REF_PREFIX}{name}")})
}

/// Rewrites the named schemas. Each variant of a tagged union becomes a named schema.
pub fn tidy(definitions: Map<String, Value>, side: Side) -> Map<String, Value> {
    let mut tidied: Map<String, Value> = definitions;
    for schema in tidied.values_mut() {
        simplify(schema, side);
    }
    let unions: Vec<(String, String)> = tidied
        .iter()
        .filter_map(|(name, schema)| Some((name.clone(), tag_of(schema)?)))
        .collect();
    for (name, tag) in unions {
        let union = tidied.remove(&name).unwrap_or_default();
        let (union, variants) = split_union(&name, &tag, &union, &tidied);
        tidied.extend(variants);
        tidied.insert(name, union);
    }
    tidied
}

/// Rewrites a schema and the schemas in it, without looking at references.
pub fn simplify(schema: &mut Value, side: Side) {
    if schema.as_bool() == Some(true) {
        *schema = json!({});
    }
    let Some(keywords) = schema.as_object_mut() else {
        return;
    };
    for keyword in ["items", "additionalProperties"] {
        if let Some(inner) = keywords.get_mut(keyword).filter(|it| it.is_object()) {
            simplify(inner, side);
        }
    }
    for keyword in ["anyOf", "oneOf", "allOf"] {
        let inner = keywords.get_mut(keyword).and_then(Value::as_array_mut);
        inner
            .into_iter()
            .flatten()
            .for_each(|it| simplify(it, side));
    }
    simplify_properties(keywords, side);
    if keywords.get("default").is_some_and(Value::is_null) {
        keywords.remove("default");
    }
    if let Some(format) = keywords.get_mut("format") {
        let portable = match format.as_str() {
            Some("uint8" | "uint16" | "int8" | "int16") => "int32",
            Some("uint" | "uint32" | "uint64" | "int") => "int64",
            _ => return merge_named_values(keywords),
        };
        *format = portable.into();
    }
    merge_named_values(keywords);
}

fn simplify_properties(keywords: &mut Map<String, Value>, side: Side) {
    let keeps_null = keywords.remove(KEEPS_NULL).is_some() || side == Side::Request;
    let required = keywords.get("required").cloned().unwrap_or_default();
    let is_required = |name: &str| {
        required
            .as_array()
            .into_iter()
            .flatten()
            .any(|it| it == name)
    };
    let properties = keywords
        .get_mut("properties")
        .and_then(Value::as_object_mut);
    for (name, property) in properties.into_iter().flatten() {
        simplify(property, side);
        if !keeps_null && !is_required(name) {
            remove_null(property);
        }
    }
}

/// Removes null from the values of a schema.
fn remove_null(schema: &mut Value) {
    let Some(keywords) = schema.as_object_mut() else {
        return;
    };
    if let Some(types) = keywords.get_mut("type").and_then(Value::as_array_mut) {
        types.retain(|it| it != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            keywords.insert("type".to_owned(), only);
        }
    }
    if let Some(Value::Array(choices)) = keywords.get_mut("anyOf") {
        choices.retain(|choice| choice["type"] != "null");
        if let [only] = choices.as_slice() {
            let only = only.as_object().cloned().unwrap_or_default();
            keywords.remove("anyOf");
            for (keyword, value) in only {
                keywords.entry(keyword).or_insert(value);
            }
        }
    }
}

/// Makes an enum of a `oneOf` whose choices are texts. Their descriptions become a list in the enum's description.
fn merge_named_values(keywords: &mut Map<String, Value>) {
    let Some(choices) = keywords.get("oneOf").and_then(Value::as_array) else {
        return;
    };
    if !choices.iter().all(|choice| choice["type"] == "string") {
        return;
    }
    let (mut values, mut lines) = (Vec::new(), Vec::new());
    for choice in choices {
        let named = choice["enum"].as_array().cloned();
        for value in named.unwrap_or_else(|| vec![choice["const"].clone()]) {
            let name = value.as_str().unwrap_or_default();
            let line = choice["description"].as_str();
            lines.extend(line.map(|line| format!("- `{name}`: {line}")));
            values.push(value);
        }
    }
    let description = keywords.get("description").and_then(Value::as_str);
    let description = [description.unwrap_or_default().to_owned(), lines.join("\n")];
    let description: Vec<String> = description
        .into_iter()
        .filter(|it| !it.is_empty())
        .collect();
    keywords.remove("oneOf");
    keywords.insert("type".to_owned(), "string".into());
    keywords.insert("enum".to_owned(), values.into());
    keywords.insert("description".to_owned(), description.join("\n\n").into());
}

/// The property that tells the variants of a union of objects apart.
fn tag_of(schema: &Value) -> Option<String> {
    let variants = schema["oneOf"].as_array()?;
    let first = variants.first()?["properties"].as_object()?;
    let is_tag = |name: &&String| {
        variants
            .iter()
            .all(|variant| variant["properties"][name.as_str()]["const"].is_string())
    };
    first.keys().find(is_tag).cloned()
}

/// The union as references to its variants, and the variants by their names. A union whose variants have nothing but the tag
/// is one object.
fn split_union(
    name: &str,
    tag: &str,
    union: &Value,
    definitions: &Map<String, Value>,
) -> (Value, Map<String, Value>) {
    let variants = union["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
    let is_plain = |variant: &Value| {
        variant["properties"]
            .as_object()
            .is_some_and(|it| it.len() == 1)
            && variant["$ref"].is_null()
    };
    if union["properties"].is_null() && variants.iter().all(is_plain) {
        return (plain_union(tag, union, variants), Map::new());
    }
    let (mut choices, mut mapping, mut named) = (Vec::new(), Map::new(), Map::new());
    for variant in variants {
        let value = &variant["properties"][tag]["const"];
        let variant_name = variant_name(name, value.as_str().unwrap_or_default());
        let choice = reference(&variant_name);
        mapping.insert(
            value.as_str().unwrap_or_default().to_owned(),
            choice["$ref"].clone(),
        );
        choices.push(choice);
        named.insert(
            variant_name,
            whole_variant(tag, union, variant, definitions),
        );
    }
    let union = json!({
        "description": union["description"],
        "oneOf": choices,
        "discriminator": {"propertyName": tag, "mapping": mapping},
    });
    (union, named)
}

/// An object whose only property is the tag.
fn plain_union(tag: &str, union: &Value, variants: &[Value]) -> Value {
    let values = variants.iter().map(|variant| {
        let value = &variant["properties"][tag]["const"];
        json!({"type": "string", "const": value, "description": variant["description"]})
    });
    let mut values = json!({"oneOf": values.collect::<Vec<_>>()});
    simplify(&mut values, Side::Response);
    json!({
        "type": "object",
        "description": union["description"],
        "properties": {tag: values},
        "required": [tag],
    })
}

/// A variant with the properties that all variants have, and with those of the schema that it refers to.
fn whole_variant(
    tag: &str,
    union: &Value,
    variant: &Value,
    definitions: &Map<String, Value>,
) -> Value {
    let referred = variant["$ref"]
        .as_str()
        .and_then(|to| to.strip_prefix(REF_PREFIX));
    let referred = referred.and_then(|name| definitions.get(name));
    let (mut properties, mut required) = (Map::new(), vec![Value::from(tag)]);
    let tag_schema = variant["properties"][tag].clone();
    properties.insert(tag.to_owned(), tag_schema);
    for part in [Some(union), referred, Some(variant)].into_iter().flatten() {
        let own = part["properties"].as_object().into_iter().flatten();
        properties.extend(
            own.filter(|(name, _)| *name != tag)
                .map(|(name, it)| (name.clone(), it.clone())),
        );
        let own = part["required"].as_array().into_iter().flatten();
        required.extend(own.filter(|name| *name != tag).cloned());
    }
    let description = variant["description"].as_str().unwrap_or_default();
    let value = properties[tag]["const"].as_str().unwrap_or_default();
    properties[tag]["description"] = format!("Always `{value}`.").into();
    let mut whole = json!({
        "type": "object",
        "description": description,
        "properties": properties,
        "required": required,
    });
    if let Some(closed) = variant.get("additionalProperties") {
        whole["additionalProperties"] = closed.clone();
    }
    whole
}

/// The value in camel case and the last word of the union's name: `RunQueuedEvent` for `run.queued` of `RunEvent`. The word
/// `Input` keeps the word before it.
fn variant_name(union: &str, value: &str) -> String {
    let capitals: Vec<usize> = union
        .char_indices()
        .filter_map(|(at, c)| c.is_ascii_uppercase().then_some(at))
        .collect();
    let words = if union.ends_with("Input") { 2 } else { 1 };
    let start = capitals.iter().rev().nth(words - 1).copied();
    let suffix = &union[start.unwrap_or_default()..];
    let value = value
        .split(|c: char| !c.is_ascii_alphanumeric())
        .map(|word| {
            let (first, rest) = word.split_at(word.len().min(1));
            first.to_ascii_uppercase() + rest
        });
    value.collect::<String>() + suffix
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Side, simplify, tidy, variant_name};

    fn simplified(mut schema: Value, side: Side) -> Value {
        simplify(&mut schema, side);
        schema
    }

    #[test]
    fn named_values_become_an_enum_with_their_meanings() {
        let schema = json!({"description": "How.", "oneOf": [
            {"type": "string", "const": "a", "description": "First."},
            {"type": "string", "enum": ["b", "c"]},
        ]});
        let expected = json!({
            "type": "string", "enum": ["a", "b", "c"], "description": "How.\n\n- `a`: First.",
        });
        assert_eq!(simplified(schema, Side::Request), expected);
    }

    #[test]
    fn a_response_omits_what_is_optional_and_a_request_may_have_null() {
        let schema = json!({
            "properties": {
                "kept": {"type": ["string", "null"]},
                "text": {"type": ["string", "null"], "default": null},
                "other": {"anyOf": [{"$ref": "#/x"}, {"type": "null"}], "description": "It."},
                "any": true,
                "count": {"type": "integer", "format": "uint"},
            },
            "required": ["kept"],
        });
        let response = simplified(schema.clone(), Side::Response)["properties"].take();
        let expected = json!({
            "kept": {"type": ["string", "null"]},
            "text": {"type": "string"},
            "other": {"$ref": "#/x", "description": "It."},
            "any": {},
            "count": {"type": "integer", "format": "int64"},
        });
        assert_eq!(response, expected);
        let request = simplified(schema, Side::Request)["properties"].take();
        assert_eq!(request["text"], json!({"type": ["string", "null"]}));
    }

    #[test]
    fn variants_of_a_union_are_named_and_complete() {
        let definitions = json!({
            "Image": {"type": "object", "properties": {"bytes": {}}, "required": ["bytes"]},
            "ContentPart": {
                "description": "A part.",
                "properties": {"at": {}},
                "required": ["at"],
                "oneOf": [
                    {"properties": {"type": {"type": "string", "const": "text"}, "text": {}},
                     "required": ["type", "text"], "description": "A text."},
                    {"properties": {"type": {"type": "string", "const": "image"}},
                     "required": ["type"], "$ref": "#/components/schemas/Image"},
                ],
            },
        });
        let definitions = definitions.as_object().cloned().expect("definitions");
        let tidied = tidy(definitions, Side::Response);
        let names: Vec<&String> = tidied.keys().collect();
        assert_eq!(names, ["Image", "TextPart", "ImagePart", "ContentPart"]);
        assert_eq!(
            tidied["ImagePart"]["required"],
            json!(["type", "at", "bytes"])
        );
        assert_eq!(tidied["TextPart"]["description"], "A text.");
        let discriminator = &tidied["ContentPart"]["discriminator"];
        assert_eq!(discriminator["propertyName"], "type");
        assert_eq!(
            discriminator["mapping"]["text"],
            "#/components/schemas/TextPart"
        );
    }

    #[test]
    fn a_union_of_nothing_but_tags_is_an_object() {
        let variant = |name: &str| {
            json!({"type": "object", "properties": {"reason": {"type": "string", "const": name}},
                   "required": ["reason"], "description": format!("A {name}.")})
        };
        let union = json!({"oneOf": [variant("batch"), variant("child")], "description": "Why."});
        let definitions = json!({"WaitingFor": union});
        let tidied = tidy(
            definitions.as_object().cloned().expect("it"),
            Side::Response,
        );
        assert_eq!(
            tidied["WaitingFor"]["properties"]["reason"]["enum"],
            json!(["batch", "child"])
        );
        assert_eq!(tidied.len(), 1);
    }

    #[test]
    fn a_variant_is_named_after_its_value_and_its_union() {
        for (union, value, name) in [
            ("RunEvent", "run.queued", "RunQueuedEvent"),
            ("Message", "user", "UserMessage"),
            ("MessageInput", "user", "UserMessageInput"),
            ("ContentPartInput", "image", "ImagePartInput"),
        ] {
            assert_eq!(variant_name(union, value), name);
        }
    }
}
