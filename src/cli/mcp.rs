//! `axed mcp`: the MCP server of a daemon over stdio. Each message of the client is a request to the daemon's `/mcp`; what the
//! daemon responds goes to stdout, one message a line.

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures_util::StreamExt;
use parking_lot::Mutex;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::task::{AbortHandle, JoinSet};

use crate::cli::client::{Client, ClientError};
use crate::cli::output;
use crate::cli::server::DaemonArgs;

/// Maximum bytes of a message of the client, and of one of the daemon.
const MAX_MESSAGE: u64 = 64 << 20;
/// Maximum calls at once.
const MAX_CALLS: usize = 1000;
/// How long the calls at work may take when the client has closed stdin.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// JSON-RPC's codes.
const PARSE_ERROR: i64 = -32700;
const INTERNAL_ERROR: i64 = -32603;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "An MCP client starts this command; it is not for people. In its
configuration:
  {\"mcpServers\": {\"axed\": {\"command\": \"axed\", \"args\": [\"mcp\"],
    \"env\": {\"AXED_SERVER\": \"http://127.0.0.1:8080\", \"AXED_KEY\": \"axed_…\"}}}}

A daemon has to run: axed serve. Clients that speak HTTP can use its /mcp.
Cancelling a call, or ending the client, cancels the run, unless it is a task."
)]
pub struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn mcp(args: &Args) -> anyhow::Result<ExitCode> {
    let proxy = Arc::new(Proxy {
        client: args.daemon.client()?,
        version: Mutex::default(),
    });
    if io::stdin().is_terminal() {
        output::eprint_line(format_args!(
            "axed: waiting for the messages of an MCP client on stdin; see axed mcp --help"
        ));
    }
    let mut calls = JoinSet::new();
    let mut open_calls: HashMap<String, AbortHandle> = HashMap::new();
    let mut input = BufReader::new(tokio::io::stdin());
    loop {
        let mut line = Vec::new();
        (&mut input)
            .take(MAX_MESSAGE)
            .read_until(b'\n', &mut line)
            .await?;
        while calls.try_join_next().is_some() {}
        open_calls.retain(|_, call| !call.is_finished());
        if line.is_empty() {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line) else {
            write(&error(None, PARSE_ERROR, "the line is not valid JSON"));
            continue;
        };
        if message["method"] == "notifications/cancelled" {
            // The daemon cancels the run when its connection closes.
            let id = message["params"]["requestId"].to_string();
            if let Some(call) = open_calls.remove(&id) {
                call.abort();
            }
            continue;
        }
        if calls.len() >= MAX_CALLS {
            calls.join_next().await;
        }
        let id = message.get("id").map(Value::to_string);
        let is_handshake = message["method"] == "initialize";
        let proxy = Arc::clone(&proxy);
        if is_handshake {
            // Later messages depend on the version that it agrees on.
            proxy.forward(message).await;
            continue;
        }
        let call = calls.spawn(async move { proxy.forward(message).await });
        if let Some(id) = id {
            open_calls.insert(id, call);
        }
    }
    let finished = async { while calls.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, finished).await;
    Ok(ExitCode::SUCCESS)
}

struct Proxy {
    client: Client,
    /// The version of a handshake; unset for clients that have none.
    version: Mutex<Option<String>>,
}

impl Proxy {
    /// Sends the message to the daemon, and what it responds to the client.
    async fn forward(&self, message: Value) {
        let id = message.get("id").cloned();
        if let Err(failure) = self.exchange(&message, id.as_ref()).await {
            let hint = match failure {
                ClientError::Unreachable { .. } => {
                    "; start one with axed serve, or name another with AXED_SERVER"
                }
                _ => "",
            };
            let text = format!("{failure}{hint}");
            match id {
                Some(id) => write(&error(Some(id), INTERNAL_ERROR, &text)),
                None => output::eprint_line(format_args!("axed: {text}")),
            }
        }
    }

