//! Parses JSON bodies. An error names the place in the body as a JSON Pointer.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::web::body::known_fields;
use crate::web::error::{Problem, did_you_mean, quote};
use crate::web::problem_code::ProblemCode;

/// Maximum levels of nesting of a body: the limit of serde_json. Schemas in a body have the same limit.
pub const MAX_DEPTH: usize = 128;

/// The text of a body; 400 if it is not UTF-8.
pub fn decode_utf8(bytes: &[u8]) -> Result<&str, Problem> {
    std::str::from_utf8(bytes).map_err(|error| {
        Problem::new(
            ProblemCode::NotUtf8,
            format!("the body is not UTF-8 at byte {}", error.valid_up_to()),
        )
    })
}

/// Parses a JSON body. 400 if it is not JSON; 422 with a pointer if it is JSON of another shape.
pub fn parse_json<T: DeserializeOwned + JsonSchema>(bytes: &[u8]) -> Result<T, Problem> {
    parse_json_with_places(bytes, |_| None)
}

/// Like [`parse_json`]. If no part of the body has an unknown field, the error says what `other_place` says about it.
pub fn parse_json_with_places<T: DeserializeOwned + JsonSchema>(
    bytes: &[u8],
    other_place: fn(&str) -> Option<String>,
) -> Result<T, Problem> {
    let text = decode_utf8(bytes)?;
    match serde_json::from_str::<Object<T>>(text) {
        Ok(Object(value)) => Ok(value),
        Err(_) => Err(parse_error::<T>(text, other_place)),
    }
}

/// Parses again, slowly, to find the error. A syntax error is reported before an invalid field.
fn parse_error<T: DeserializeOwned + JsonSchema>(
    text: &str,
    other_place: fn(&str) -> Option<String>,
) -> Problem {
    if nesting_depth(text) > MAX_DEPTH {
        return too_deep();
    }
    if let Err(error) = serde_json::from_str::<IgnoredAny>(text) {
        return syntax_error(&error);
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    match serde_path_to_error::deserialize::<_, Object<T>>(&mut deserializer) {
        Err(error) if error.inner().is_data() => {
            shape_error::<T>(error.path(), error.inner(), other_place)
        }
        // serde_json calls it a syntax error if one of several names is expected and the value is no text.
        Err(error) if serde_json::from_str::<Value>(text).is_ok() => {
            Problem::invalid_field(pointer_to(error.path()), "must be a text")
        }
        Err(error) => syntax_error(error.inner()),
        Ok(_) => Problem::new(
            ProblemCode::InvalidJson,
            "the body continues after its JSON value",
        ),
    }
}

/// 400: the JSON is nested deeper than [`MAX_DEPTH`].
pub fn too_deep() -> Problem {
    Problem::new(
        ProblemCode::InvalidJson,
        format!("the body is nested deeper than {MAX_DEPTH} levels"),
    )
}

fn syntax_error(error: &serde_json::Error) -> Problem {
    Problem::new(
        ProblemCode::InvalidJson,
        format!("the body is not valid JSON: {error}"),
    )
}

/// Parses a part of a body that was read as raw JSON, at `pointer` in the body. 422 with the place in that part.
pub fn parse_raw<T: DeserializeOwned>(json: &str, pointer: &str) -> Result<T, Problem> {
    if let Ok(value) = serde_json::from_str(json) {
        return Ok(value);
    }
    // Again, slowly, to find the place.
    let mut deserializer = serde_json::Deserializer::from_str(json);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let pointer = format!("{pointer}{}", pointer_to(error.path()));
        Problem::invalid_field(pointer, describe(error.inner()))
    })
}

