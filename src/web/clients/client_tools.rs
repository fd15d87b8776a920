//! The tools that a client executes.

use std::sync::Arc;

use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ClientTool;
use crate::domain::message::shorten;
use crate::web::error::{Problem, quote};
use crate::web::extract::json_body::{self, MAX_DEPTH};

/// The most tools of one request.
const MAX_TOOLS: usize = 128;
const MAX_NAME: usize = 64;

/// A function as the request describes it, with its place in the body.
pub struct FunctionInput {
    pub pointer: String,
    pub name: String,
    pub description: Option<String>,
    pub parameters: Option<Box<RawValue>>,
}

/// The tools of a request.
#[derive(Default)]
pub struct RequestTools {
    pub functions: Vec<FunctionInput>,
    /// The others, which no run can call.
    pub left_out: Vec<String>,
}

impl RequestTools {
    pub fn leave_out(&mut self, kind: &str, name: Option<&str>) {
        let kind = shorten(kind, MAX_NAME);
        let name = name.map(|name| format!(" {}", quote(name)));
        let tool = format!("{kind}{}", name.unwrap_or_default());
        if self.left_out.len() < MAX_TOOLS && !self.left_out.contains(&tool) {
            self.left_out.push(tool);
        }
    }
}

/// The checked tools.
pub fn parse(functions: Vec<FunctionInput>) -> Result<Vec<ClientTool>, Problem> {
    if functions.len() > MAX_TOOLS {
        let why = format!("a request has at most {MAX_TOOLS} tools");
        return Err(Problem::invalid_field("/tools", why));
    }
    let mut tools: Vec<ClientTool> = Vec::with_capacity(functions.len());
    for function in functions {
        let pointer = format!("{}/name", function.pointer);
        if tools.iter().any(|tool| tool.name == function.name) {
            let why = format!("{} is the name of another tool too", quote(&function.name));
            return Err(Problem::invalid_field(pointer, why));
        }
        tools.push(function.check(pointer)?);
    }
    Ok(tools)
}

impl FunctionInput {
    fn check(self, name_pointer: String) -> Result<ClientTool, Problem> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if !(1..=MAX_NAME).contains(&self.name.len()) || !self.name.bytes().all(is_valid) {
            let why = format!("must be 1 to {MAX_NAME} letters, digits, '_' and '-'");
            return Err(Problem::invalid_field(name_pointer, why));
        }
        let parameters: Arc<RawValue> = match self.parameters.filter(|it| it.get() != "null") {
            None => empty_schema(),
            Some(json) => {
                if json_body::nesting_depth(json.get()) > MAX_DEPTH {
                    return Err(json_body::too_deep());
                }
                if !json.get().starts_with('{') {
                    let pointer = format!("{}/parameters", self.pointer);
                    return Err(Problem::invalid_field(
                        pointer,
                        "must be a JSON Schema of an object",
                    ));
                }
                Arc::from(json)
            }
        };
        Ok(ClientTool {
            name: self.name,
            description: self.description.unwrap_or_default(),
            parameters,
        })
    }
}

fn empty_schema() -> Arc<RawValue> {
    let schema = r#"{"type":"object","properties":{}}"#;
    Arc::from(RawValue::from_string(schema.to_owned()).unwrap_or_default())
}
