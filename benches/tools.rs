//! How long `grep` takes over a tree, against ripgrep on the same files with the same rules, and over a small one.
//!
//! `cargo bench --bench tools -- grep [directory]`; a large tree, such as cargo's registry of sources. Without `rg` on
//! the path only our own time is printed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axed::config;
use axed::domain::message::ToolCall;
use axed::domain::run::{RunId, Scope};
use axed::tools::registry::ToolRegistry;
use axed::tools::{
    AdHocRequest, AgentEnd, AnswerToQuestion, AskRequest, AwaitRequest, CallContext, ChildRequest,
    Delegate, WaitRequest,
};
use axed::workdirs::registry::Workdirs;
use axed::workdirs::reserved::ReservedPaths;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde_json::value::{RawValue, to_raw_value};

/// A term in no file, one in few files, and one without a literal.
const PATTERNS: [&str; 3] = [
    "xyzzy_nowhere",
    "fn openat2_beneath|RESOLVE_BENEATH",
    r"\bZ\w{11}Q\w+\b",
];
const ROUNDS: usize = 7;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --all-targets` starts benches as well, unoptimised.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return println!("measures only under `cargo bench --bench tools`");
    }
    let mut positional = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'));
    if positional.next().is_some_and(|part| part != "grep") {
        return println!("there is only the part `grep`");
    }
    let dir = positional
        .next()
        .map_or(env!("CARGO_MANIFEST_DIR"), String::as_str);
    let dir = Path::new(dir);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .build()
        .expect("a runtime");
    let small = tempfile::tempdir().expect("a directory");
    for number in 0..10 {
        std::fs::write(small.path().join(format!("f{number}")), "some text\n").expect("a file");
    }
    println!(
        "{:<40} {:>12} {:>12} {:>6}",
        "pattern", "grep", "rg", "ratio"
    );
    for pattern in PATTERNS {
        let ours = median(|| runtime.block_on(grep(dir, pattern)));
        let theirs =
            ripgrep(dir, pattern).map(|_| median(|| ripgrep(dir, pattern).unwrap_or_default()));
        let ratio = theirs.map_or(f64::NAN, |theirs| ours.as_secs_f64() / theirs.as_secs_f64());
        println!(
            "{pattern:<40} {ours:>12.2?} {:>12.2?} {ratio:>6.2}",
            theirs.unwrap_or_default()
        );
    }
    let ours = median(|| runtime.block_on(grep(small.path(), "text")));
    println!("{:<40} {ours:>12.2?}", "ten small files");
}

fn median(mut once: impl FnMut() -> Duration) -> Duration {
    once();
    let mut times: Vec<_> = (0..ROUNDS).map(|_| once()).collect();
    times.sort();
    times[ROUNDS / 2]
}

async fn grep(dir: &Path, pattern: &str) -> Duration {
    let tools = config::Tools {
        max_result: 256 << 10,
        attachments: Default::default(),
        ..config::Tools::default()
    };
    let registry = ToolRegistry::new(&tools, &ReservedPaths::default(), &[], Default::default());
    let tool = registry.get("grep").expect("grep");
    let call = ToolCall {
        invalid_arguments: None,
        id: "call".to_owned(),
        provider_id: String::new(),
        name: "grep".to_owned(),
        arguments: to_raw_value(&serde_json::json!({"pattern": pattern}))
            .expect("JSON")
            .into(),
    };
    let workdirs = Workdirs::new(dir.to_owned(), &[], ReservedPaths::default());
    let workdir = workdirs.open(None, None).expect("a workdir");
    let scope = Scope::root(RunId::new(), None);
    let context = CallContext {
        key: None,
        allowed_hosts: &[],
        scope: &scope,
        workdir: Some(&workdir),
        delegate: &NoDelegate,
    };
    let start = Instant::now();
    tool.call(&call, context).await.expect("a result");
    start.elapsed()
}

/// `None` if ripgrep is not installed.
fn ripgrep(dir: &Path, pattern: &str) -> Option<Duration> {
    let start = Instant::now();
    let same_rules = [
        "-n",
        "--hidden",
        "--no-require-git",
        "--no-ignore-parent",
        "--no-ignore-global",
        "-g",
        "!.git",
    ];
    let mut command = Command::new("rg");
    command
        .args(same_rules)
        .arg(pattern)
        .arg(".")
        .current_dir(dir);
    command.output().ok()?;
    Some(start.elapsed())
}

struct NoDelegate;

impl Delegate for NoDelegate {
    fn run_child<'a>(&'a self, _: ChildRequest<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async { Err("nobody".to_owned()) })
    }

    fn check_quota<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn run_ad_hoc<'a>(&'a self, _: AdHocRequest<'a>) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async { Err("nobody".to_owned()) })
    }

    fn await_agents<'a>(
        &'a self,
        _: AwaitRequest<'a>,
    ) -> BoxFuture<'a, Result<Vec<AgentEnd>, String>> {
        unreachable!("no tool here waits")
    }

    fn cancel_agent(&self, _: RunId) -> BoxFuture<'_, Result<(), String>> {
        unreachable!("no tool here cancels")
    }

    fn ask(&self, _: AskRequest) -> BoxFuture<'_, Result<AnswerToQuestion, String>> {
        unreachable!("no tool here asks")
    }

    fn wait(&self, _: WaitRequest) -> BoxFuture<'_, Result<Option<Arc<RawValue>>, String>> {
        unreachable!("no tool here waits")
    }

    fn wait_began(&self, _: &str) -> Option<Timestamp> {
        None
    }

    fn recall<'a>(&'a self, _: &'a str, _: usize) -> BoxFuture<'a, Result<String, String>> {
        unreachable!("no tool here recalls")
    }

    fn wait_until_connected(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
