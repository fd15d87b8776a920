//! Parses the command line, runs the command, and turns its result into an exit code. Commands use a daemon only over
//! HTTP, except to start one.

use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};

use crate::cli::style::When;
use crate::telemetry::log_queue;
use crate::tools::shell::supervisor;

mod age;
mod agents;
mod approval_prompt;
mod approvals;
mod auth;
mod batch;
mod chat;
mod chat_input;
mod chat_view;
mod check;
mod client;
mod completions;
mod config;
mod data;
mod dataset;
mod demo;
mod dry_run;
mod eval;
mod event_lines;
mod exit;
mod gc;
mod health;
mod in_process;
mod keys;
mod mcp;
mod models;
mod openapi;
mod output;
mod pending;
mod progress;
mod reconnects;
mod rollouts;
mod run;
mod run_input;
mod runs;
mod runtime;
mod schedules;
mod serve;
mod server;
mod service_manager;
mod sessions;
mod signals;
mod sources;
mod style;
mod table;
mod test;
mod tree;
mod usage;
mod whole_file;

pub fn main() -> ExitCode {
    // A model's command runs under this binary as its supervisor. Users never type this subcommand.
    if let Some(code) = supervisor::run_subcommand(std::env::args_os().skip(1)) {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_help_or_error(&error),
    };
    cli.color.apply();
    let runtime = match runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::eprint_line(format_args!("axed: could not start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(cli.command.run());
    // A blocked read of stdin would delay the end of the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    log_queue::flush();
    result.unwrap_or_else(|error| {
        output::eprint_line(format_args!("axed: {error:#}"));
        if let Some(hint) = exit::hint_for_error(&error) {
            output::eprint_line(format_args!("axed: {hint}"));
        }
        ExitCode::from(exit::code_for_error(&error))
    })
}

/// Prints what there is instead of a command: help, the version, or what is wrong with the arguments.
fn print_help_or_error(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        // It quotes arguments, which may be copied from a model's text.
        output::eprint_line(format_args!("{}", error.render().to_string().trim_end()));
    } else {
        When::of_arguments(std::env::args_os().skip(1)).apply();
        if let Err(error) = output::print_safe(&error.render().ansi().to_string()) {
            output::eprint_line(format_args!("axed: {error:#}"));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Serves LLM agents over HTTP. An agent is a TOML file; agents can call others.
#[derive(Debug, Parser)]
#[command(
    name = "axed",
    version,
    arg_required_else_help = true,
    after_help = "Start here:
  axed demo                       agents that delegate, without a key
  axed agents init helper         a new agent file that explains every key
  axed run helper \"Say hello\"     one run in this process
  axed serve                      the HTTP API on http://127.0.0.1:8080

AXED_SERVER and AXED_KEY name the daemon and the key for it."
)]
struct Cli {
    /// When to use colours: auto, always or never
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        value_enum,
        default_value_t,
        hide_default_value = true,
        hide_possible_values = true
    )]
    color: When,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the agents over HTTP until SIGTERM or Ctrl-C
    Serve(serve::Args),
    /// Show agents that delegate, without an API key or network
    Demo(demo::Args),
    /// Run one agent and print its final text
    Run(run::Args),
    /// Talk with an agent in the terminal
    Chat(chat::Args),
    /// List, show, write and check agent files; roll candidates out
    #[command(subcommand)]
    Agents(agents::Command),
    /// Check the configuration, and show what is in force
    #[command(subcommand)]
    Config(config::Command),
    /// List, show, follow, cancel and approve the runs of a daemon
    #[command(subcommand)]
    Runs(runs::Command),
    /// Start many runs on a daemon, and print their results as lines of JSON
    Batch(batch::Args),
    /// Test agents against recorded runs, without a network
    Test(test::Args),
    /// Evaluate an agent over cases, against another version
    Eval(Box<eval::Args>),
    /// List, check and fill the datasets of evaluations
    #[command(subcommand)]
    Dataset(dataset::Command),
    /// List the tool calls of a daemon that wait for approval
    Approvals(approvals::Args),
    /// List, show and delete the sessions of a daemon
    #[command(subcommand)]
    Sessions(sessions::Command),
    /// List, trigger, pause and resume the schedules of a daemon
    #[command(subcommand)]
    Schedules(schedules::Command),
    /// Sum what the runs of a daemon have used: tokens, cost, durations
    Usage(usage::Args),
    /// Let models analyse the memories of their agents, then trim them
    Gc(gc::Args),
    /// Check and copy the database
    #[command(subcommand)]
    Data(data::Command),
    /// Serve the agents of a daemon as tools to an MCP client, over stdio
    Mcp(mcp::Args),
    /// Log in to MCP servers for the daemon
    #[command(subcommand)]
    Auth(auth::Command),
    /// Create keys for clients
    #[command(subcommand)]
    Keys(keys::Command),
    /// Print prices, context windows and abilities of models
    Models(models::Args),
    /// Print the OpenAPI document of the HTTP API
    Openapi(openapi::Args),
    /// Check whether a daemon accepts new runs: exit code 0 or 1
    Health(health::Args),
    /// Print a script that completes commands in a shell
    Completions(completions::Completions),
    /// Write manual pages
    Man(completions::Man),
}

impl Command {
    async fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => serve::serve(args).await,
            Self::Demo(args) => demo::demo(args).await,
            Self::Run(args) => run::run(args).await,
            Self::Chat(args) => chat::chat(args).await,
            Self::Agents(command) => agents::agents(command).await,
            Self::Config(command) => config::config(command),
            Self::Runs(command) => runs::runs(command).await,
            Self::Batch(args) => batch::batch(args).await,
            Self::Test(args) => test::test(args).await,
            Self::Dataset(command) => dataset::dataset(command).await,
            Self::Eval(args) => eval::eval(*args).await,
            Self::Approvals(args) => approvals::approvals(&args).await,
            Self::Sessions(command) => sessions::sessions(command).await,
            Self::Schedules(command) => schedules::schedules(command).await,
            Self::Usage(args) => usage::usage(&args).await,
            Self::Gc(args) => gc::gc(args).await,
            Self::Data(command) => data::data(command),
            Self::Mcp(args) => mcp::mcp(&args).await,
            Self::Auth(command) => auth::auth(command).await,
            Self::Keys(command) => keys::keys(command),
            Self::Models(args) => models::models(args),
            Self::Openapi(args) => openapi::openapi(args),
            Self::Health(args) => health::health(args).await,
            Self::Completions(args) => completions::completions(&args, Cli::command()),
            Self::Man(args) => completions::man(&args, Cli::command()),
        }
    }
}
