//! `tool_choice`: whether the first reply has to call a tool.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::domain::agent::client_additions::{ClientAdditions, ClientTool, ToolChoice};
use crate::web::clients::client_tools::{self, RequestTools};
use crate::web::error::{Problem, quote};

const POINTER: &str = "/tool_choice";

/// A named function, as chat completions (`function.name`) and responses (`name`) have it.
#[derive(Deserialize)]
struct NamedFunction {
    r#type: String,
    name: Option<String>,
    function: Option<FunctionName>,
}

#[derive(Deserialize)]
struct FunctionName {
    name: String,
}

/// The tools of a request with its choice, in the form that a run is started with.
pub fn additions(tools: RequestTools, choice: Option<&Value>) -> Result<ClientAdditions, Problem> {
    let (tools, tools_left_out) = client_tools::parse(tools)?;
    let (tools, tool_choice) = apply(choice, tools)?;
    Ok(ClientAdditions {
        tools,
        tools_left_out,
        // Clients that force a call want structured output, and never send a result.
        ends_with_calls: tool_choice.is_some(),
        tool_choice,
        ..ClientAdditions::default()
    })
}

/// The tools that the model may call, and what it has to call. `none` leaves out the tools of the client.
fn apply(
    choice: Option<&Value>,
    tools: Vec<ClientTool>,
) -> Result<(Vec<ClientTool>, Option<ToolChoice>), Problem> {
    match choice {
        None | Some(Value::Null) => Ok((tools, None)),
        Some(Value::String(mode)) => match mode.as_str() {
            "auto" => Ok((tools, None)),
            "none" => Ok((Vec::new(), None)),
            "required" if tools.is_empty() => Err(Problem::invalid_field(
                POINTER,
                "is required, but tools is empty",
            )),
            "required" => Ok((tools, Some(ToolChoice::Required))),
            other => Err(unknown(&quote(other))),
        },
        Some(choice) => {
            let name = named(choice)?;
            if !tools.iter().any(|tool| tool.name == name) {
                let why = format!("{} is none of the request's tools", quote(&name));
                return Err(Problem::invalid_field(POINTER, why));
            }
            Ok((tools, Some(ToolChoice::Named(name))))
        }
    }
}

/// The choice as a response shows it, without members that mean nothing here.
pub fn echo(choice: Option<&Value>) -> Value {
    match choice {
        Some(Value::String(mode)) => mode.as_str().into(),
        Some(choice) if choice.is_object() => match named(choice) {
            Ok(name) => json!({"type": "function", "name": name}),
            Err(_) => "auto".into(),
        },
        _ => "auto".into(),
    }
}

fn named(choice: &Value) -> Result<String, Problem> {
    let Ok(named) = NamedFunction::deserialize(choice) else {
        return Err(unknown("this"));
    };
    let NamedFunction {
        r#type,
        name,
        function,
    } = named;
    match name.or(function.map(|function| function.name)) {
        Some(name) if r#type == "function" => Ok(name),
        _ => Err(unknown(&quote(&r#type))),
    }
}

fn unknown(what: &str) -> Problem {
    let why = format!("{what} is not supported: use auto, none, required or a function of tools");
    Problem::invalid_field(POINTER, why)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::{apply, echo};
    use crate::domain::agent::client_additions::{ClientTool, ToolChoice};

    fn apply_to_look(choice: Value) -> Result<(usize, Option<ToolChoice>), String> {
        let look = ClientTool {
            name: "look".to_owned(),
            description: String::new(),
            parameters: Arc::from(RawValue::NULL.to_owned()),
        };
        let applied = apply(Some(&choice), vec![look]);
        applied
            .map(|(tools, choice)| (tools.len(), choice))
            .map_err(|problem| problem.detail().to_owned())
    }

    #[test]
    fn a_choice_is_a_mode_or_a_function() {
        let named = Some(ToolChoice::Named("look".to_owned()));
        for (choice, expected) in [
            (json!(null), (1, None)),
            (json!("auto"), (1, None)),
            (json!("none"), (0, None)),
            (json!("required"), (1, Some(ToolChoice::Required))),
            (
                json!({"type": "function", "name": "look"}),
                (1, named.clone()),
            ),
            (
                json!({"type": "function", "function": {"name": "look"}}),
                (1, named),
            ),
        ] {
            assert_eq!(apply_to_look(choice.clone()), Ok(expected), "{choice}");
        }
    }

    #[test]
    fn a_response_shows_the_choice_alone() {
        let choice = json!({"type": "function", "name": "look", "x": [0, 0]});
        let shown = json!({"type": "function", "name": "look"});
        assert_eq!(echo(Some(&choice)), shown);
        assert_eq!(echo(Some(&json!("none"))), "none");
        assert_eq!(echo(None), "auto");
    }

    #[test]
    fn an_unknown_choice_is_named() {
        for (choice, why) in [
            (json!("any"), "\"any\" is not supported"),
            (
                json!({"type": "file_search"}),
                "\"file_search\" is not supported",
            ),
            (json!(7), "this is not supported"),
            (
                json!({"type": "function", "name": "walk"}),
                "\"walk\" is none of the request's tools",
            ),
        ] {
            let detail = apply_to_look(choice).expect_err("a problem");
            assert!(
                detail.starts_with(&format!("/tool_choice: {why}")),
                "{detail}"
            );
        }
        let detail = apply(Some(&json!("required")), Vec::new()).map(|_| ());
        let detail = detail.expect_err("a problem").detail().to_owned();
        assert_eq!(detail, "/tool_choice: is required, but tools is empty");
    }
}
