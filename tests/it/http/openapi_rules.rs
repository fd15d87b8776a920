//! Rules of the OpenAPI document that make generated clients readable. Each test lists all violations.

use std::collections::BTreeSet;

use axed::domain::event::STORED_EVENT_NAMES;
use serde_json::Value;

use crate::http::openapi_document::Document;
use crate::support::app::TestApp;

const JSON: &str = "application/json";

fn assert_none(violations: &[String]) {
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

fn is_blank(value: &Value) -> bool {
    value.as_str().is_none_or(|text| text.trim().is_empty())
}

/// Every schema with its place in the document.
fn schemas(document: &Document) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (name, schema) in document.0["components"]["schemas"]
        .as_object()
        .expect("schemas")
    {
        push_schemas(name.clone(), schema, &mut found);
    }
    for (path, method, operation) in document.operations() {
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let place = format!("{method} {path} parameter {}", parameter["name"]);
            push_schemas(place, &parameter["schema"], &mut found);
        }
        let body = operation["requestBody"]["content"].as_object();
        for (content_type, media) in body.into_iter().flatten() {
            let place = format!("{method} {path} body {content_type}");
            push_schemas(place, &media["schema"], &mut found);
        }
        for (status, response) in operation["responses"].as_object().expect("responses") {
            let content = response["content"].as_object();
            for (content_type, media) in content.into_iter().flatten() {
                let place = format!("{method} {path} {status} {content_type}");
                push_schemas(place, &media["schema"], &mut found);
            }
        }
    }
    found
}

fn push_schemas<'d>(place: String, schema: &'d Value, found: &mut Vec<(String, &'d Value)>) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        push_schemas(format!("{place}.{name}"), property, found);
    }
    for keyword in ["items", "additionalProperties"] {
        // A boolean here says whether there are others, and is no schema to generate a type from.
        if schema[keyword].is_object() {
            push_schemas(format!("{place}/{keyword}"), &schema[keyword], found);
        }
    }
    for keyword in ["anyOf", "oneOf", "allOf"] {
        for (at, choice) in schema[keyword].as_array().into_iter().flatten().enumerate() {
            push_schemas(format!("{place}/{keyword}/{at}"), choice, found);
        }
    }
    found.push((place, schema));
}

#[tokio::test]
async fn schemas_generate_named_types() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let mut violations = Vec::new();
    for (place, schema) in schemas(&document) {
        if schema.is_boolean() {
            violations.push(format!("{place}: is a boolean schema"));
        }
        if schema.get("default").is_some_and(Value::is_null) {
            violations.push(format!("{place}: has a default of null"));
        }
        let choices: Vec<&Value> = schema["oneOf"].as_array().into_iter().flatten().collect();
        if !choices.is_empty() && choices.iter().all(|choice| choice["const"].is_string()) {
            violations.push(format!("{place}: is a set of constants; make it an enum"));
        }
        let objects = choices
            .iter()
            .filter(|choice| document.resolve(choice)["properties"].is_object());
        if objects.count() > 1 {
            let mapping = schema["discriminator"]["mapping"].as_object();
            if mapping.is_none_or(|mapping| mapping.len() != choices.len()) {
                violations.push(format!(
                    "{place}: has no discriminator; give its enum a serde tag"
                ));
            }
            if choices.iter().any(|choice| choice["$ref"].is_null()) {
                violations.push(format!("{place}: has a variant without a name"));
            }
        }
        let objects = schema["anyOf"].as_array().into_iter().flatten();
        let objects = objects.filter(|choice| document.resolve(choice)["properties"].is_object());
        if objects.count() > 1 {
            violations.push(format!(
                "{place}: is an anyOf of objects; give its enum a serde tag"
            ));
        }
    }
    assert_none(&violations);
}

#[tokio::test]
async fn every_type_field_and_parameter_is_described() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let mut violations = Vec::new();
    for (name, schema) in document.0["components"]["schemas"]
        .as_object()
        .expect("schemas")
    {
        if is_blank(&schema["description"]) {
            violations.push(format!("{name}: has no description; write a doc comment"));
        }
    }
    for (place, schema) in schemas(&document) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            if is_blank(&property["description"]) {
                violations.push(format!(
                    "{place}.{name}: has no description; write a doc comment"
                ));
            }
        }
    }
    for (path, method, operation) in document.operations() {
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            if is_blank(&parameter["description"]) {
                violations.push(format!(
                    "{method} {path}: {} has no description",
                    parameter["name"]
                ));
            }
        }
    }
    assert_none(&violations);
}

