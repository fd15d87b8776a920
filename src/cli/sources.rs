//! Flags that name the configuration file and the agent directories, and the configuration they lead to.

use std::path::PathBuf;

use crate::cli::exit;
use crate::config::Config;
use crate::config::environment::process_environment;
use crate::config::load::{self, Flags};
use crate::telemetry;

#[derive(Clone, Debug, Default, clap::Args)]
pub struct Sources {
    /// Configuration file [default: $AXED_CONFIG, config/axed.toml or /etc/axed/axed.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of agent files; repeatable, the first wins [default: agents]
    #[arg(long, value_name = "DIR")]
    pub agents: Vec<PathBuf>,
}

impl Sources {
    pub fn are_given(&self) -> bool {
        self.config.is_some() || !self.agents.is_empty()
    }

    /// As arguments of another command, each with a space before it.
    pub fn to_arguments(&self) -> String {
        let config = self.config.iter().map(|file| ("config", file));
        let agents = self.agents.iter().map(|dir| ("agents", dir));
        let flags = config.chain(agents);
        let flags = flags.map(|(flag, path)| format!(" --{flag} {}", path.display()));
        flags.collect()
    }

    pub fn flags(self) -> Flags {
        Flags {
            config: self.config,
            agents: self.agents,
            ..Flags::default()
        }
    }
}

/// Loads the configuration of an interactive command. The command prints its own messages, so only errors are logged
/// unless the configuration sets another level.
pub fn load_quiet_config(flags: &Flags) -> anyhow::Result<Config> {
    let mut config = load::load(flags, &process_environment())?;
    config
        .telemetry
        .log
        .get_or_insert_with(|| "error".to_owned());
    telemetry::init(&config.telemetry).map_err(exit::InvalidInput)?;
    Ok(config)
}