/// What is wrong with the shape of JSON, in its own words: without names of our types, and without line and column, which
/// a pointer replaces.
pub fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    // The place is at the end; a text that the error quotes may have the same words.
    let message = match error.line() {
        0 => text.as_str(),
        _ => text
            .rsplit_once(" at line ")
            .map_or(text.as_str(), |(message, _)| message),
    };
    if message.starts_with("data did not match any variant of untagged enum ") {
        return "has none of the forms that it can have".to_owned();
    }
    let mut message = message.to_owned();
    for (words, replacement) in [
        ("unknown variant ", "unknown value "),
        ("invalid type: map,", "invalid type: object,"),
        ("invalid type: sequence,", "invalid type: array,"),
    ] {
        if let Some(rest) = message.strip_prefix(words) {
            message = format!("{replacement}{rest}");
        }
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return message;
    };
    let expected = match expected {
        "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "i32" | "i64" => "a whole number",
        "f64" => "a number",
        "a sequence" => "an array",
        "a map" => "an object",
        "unit" => "null",
        "string or map" => "a text",
        name if OBJECT_TYPES.iter().any(|kind| name.starts_with(kind)) => "an object",
        other => other,
    };
    format!("{found}, expected {expected}")
}

/// How serde begins the names of types that are objects in JSON.
const OBJECT_TYPES: [&str; 4] = [
    "struct ",
    "unit struct ",
    "internally tagged enum ",
    "adjacently tagged enum ",
];

fn shape_error<T: JsonSchema>(
    path: &Path,
    error: &serde_json::Error,
    other_place: fn(&str) -> Option<String>,
) -> Problem {
    let message = describe(error);
    let pointer = pointer_to(path);
    if !message.starts_with("unknown field") {
        return Problem::invalid_field(pointer, message);
    }
    // serde quotes the field and the known fields in backticks; the field is also the path's last segment.
    let known = message
        .rsplit_once("expected")
        .map_or("", |(_, known)| known);
    let field = match path.iter().next_back() {
        Some(Segment::Map { key }) => key.as_str(),
        _ => "",
    };
    let hint = match known_fields::place_in_body::<T>(field, &parent_of(path)) {
        Some(place) => format!("; {place}"),
        None => did_you_mean(field, known.split('`').skip(1).step_by(2)),
    };
    let hint = match (hint.is_empty(), other_place(field)) {
        (true, Some(place)) => format!("; {place}"),
        _ => hint,
    };
    let detail = format!("unknown field {}{hint}", quote(field));
    Problem::field(ProblemCode::UnknownField, pointer, detail)
}

/// The path of the object that has the field, with dots.
fn parent_of(path: &Path) -> String {
    let mut names: Vec<String> = path.iter().map(ToString::to_string).collect();
    names.pop();
    names.join(".")
}

/// The JSON Pointer to a path; empty for the body itself.
fn pointer_to(path: &Path) -> String {
    path.iter()
        .fold(String::new(), |parent, segment| match segment {
            Segment::Seq { index } => join_pointer(&parent, &index.to_string()),
            Segment::Map { key } => join_pointer(&parent, key),
            Segment::Enum { .. } | Segment::Unknown => parent,
        })
}

/// The nesting depth of a JSON text, by its brackets. Does not check that they match.
pub fn nesting_depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0_usize);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// A `T` that is read only from a JSON object. serde would also read a struct from an array of its fields.
#[derive(Clone, Debug, Default)]
pub struct Object<T>(pub T);

impl<T: JsonSchema> JsonSchema for Object<T> {
    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        T::schema_id()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// The JSON Pointer (RFC 6901) to the field `name` of what `parent` points at. The empty pointer is the whole body.
pub fn join_pointer(parent: &str, name: &str) -> String {
    format!("{parent}/{}", name.replace('~', "~0").replace('/', "~1"))
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::Deserialize;

    use super::{Object, describe, nesting_depth, parse_json, parse_raw};

    #[derive(Debug, Default, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    #[allow(dead_code, reason = "only the errors are read")]
    struct Sample {
        input: Option<String>,
        timeout: Option<u64>,
        params: Option<Object<Inner>>,
        choice: Option<Choice>,
    }

    #[derive(Debug, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    enum Choice {
        Left,
    }

    #[derive(Debug, Default, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields, default)]
    #[allow(dead_code, reason = "only the errors are read")]
    struct Inner {
        temperature: Option<f64>,
        stop: Option<Vec<String>>,
    }

    fn refused(body: &str) -> String {
        let problem = parse_json::<Sample>(body.as_bytes()).expect_err("a problem");
        let body: serde_json::Value =
            serde_json::from_slice(&problem.render("", "")).expect("JSON");
        let pointer = body["errors"][0]["pointer"].as_str().unwrap_or("-");
        format!(
            "{} {pointer} {}",
            body["status"],
            body["detail"].as_str().unwrap_or("")
        )
    }

