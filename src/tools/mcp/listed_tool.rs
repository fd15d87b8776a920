//! Reads the tools that a server lists. A tool that cannot be read is left out with a reason, and costs no other one.

use rmcp::model::{ListToolsResult, MetaObject};
use serde_json::{Value, json};

use crate::domain::json_schema::arguments::read_arguments;
use crate::domain::lenient_json::{is_true, scalar_text, text};
use crate::domain::message::shorten;

/// Where the reasons are kept in a list that the SDK reads.
const LEFT_OUT: &str = "axed/leftOut";
/// Most reasons of one list.
const MAX_LEFT_OUT: usize = 32;

/// The result of `tools/list` as the SDK accepts it, with the reasons why tools are left out.
pub fn read_list(mut result: Value) -> Value {
    let tools = match &mut result {
        Value::Array(tools) => Some(Value::Array(std::mem::take(tools))),
        _ => result.get_mut("tools").map(Value::take),
    };
    let mut left_out = Vec::new();
    let entries: Vec<Value> = match tools {
        Some(Value::Array(tools)) => tools,
        Some(Value::Object(tools)) => tools.into_iter().map(with_name).collect(),
        Some(Value::Null) => Vec::new(),
        _ => {
            left_out.push(LeftOut {
                what: "the list of the tools".to_owned(),
                why: "it is no list".to_owned(),
            });
            Vec::new()
        }
    };
    let mut tools = Vec::with_capacity(entries.len());
    for entry in entries {
        match read_tool(entry) {
            Ok(tool) => tools.push(tool),
            Err(why) if left_out.len() < MAX_LEFT_OUT => left_out.push(why),
            Err(_) => {}
        }
    }
    let cursor = result.get("nextCursor").and_then(scalar_text);
    let mut list = json!({"resultType": "complete", "tools": tools, "_meta": {LEFT_OUT: left_out}});
    for (key, value) in [
        ("nextCursor", cursor.map(Value::from)),
        (
            "ttlMs",
            result.get("ttlMs").filter(|it| it.is_u64()).cloned(),
        ),
        ("cacheScope", cache_scope(&result)),
    ] {
        if let Some(value) = value {
            list[key] = value;
        }
    }
    list
}

/// The tools of a list that are left out.
pub fn left_out(list: &ListToolsResult) -> Vec<LeftOut> {
    let reasons = list
        .meta
        .as_ref()
        .and_then(|meta: &MetaObject| meta.get(LEFT_OUT));
    let reasons = reasons.cloned().map(serde_json::from_value);
    reasons.and_then(Result::ok).unwrap_or_default()
}

/// A tool that cannot be offered.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct LeftOut {
    /// Such as `tool "a"`.
    pub what: String,
    pub why: String,
}

fn cache_scope(result: &Value) -> Option<Value> {
    let scope = text(result, "cacheScope")?;
    matches!(scope, "public" | "private").then(|| scope.into())
}

/// A tool that its list names by its key.
fn with_name((name, mut tool): (String, Value)) -> Value {
    if let Value::Object(fields) = &mut tool {
        fields.entry("name").or_insert_with(|| name.into());
    }
    tool
}

fn read_tool(tool: Value) -> Result<Value, LeftOut> {
    let leave_out = |name: &str, why: &str| LeftOut {
        what: format!("tool \"{}\"", shorten(name, 100)),
        why: why.to_owned(),
    };
    let Value::Object(mut fields) = tool else {
        return Err(LeftOut {
            what: "a tool".to_owned(),
            why: format!("it is described by {}", shorten(&tool.to_string(), 50)),
        });
    };
    let name = fields.get("name").and_then(scalar_text);
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Err(LeftOut {
            what: "a tool".to_owned(),
            why: "it has no name".to_owned(),
        });
    };
    let schema = ["inputSchema", "input_schema", "parameters"];
    let schema = schema.into_iter().find_map(|key| fields.remove(key));
    let Some(schema) = read_arguments(schema) else {
        return Err(leave_out(&name, "its schema is not an object"));
    };
    let tool = Value::Object(fields);
    let support = tool.get("execution").and_then(|it| text(it, "taskSupport"));
    if support.is_some_and(|support| support.eq_ignore_ascii_case("required")) {
        let why =
            "it runs only as a task (taskSupport is \"required\"), which a run cannot wait for";
        return Err(leave_out(&name, why));
    }
    let hint = |key: &str| {
        let hints = tool.get("annotations").and_then(|it| it.get(key));
        hints.is_some_and(is_true)
    };
    let mut read = json!({
        "name": name,
        "inputSchema": schema,
        "annotations": {"readOnlyHint": hint("readOnlyHint"), "idempotentHint": hint("idempotentHint")},
    });
    if let Some(title) = text(&tool, "title") {
        read["title"] = title.into();
    }
    if let Some(description) = tool.get("description").and_then(description) {
        read["description"] = description.into();
    }
    Ok(read)
}

