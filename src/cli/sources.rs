//! The flags that say where configuration and agents are, and the configuration that they lead to.

use std::path::PathBuf;

use crate::cli::exit;
use crate::config::Config;
use crate::config::environment::process_environment;
use crate::config::load::{self, Flags};
use crate::telemetry;

/// Where configuration and agents are found.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Sources {
    /// The server's configuration [default: AXED_CONFIG, else config/axed.toml where it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A directory of agent files; may be given several times, the first that has a name wins [default: agents]
    #[arg(long, value_name = "DIR")]
    pub agents: Vec<PathBuf>,
}

impl Sources {
    pub fn flags(self) -> Flags {
        Flags {
            config: self.config,
            agents: self.agents,
            ..Flags::default()
        }
    }
}

/// The configuration of a command that a person waits for: it tells what happened in its own words, so only errors are
/// logged unless the configuration says otherwise.
pub fn load_quiet_config(flags: &Flags) -> anyhow::Result<Config> {
    let mut config = load::load(flags, &process_environment())?;
    config
        .telemetry
        .log
        .get_or_insert_with(|| "error".to_owned());
    telemetry::init(&config.telemetry).map_err(exit::InvalidInput)?;
    Ok(config)
}