    #[test]
    fn an_error_names_its_pointer() {
        let cases = [
            "{",
            "",
            "{} x",
            "{\"input\": nul}",
            "[\"text\"]",
            "{\"inptu\": \"x\"}",
            "{\"inptu\": \"x\"",
            "{\"input\": 1}",
            "{\"timeout\": -1}",
            "{\"timeout\": 1.5}",
            "{\"params\": [0.5]}",
            "{\"params\": {\"temprature\": 1}}",
            "{\"temperature\": 1}",
            "{\"params\": {\"timeout\": 1}}",
            "{\"params\": {\"stop\": [\"a\", 2]}}",
            "{\"params\": {\"temperature\": 1e999}}",
            "{\"a/b~c\": 1}",
            "{\"input\": \"a\", \"input\": \"b\"}",
        ];
        let all: Vec<String> = cases.into_iter().map(refused).collect();
        insta::assert_snapshot!(all.join("\n"));
        assert!(parse_json::<Sample>(b"{\"params\": null, \"input\": null}").is_ok());
    }

    #[test]
    fn a_name_that_is_no_text_is_an_invalid_field() {
        let expected = "422 /choice /choice: must be a text";
        for body in ["{\"choice\": 5}", "{\"choice\": []}"] {
            assert_eq!(refused(body), expected);
        }
        let expected = "422 /choice /choice: unknown value `up`, expected `left`";
        assert_eq!(refused("{\"choice\": \"up\"}"), expected);
        assert!(parse_json::<Sample>(b"{\"choice\": \"left\"}").is_ok());
    }

    #[test]
    fn errors_have_no_words_of_rust() {
        fn error<T: serde::de::DeserializeOwned>(json: &str) -> String {
            describe(&serde_json::from_str::<T>(json).map(drop).expect_err(json))
        }

        #[derive(Deserialize)]
        #[serde(untagged)]
        #[allow(dead_code, reason = "only the errors are read")]
        enum Either {
            Text(String),
            Texts(Vec<String>),
        }

        #[derive(Deserialize)]
        #[serde(tag = "type")]
        enum Tagged {
            One {},
        }

        let expected = "invalid type: integer `5`, expected an object";
        assert_eq!(error::<Sample>("5"), expected);
        assert_eq!(error::<Tagged>("5"), expected);
        let expected = "has none of the forms that it can have";
        assert_eq!(error::<Either>("5"), expected);
        let expected = "invalid type: object, expected an array";
        assert_eq!(error::<Vec<Either>>("{}"), expected);
        let expected =
            "invalid type: string \"a at line 1, expected u64\", expected a whole number";
        assert_eq!(error::<i64>("\"a at line 1, expected u64\""), expected);
        assert!(serde_json::from_str::<Tagged>("{\"type\": \"One\"}").is_ok());
    }

    #[test]
    fn raw_json_is_parsed_with_its_place_in_the_body() {
        let parsed = parse_raw::<Vec<Object<Inner>>>("[{}, {\"temperature\": 1}]", "/list");
        assert_eq!(parsed.expect("a list").len(), 2);
        let problem = parse_raw::<Vec<Object<Inner>>>("[{}, {\"temperature\": []}]", "/list");
        let problem = problem.expect_err("a problem");
        let expected = "/list/1/temperature: invalid type: array, expected a number";
        assert_eq!(problem.detail(), expected);
    }

    #[test]
    fn deep_json_is_refused_without_recursion() {
        for body in [
            "[".repeat(10_000),
            "{\"a\":".repeat(10_000),
            format!(
                "{{\"input\": {}{}}}",
                "[".repeat(10_000),
                "]".repeat(10_000)
            ),
            format!("{{\"params\": {}{}}}", "[".repeat(200), "]".repeat(200)),
        ] {
            let why = refused(&body);
            assert!(
                why.starts_with("400") && why.contains("128 levels"),
                "{why}"
            );
        }
        assert_eq!(nesting_depth(r#"{"a": "[[[\"[", "b": [{}]}"#), 3);
    }
}
