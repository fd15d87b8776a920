//! `axed mcp`: a client that starts it as a program.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{hangs, says};
use crate::support::within_timeout;

/// The program and its pipes.
struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    fn start(app: &TestApp) -> Self {
        let mut command = axed_command(&app.path(""), &["mcp", "--server", &app.daemon.url]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().expect("the program");
        let output = child.stdout.take().expect("stdout");
        Self {
            input: child.stdin.take(),
            output: BufReader::new(output).lines(),
            child,
        }
    }

    async fn send(&mut self, message: &Value) {
        let input = self.input.as_mut().expect("stdin");
        let line = format!("{message}\n");
        input.write_all(line.as_bytes()).await.expect("a pipe");
    }

    async fn receive(&mut self) -> Value {
        let line = within_timeout("a message", self.output.next_line()).await;
        let line = line.expect("a pipe").expect("a message");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Closes stdin, as a client does that ends.
    async fn close(mut self) {
        self.input.take();
        let status = within_timeout("the program's end", self.child.wait()).await;
        assert!(status.expect("a status").success());
    }
}

fn call(id: u32, input: &str) -> Value {
    json!({
        "jsonrpc": "2.0",
        "id": id,
        "method": "tools/call",
        "params": {
            "name": "solo",
            "arguments": { "input": input },
            "_meta": {
                "progressToken": id,
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
            },
        },
    })
}

#[tokio::test]
async fn calls_and_their_progress_pass_through_stdio() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [says("done")]);
    let mut program = Program::start(&app);
    program.send(&call(1, "go")).await;
    let mut methods = Vec::new();
    let result = loop {
        let message = program.receive().await;
        match message["method"].as_str() {
            Some(method) => methods.push(method.to_owned()),
            None => break message,
        }
    };
    assert_eq!(result["id"], 1);
    assert_eq!(result["result"]["content"][0]["text"], "done");
    assert!(methods.iter().all(|it| it == "notifications/progress"));
    assert!(methods.len() >= 3, "{methods:?}");
    let input = program.input.as_mut().expect("stdin");
    input.write_all(b"nonsense\n").await.expect("a pipe");
    assert_eq!(program.receive().await["error"]["code"], -32700);
    program.close().await;
}

#[tokio::test]
async fn a_cancelled_call_and_the_clients_end_cancel_runs() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.will("solo", [hangs(), hangs()]);
    let mut program = Program::start(&app);
    for id in [1, 2] {
        program.send(&call(id, "go")).await;
        app.provider.wait_for_request("solo", id as usize).await;
    }
    let cancelled = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": 1 },
    });
    program.send(&cancelled).await;
    app.provider.wait_for_disconnects(1).await;
    program.close().await;
    app.provider.wait_for_disconnects(2).await;
    let ended = |got: &crate::support::app::ApiResponse| {
        let runs = got.json()["data"].as_array().expect("runs").clone();
        runs.len() == 2 && runs.iter().all(|run| run["status"] == "cancelled")
    };
    app.get_until("/runs", ended).await;
}

#[tokio::test]
async fn a_daemon_that_is_not_there_is_an_error_of_the_request() {
    let app = TestApp::spawn().await;
    let mut command = axed_command(&app.path(""), &["mcp", "--server", "http://127.0.0.1:1"]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn().expect("the program");
    let output = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let input = child.stdin.take();
    let mut program = Program {
        child,
        input,
        output,
    };
    let list = json!({ "jsonrpc": "2.0", "id": "a", "method": "tools/list" });
    program.send(&list).await;
    let answer = program.receive().await;
    assert_eq!(answer["id"], "a");
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.contains("start one with axed serve"), "{message}");
    program.close().await;
}