/// The description, also as the lines of a list.
fn description(value: &Value) -> Option<String> {
    match value {
        Value::Array(lines) => {
            let lines: Option<Vec<String>> = lines.iter().map(scalar_text).collect();
            lines.map(|lines| lines.join("\n"))
        }
        other => scalar_text(other),
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::ListToolsResult;
    use serde_json::{Value, json};

    use super::{left_out, read_list};

    /// The tools that are read, as JSON, and why others are left out.
    fn read(result: Value) -> (Vec<Value>, Vec<String>) {
        let list: ListToolsResult =
            serde_json::from_value(read_list(result)).expect("a list that the SDK reads");
        let why = left_out(&list).into_iter();
        let why = why.map(|it| format!("{}: {}", it.what, it.why)).collect();
        let tools = list.tools.iter();
        let tools = tools.map(|tool| serde_json::to_value(tool).expect("JSON"));
        (tools.collect(), why)
    }

    #[test]
    fn odd_fields_cost_only_themselves() {
        let (tools, why) = read(json!({"tools": [
            {"name": "a"},
            {"name": 7, "inputSchema": null, "title": 5, "description": null, "annotations": []},
            {"name": "c", "inputSchema": [], "description": ["one", "two"], "icons": "none", "outputSchema": 7},
            {"name": "d", "inputSchema": "{\"type\": \"object\"}", "annotations": {"readOnlyHint": "true", "title": 1}},
            {"name": "e", "inputSchema": true, "description": 5, "_meta": "x", "execution": 7},
        ], "_meta": 5, "nextCursor": false}));
        assert_eq!(why, Vec::<String>::new());
        let names: Vec<&Value> = tools.iter().map(|tool| &tool["name"]).collect();
        assert_eq!(names, ["a", "7", "c", "d", "e"]);
        assert_eq!(tools[0]["inputSchema"], json!({}));
        assert_eq!(tools[2]["description"], "one\ntwo");
        assert_eq!(tools[3]["annotations"]["readOnlyHint"], true);
        assert_eq!(tools[3]["inputSchema"], json!({"type": "object"}));
    }

    #[test]
    fn what_is_no_tool_is_left_out_with_a_reason() {
        let (tools, why) = read(json!({"tools": [
            null,
            {"description": "nameless"},
            {"name": "list", "inputSchema": [1]},
            {"name": "task", "execution": {"taskSupport": "required"}},
            {"name": "either", "execution": {"taskSupport": "optional"}},
        ]}));
        assert_eq!(tools.len(), 1);
        assert_eq!(
            why,
            [
                "a tool: it is described by null",
                "a tool: it has no name",
                "tool \"list\": its schema is not an object",
                "tool \"task\": it runs only as a task (taskSupport is \"required\"), which a run cannot wait for",
            ]
        );
    }

    #[test]
    fn a_list_has_many_forms() {
        for list in [
            json!({"tools": {"a": {"description": "d"}}}),
            json!([{"name": "a"}]),
            json!({"tools": [{"name": "a"}], "nextCursor": null}),
        ] {
            assert_eq!(read(list.clone()).0[0]["name"], "a", "{list}");
        }
        assert_eq!(read(json!({"tools": null})), (Vec::new(), Vec::new()));
        assert_eq!(read(json!({})).1, ["the list of the tools: it is no list"]);
    }
}
