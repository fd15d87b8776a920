//! The tools that a client executes.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::agent::client_additions::ClientTool;
use crate::domain::json_schema::arguments::{read_arguments, repair_arguments};
use crate::domain::lenient_json;
use crate::domain::message::shorten;
use crate::web::body::json_body::{self, MAX_DEPTH};
use crate::web::error::{Problem, quote};

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

/// The checked tools. Those whose arguments cannot be those of a plain object are left out.
pub fn parse(tools: RequestTools) -> Result<(Vec<ClientTool>, Vec<String>), Problem> {
    let RequestTools { functions, .. } = &tools;
    if functions.len() > MAX_TOOLS {
        let why = format!("a request has at most {MAX_TOOLS} tools");
        return Err(Problem::invalid_field("/tools", why));
    }
    let mut names = BTreeSet::new();
    for function in functions {
        let pointer = format!("{}/name", function.pointer);
        if !names.insert(function.name.as_str()) {
            let why = format!("{} is the name of another tool too", quote(&function.name));
            return Err(Problem::invalid_field(pointer, why));
        }
        function.check_name(pointer)?;
    }
    let mut left_out = RequestTools {
        functions: Vec::new(),
        left_out: tools.left_out,
    };
    let mut checked = Vec::with_capacity(tools.functions.len());
    for function in tools.functions {
        match repaired(function.parameters)? {
            Some(parameters) => checked.push(ClientTool {
                name: function.name,
                description: function.description.unwrap_or_default(),
                parameters,
            }),
            None => left_out.leave_out(
                "function without an object as parameters",
                Some(&function.name),
            ),
        }
    }
    Ok((checked, left_out.left_out))
}

impl FunctionInput {
    fn check_name(&self, pointer: String) -> Result<(), Problem> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if !(1..=MAX_NAME).contains(&self.name.len()) || !self.name.bytes().all(is_valid) {
            let why = format!("must be 1 to {MAX_NAME} letters, digits, '_' and '-'");
            return Err(Problem::invalid_field(pointer, why));
        }
        Ok(())
    }
}

/// The schema as every provider accepts it; unchanged if it is so already. `None` if it cannot be made so.
fn repaired(parameters: Option<Box<RawValue>>) -> Result<Option<Arc<RawValue>>, Problem> {
    let json = parameters.unwrap_or_default();
    if json_body::nesting_depth(json.get()) > MAX_DEPTH {
        return Err(json_body::too_deep());
    }
    let written: Option<Value> = lenient_json::from_slice(json.get().as_bytes()).ok();
    let Some(mut schema) = written.clone().and_then(|it| read_arguments(Some(it))) else {
        return Ok(None);
    };
    if repair_arguments(&mut schema).is_err() {
        return Ok(None);
    }
    let schema = Value::Object(schema);
    Ok(match written.as_ref() == Some(&schema) {
        true => Some(json.into()),
        false => serde_json::value::to_raw_value(&schema).ok().map(Arc::from),
    })
}
