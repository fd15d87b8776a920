//! What the server says about itself: `server/discover`, and `initialize` of earlier versions.

use rmcp::model::{
    DiscoverResult, Implementation, InitializeRequestParams, InitializeResult, JsonObject,
    ProtocolVersion, ResourcesCapability, ResultType, ServerCapabilities, TASKS_EXTENSION_ID,
    ToolsCapability,
};
use serde::Serialize;
use serde::ser::Error as _;
use serde_json::{Error, Value, json};

use crate::web::clients::mcp::protocol::SUPPORTED_VERSIONS;
use crate::web::clients::mcp::rpc::{RpcError, RpcRequest};
use crate::web::error::Problem;

const INSTRUCTIONS: &str = "Each tool is an agent: it works on its input on its own, with tools and \
     sub-agents of its own, and returns its final text. Calls can take minutes. Give all that the agent needs in `input` and \
     `context`, because it does not see this conversation; calls with the same `session` continue one conversation. \
     Resources axed://runs/{id} and axed://runs/{id}/tree show what a run did.";

const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
/// Members of results that earlier versions do not have.
const MODERN_MEMBERS: [&str; 3] = ["resultType", "ttlMs", "cacheScope"];

pub fn implementation() -> Implementation {
    Implementation::new("axed", env!("CARGO_PKG_VERSION"))
}

pub fn discover() -> DiscoverResult {
    let mut capabilities = capabilities();
    let tasks = (TASKS_EXTENSION_ID.to_owned(), JsonObject::new());
    capabilities.extensions = Some([tasks].into());
    let mut result = DiscoverResult::new(SUPPORTED_VERSIONS.to_vec(), capabilities);
    result.instructions = Some(INSTRUCTIONS.to_owned());
    result
}

/// The result as the version of the request has it: a type and the server's name, or neither.
pub fn complete(result: impl Serialize, is_modern: bool) -> Result<Value, Problem> {
    let result = serde_json::to_value(result).and_then(|result| match result {
        Value::Object(result) => Ok(result),
        _ => Err(Error::custom("not an object")),
    });
    let mut result = result.map_err(|error| Problem::internal(format!("a result: {error}")))?;
    if is_modern {
        let complete = ResultType::COMPLETE;
        result
            .entry("resultType")
            .or_insert_with(|| complete.as_str().into());
        let meta = result.entry("_meta").or_insert_with(|| json!({}));
        meta[SERVER_INFO] = json!(implementation());
    } else {
        for member in MODERN_MEMBERS {
            result.shift_remove(member);
        }
    }
    Ok(Value::Object(result))
}

/// The version is the client's, or the newest one with a handshake.
pub async fn initialize(request: &RpcRequest) -> Result<InitializeResult, RpcError> {
    let params: InitializeRequestParams = request.params().await?;
    let requested = params.protocol_version;
    let is_served = requested.as_str() < ProtocolVersion::NO_INITIALIZE.as_str()
        && SUPPORTED_VERSIONS.contains(&requested);
    let version = match is_served {
        true => requested,
        false => ProtocolVersion::LATEST_WITH_INITIALIZE,
    };
    Ok(InitializeResult::new(capabilities())
        .with_protocol_version(version)
        .with_server_info(implementation())
        .with_instructions(INSTRUCTIONS))
}

fn capabilities() -> ServerCapabilities {
    let mut capabilities = ServerCapabilities::default();
    capabilities.tools = Some(ToolsCapability::default());
    capabilities.resources = Some(ResourcesCapability::default());
    capabilities
}