#[tokio::test]
async fn every_operation_is_described_and_named_as_a_function() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let tags: BTreeSet<&str> = document.0["tags"]
        .as_array()
        .expect("tags")
        .iter()
        .filter(|tag| !is_blank(&tag["description"]))
        .filter_map(|tag| tag["name"].as_str())
        .collect();
    let scheme = &document.0["components"]["securitySchemes"]["key"]["description"];
    let mut violations = Vec::new();
    for (path, method, operation) in document.operations() {
        let id = operation["operationId"].as_str().unwrap_or_default();
        let words: Vec<&str> = id.split('_').collect();
        let is_word =
            |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase());
        if words.len() < 2 || !words.iter().all(is_word) {
            violations.push(format!(
                "{method} {path}: operationId {id:?} is no verb_noun"
            ));
        }
        for key in ["summary", "description"] {
            if is_blank(&operation[key]) {
                violations.push(format!("{method} {path}: has no {key}"));
            }
        }
        for tag in operation["tags"].as_array().into_iter().flatten() {
            if !tag.as_str().is_some_and(|tag| tags.contains(tag)) {
                violations.push(format!("{method} {path}: the tag {tag} has no description"));
            }
        }
        let scope = operation["security"][0]["key"][0].as_str();
        let scope = scope.map(|scope| format!("`{scope}`"));
        let description = operation["description"].as_str().unwrap_or_default();
        if let Some(scope) = scope {
            let scheme = scheme.as_str().unwrap_or_default();
            if !description.contains(&scope) || !scheme.contains(&scope) {
                violations.push(format!(
                    "{method} {path}: the scope {scope} is not described"
                ));
            }
        }
    }
    assert_none(&violations);
}

#[tokio::test]
async fn bodies_have_valid_examples() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let mut violations = Vec::new();
    let mut check = |place: String, schema: &Value, examples: Vec<&Value>| {
        if examples.is_empty() {
            violations.push(format!("{place}: has no example"));
        }
        for example in examples {
            let errors = document.errors(schema, example);
            violations.extend(errors.iter().map(|error| format!("{place}: {error}")));
        }
    };
    for (path, method, operation) in document.operations() {
        let body = &operation["requestBody"]["content"][JSON];
        if body.is_object() {
            let examples = body["examples"].as_object().into_iter().flatten();
            let examples = examples.map(|(_, example)| &example["value"]).collect();
            check(format!("{method} {path} body"), &body["schema"], examples);
        }
        for (status, response) in operation["responses"].as_object().expect("responses") {
            let media = &response["content"][JSON];
            if media.is_object() {
                let examples = media.get("example").into_iter().collect();
                check(
                    format!("{method} {path} {status}"),
                    &media["schema"],
                    examples,
                );
            }
        }
    }
    for (name, response) in document.0["components"]["responses"]
        .as_object()
        .expect("responses")
    {
        let media = &response["content"]["application/problem+json"];
        let examples = media.get("example").into_iter().collect();
        check(name.clone(), &media["schema"], examples);
    }
    assert_none(&violations);
}

#[tokio::test]
async fn problems_name_their_codes_and_responses_their_headers() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let codes = document.0["components"]["schemas"]["ProblemCode"]["enum"].clone();
    let codes = codes.as_array().expect("codes");
    assert!(codes.len() > 40, "{codes:?}");
    let mut violations = Vec::new();
    for (path, method, operation) in document.operations() {
        for (status, response) in operation["responses"].as_object().expect("responses") {
            let place = format!("{method} {path} {status}");
            let resolved = document.resolve(response);
            let headers = &resolved["headers"];
            let mut needed = vec!["x-request-id"];
            if resolved["content"]["application/problem+json"].is_object() && status != "default" {
                needed.extend(match status.as_str() {
                    "401" => Some("WWW-Authenticate"),
                    "429" | "503" => Some("Retry-After"),
                    _ => None,
                });
                let description = response["description"].as_str().unwrap_or_default();
                let mut named = description.split('`').skip(1).step_by(2);
                let is_code = |name: &str| codes.iter().any(|code| code == name);
                if !named.next().is_some_and(is_code) {
                    violations.push(format!(
                        "{place}: {description:?} does not begin with a `code`"
                    ));
                }
            }
            for header in needed {
                let header_object = document.resolve(&headers[header]);
                if is_blank(&header_object["description"]) {
                    violations.push(format!("{place}: the header {header} is not described"));
                }
            }
        }
    }
    assert_none(&violations);
}

#[tokio::test]
async fn events_are_a_union_by_type() {
    let app = TestApp::spawn().await;
    let document = Document::fetch(&app).await;
    let schemas = &document.0["components"]["schemas"];
    let discriminator = &schemas["RunEvent"]["discriminator"];
    assert_eq!(discriminator["propertyName"], "type");
    let mapping = discriminator["mapping"].as_object().expect("a mapping");
    for &name in STORED_EVENT_NAMES {
        let variant = document
            .resolve(&serde_json::json!({"$ref": mapping[name]}))
            .clone();
        assert_eq!(variant["properties"]["type"]["const"], name);
        let required = variant["required"].as_array().expect("required fields");
        assert!(required.contains(&"seq".into()), "{name}: {required:?}");
    }
    let delta = &schemas["TextDeltaEvent"];
    assert!(delta["properties"]["text"].is_object() && delta["properties"]["seq"].is_null());
}