    async fn exchange(&self, message: &Value, id: Option<&Value>) -> Result<(), ClientError> {
        let request = self.client.with_authorization(self.client.post(&["mcp"]));
        let response = self
            .with_headers(request, message)
            .body(message.to_string())
            .send()
            .await
            .map_err(|source| self.unreachable(source))?;
        let kind = response.headers().get(CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if kind.starts_with("text/event-stream") {
            return self.write_stream(response).await;
        }
        let status = response.status();
        let body = response.bytes().await;
        let body = body.map_err(|source| self.unreachable(source))?;
        let Some(id) = id else {
            // Nobody expects a response to a notification.
            return Ok(());
        };
        match serde_json::from_slice::<Value>(&body) {
            Ok(mut answer) if answer["jsonrpc"] == "2.0" => {
                // A message that the daemon could not read, or a key that it does not know.
                if answer.get("id").is_none() {
                    answer["id"] = id.clone();
                }
                if message["method"] == "initialize" {
                    let version = answer["result"]["protocolVersion"].as_str();
                    *self.version.lock() = version.map(str::to_owned);
                }
                write(&answer);
                Ok(())
            }
            _ => Err(self.invalid(format!("no MCP server at /mcp: status {status}"))),
        }
    }

    /// The headers that repeat parts of the message, so that the client needs none.
    fn with_headers(&self, request: RequestBuilder, message: &Value) -> RequestBuilder {
        let mut request = request
            .header(ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json");
        let (method, params) = (message["method"].as_str(), &message["params"]);
        let version = params["_meta"]["io.modelcontextprotocol/protocolVersion"].as_str();
        let Some(version) = version else {
            let agreed = self.version.lock().clone();
            return match agreed {
                Some(version) => request.header("mcp-protocol-version", version),
                None => request,
            };
        };
        request = request
            .header("mcp-protocol-version", header_value(version))
            .header("mcp-method", header_value(method.unwrap_or_default()));
        let names = ["name", "uri", "taskId"].map(|member| params[member].as_str());
        match names.into_iter().flatten().next() {
            Some(name) => request.header("mcp-name", header_value(name)),
            None => request,
        }
    }

    /// Writes the messages of a stream of Server-Sent Events, each of which has one line of data.
    async fn write_stream(&self, response: Response) -> Result<(), ClientError> {
        let mut bytes = response.bytes_stream();
        let mut line = Vec::new();
        while let Some(chunk) = bytes.next().await {
            let chunk = chunk.map_err(|source| self.unreachable(source))?;
            for part in chunk.split_inclusive(|byte| *byte == b'\n') {
                line.extend_from_slice(part);
                if line.ends_with(b"\n") {
                    let data = line.strip_prefix(b"data:");
                    if let Some(message) = data.and_then(|data| serde_json::from_slice(data).ok()) {
                        write(&message);
                    }
                    line.clear();
                } else if line.len() as u64 > MAX_MESSAGE {
                    return Err(self.invalid("a message is too long".to_owned()));
                }
            }
        }
        Ok(())
    }

    fn unreachable(&self, source: reqwest::Error) -> ClientError {
        ClientError::Unreachable {
            base: self.client.base().to_owned(),
            source: source.without_url(),
        }
    }

    fn invalid(&self, why: String) -> ClientError {
        ClientError::InvalidResponse {
            base: self.client.base().to_owned(),
            why,
        }
    }
}

/// The text, encoded if it is no value of a header.
fn header_value(text: &str) -> String {
    let is_plain = !text.starts_with("=?base64?")
        && text.trim() == text
        && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    match is_plain {
        true => text.to_owned(),
        false => format!("=?base64?{}?=", BASE64_STANDARD.encode(text)),
    }
}

fn error(id: Option<Value>, code: i64, message: &str) -> Value {
    let mut response = json!({ "jsonrpc": "2.0", "error": { "code": code, "message": message } });
    if let Some(id) = id {
        response["id"] = id;
    }
    response
}

/// A client that has closed stdout closes stdin too, which ends the command.
fn write(message: &Value) {
    let _ = output::print_json_line(message);
}

#[cfg(test)]
mod tests {
    use super::header_value;

    #[test]
    fn names_that_are_no_header_values_are_encoded() {
        assert_eq!(header_value("axed://runs/run_1"), "axed://runs/run_1");
        assert_eq!(header_value("ä"), "=?base64?w6Q=?=");
        assert_eq!(header_value(" a"), "=?base64?IGE=?=");
    }
}
