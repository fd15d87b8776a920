//! Bodies of another shape than a protocol has: the error names the place, in the words of JSON and not of our types.

use serde_json::{Value, json};

use crate::clients::a2a;
use crate::support::app::{ApiResponse, TestApp};

async fn solo() -> TestApp {
    TestApp::setup().agent("solo", "").spawn().await
}

/// The body with other fields.
fn with(mut body: Value, fields: &Value) -> Value {
    for (key, value) in fields.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}

/// Checks that the request was refused, and what its message says.
fn check(got: &ApiResponse, message: &Value, expected: &str) {
    assert!(matches!(got.status, 400 | 422), "{expected}: {}", got.text);
    let message = message.as_str().expect("a message");
    assert!(message.starts_with(expected), "{message}");
    for word in [
        "struct ", "enum", "variant", "at line", "map", "sequence", "u32", "u64", "i64",
    ] {
        assert!(!message.contains(word), "{word} in {message}");
    }
}

#[tokio::test]
async fn chat_completions_name_what_they_expect() {
    let app = solo().await;
    let base = json!({"model": "solo", "messages": [{"role": "user", "content": "hi"}]});
    for (fields, expected) in [
        (
            json!({"stop": 5}),
            "/stop: must be a text or a list of texts",
        ),
        (
            json!({"response_format": "json_object"}),
            "/response_format: invalid type: string \"json_object\", expected an object",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": 5}}),
            "/response_format/json_schema: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"stream_options": [true]}),
            "/stream_options: invalid type: array, expected an object",
        ),
        (
            json!({"tools": ["x"]}),
            "/tools/0: invalid type: string \"x\", expected an object",
        ),
        (
            json!({"tools": {}}),
            "/tools: invalid type: object, expected an array",
        ),
        (
            json!({"metadata": 5}),
            "/metadata: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"max_tokens": "many"}),
            "/max_tokens: invalid type: string \"many\", expected a whole number",
        ),
        (
            json!({"reasoning_effort": 5}),
            "/reasoning_effort: must be a text",
        ),
        (
            json!({"reasoning_effort": "huge"}),
            "/reasoning_effort: unknown value `huge`",
        ),
    ] {
        let body = with(base.clone(), &fields);
        let got = app.post("/v1/chat/completions", &body).await;
        check(&got, &got.json()["error"]["message"], expected);
    }
}

#[tokio::test]
async fn messages_of_chats_name_the_wrong_part() {
    let app = solo().await;
    let user = |content: Value| json!({"role": "user", "content": content});
    for (message, expected) in [
        (
            json!("hi"),
            ": invalid type: string \"hi\", expected an object",
        ),
        (
            json!(["user", "hi"]),
            ": invalid type: array, expected an object",
        ),
        (json!({"role": 5}), "/role: must be a text"),
        (
            user(json!(5)),
            "/content: must be a text or a list of parts",
        ),
        (
            user(json!(["hi"])),
            "/content/0: invalid type: string \"hi\", expected an object with a type",
        ),
        (
            user(json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": 5}])),
            "/content/1/image_url: must be a URL, or an object with a url",
        ),
        (
            user(json!([{"type": "file", "file": "x"}])),
            "/content/0/file: invalid type: string \"x\", expected an object",
        ),
        (
            json!({"role": "assistant", "tool_calls": ["x"]}),
            "/tool_calls/0: invalid type: string \"x\", expected an object",
        ),
        (
            json!({"role": "assistant", "tool_calls": [{"id": "a", "function": "f"}]}),
            "/tool_calls/0/function: invalid type: string \"f\", expected an object",
        ),
    ] {
        let messages = [user(json!("hi")), message];
        let body = json!({"model": "solo", "messages": messages});
        let got = app.post("/v1/chat/completions", &body).await;
        let expected = format!("/messages/1{expected}");
        check(&got, &got.json()["error"]["message"], &expected);
    }
}

#[tokio::test]
async fn responses_name_what_they_expect() {
    let app = solo().await;
    for (fields, expected) in [
        (
            json!({"reasoning": "high"}),
            "/reasoning: invalid type: string \"high\", expected an object",
        ),
        (
            json!({"conversation": 5}),
            "/conversation: must be a name, or an object with an id",
        ),
        (
            json!({"text": {"format": "json_object"}}),
            "/text/format: invalid type: string \"json_object\", expected an object",
        ),
        (
            json!({"tools": [5]}),
            "/tools/0: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"input": 5}),
            "/input: must be a text or a list of items",
        ),
        (
            json!({"input": ["hi"]}),
            "/input/0: invalid type: string \"hi\", expected an object",
        ),
        (
            json!({"input": [{"role": "user", "content": "a"}, {"role": 5}]}),
            "/input/1/role: invalid type: integer `5`, expected a string",
        ),
        (
            json!({"input": [{"role": "user", "content": [5]}]}),
            "/input/0/content/0: invalid type: integer `5`, expected an object with a type",
        ),
    ] {
        let body = with(json!({"model": "solo", "input": "hi"}), &fields);
        let got = app.post("/v1/responses", &body).await;
        check(&got, &got.json()["error"]["message"], expected);
    }
}

#[tokio::test]
async fn messages_of_a2a_name_what_they_expect() {
    let app = solo().await;
    let message = a2a::message("m1", "hi");
    for (body, expected) in [
        (
            json!({"message": "hi"}),
            "/message: invalid type: string \"hi\", expected an object",
        ),
        (
            a2a::with_parts("m1", &json!([{"text": "a"}, "hi"])),
            "/message/parts/1: invalid type: string \"hi\", expected an object",
        ),
        (
            a2a::with_parts("m1", &json!({"text": "a"})),
            "/message/parts: invalid type: object, expected an array",
        ),
        (
            with(message.clone(), &json!({"configuration": true})),
            "/configuration: invalid type: boolean `true`, expected an object",
        ),
        (
            with(message, &json!({"configuration": {"historyLength": "all"}})),
            "/configuration/historyLength: invalid type: string \"all\", expected a whole number",
        ),
    ] {
        let got = a2a::post(&app, "solo/message:send", &body).await;
        check(&got, &got.json()["error"]["message"], expected);
    }
}

#[tokio::test]
async fn ag_ui_names_what_it_expects() {
    let app = solo().await;
    let user = |content: Value| json!([{"id": "m1", "role": "user", "content": content}]);
    let base = json!({"threadId": "t1", "runId": "r1", "messages": user(json!("hi"))});
    for (fields, expected) in [
        (
            json!({"messages": 5}),
            "/messages: invalid type: integer `5`, expected an array",
        ),
        (
            json!({"messages": [{}, 5]}),
            "/messages/1: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"tools": ["x"]}),
            "/tools/0: invalid type: string \"x\", expected an object",
        ),
        (
            json!({"context": [5]}),
            "/context/0: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"resume": [["a"]]}),
            "/resume/0: invalid type: array, expected an object",
        ),
        (
            json!({"messages": user(json!([5]))}),
            "/messages/0/content/0: is no part of a message: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"messages": user(json!([{"type": "image", "source": 5}]))}),
            "/messages/0/content/0: is no part of a message: invalid type: integer `5`, expected an object",
        ),
        (
            json!({"messages": user(json!([{"type": "poem"}]))}),
            "/messages/0/content/0: is no part of a message: unknown value `poem`",
        ),
    ] {
        let body = with(base.clone(), &fields);
        let got = app.post("/agents/solo/ag-ui", &body).await;
        check(&got, &got.json()["message"], expected);
    }
}
