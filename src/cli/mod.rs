//! The commands: reads the command line, hands over to one short function each, and turns what comes back into an exit
//! code. Knows the daemon only from outside, over HTTP, except for starting it.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::tools::shell::supervisor;

mod agent_toml;
mod agents;
mod client;
mod data;
mod demo;
mod exit;
mod gc;
mod health;
mod in_process;
mod keys;
mod models;
mod openapi;
mod output;
mod progress;
mod run;
mod runs;
mod serve;
mod signals;
mod sources;
mod temp_dir;
mod tree;

/// Parses the command line and runs the command it names.
pub fn main() -> ExitCode {
    // A model's command is started through this binary, which stands guard over it. No user types that.
    if let Some(code) = supervisor::run_subcommand(std::env::args_os().skip(1)) {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            if error.use_stderr() {
                // It quotes arguments, which may be copied from what a model wrote.
                output::eprint_line(format_args!("{}", error.render().to_string().trim_end()));
            } else {
                // A reader of the help who has gone away does not make the help a failure.
                let _ = error.print();
            }
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::eprint_line(format_args!("axed: could not start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(cli.command.run());
    // A read of stdin that nobody waits for any more would hold up the end of the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result.unwrap_or_else(|error| {
        output::eprint_line(format_args!("axed: {error:#}"));
        ExitCode::from(exit::code_for_error(&error))
    })
}

/// Serves LLM agents over HTTP: an agent is a TOML file, a client posts an input, agents delegate to one another.
#[derive(Debug, Parser)]
#[command(name = "axed", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the agents over HTTP until a signal says stop
    Serve(serve::Args),
    /// Show agents delegating to one another, without a key and without a network
    Demo(demo::Args),
    /// Run one agent and print its final text
    Run(run::Args),
    /// List, show, write and check agent files
    #[command(subcommand)]
    Agents(agents::Command),
    /// List, show and stop the runs of a daemon
    #[command(subcommand)]
    Runs(runs::Command),
    /// Have agents' models analyse their memories, then trim them
    Gc(gc::Args),
    /// Check and copy the database
    #[command(subcommand)]
    Data(data::Command),
    /// Make keys for clients
    #[command(subcommand)]
    Keys(keys::Command),
    /// Print what is known of models: prices, windows, abilities
    Models(models::Args),
    /// Print the OpenAPI document of the HTTP API
    Openapi(openapi::Args),
    /// Ask a daemon whether it is alive: exit code 0 or 1
    Health(health::Args),
}

impl Command {
    async fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => serve::serve(args).await,
            Self::Demo(args) => demo::demo(args).await,
            Self::Run(args) => run::run(args).await,
            Self::Agents(command) => agents::agents(command),
            Self::Runs(command) => runs::runs(command).await,
            Self::Gc(args) => gc::gc(args).await,
            Self::Data(command) => data::data(command),
            Self::Keys(command) => keys::keys(command),
            Self::Models(args) => models::models(args),
            Self::Openapi(args) => openapi::openapi(args),
            Self::Health(args) => health::health(args).await,
        }
    }
}
