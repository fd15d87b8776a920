//! `axed openapi`: prints the OpenAPI document, without a daemon.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::cli::output;
use crate::config::environment::process_environment;
use crate::config::load::{self, Flags};
use crate::web::router;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  axed openapi > openapi.json")]
pub struct Args {
    /// Configuration file [default: $AXED_CONFIG, config/axed.toml or /etc/axed/axed.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Prints the response of `/openapi.json` for this configuration.
pub fn openapi(args: Args) -> anyhow::Result<ExitCode> {
    let flags = Flags {
        config: args.config,
        ..Flags::default()
    };
    let config = load::load(&flags, &process_environment())?;
    let metrics = config.server.metrics_listen.is_none();
    let document = router::openapi_json(&config.server.path_prefix, metrics, config.clients);
    output::print_line(format_args!("{}", document.trim_end()))?;
    Ok(ExitCode::SUCCESS)
}
