//! Which daemon a command uses: `--server`, `AXED_SERVER`, or the default address; and the key for it.

use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::cli::keys::ClientKey;
use crate::config::environment;

const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";

/// The daemon of a command that needs one.
#[derive(Clone, Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct DaemonArgs {
    /// Address of the daemon [default: $AXED_SERVER or http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    key: ClientKey,
}

impl DaemonArgs {
    pub fn client(&self) -> anyhow::Result<Client> {
        let server = named(self.server.as_deref());
        Ok(self
            .key
            .client(server.as_deref().unwrap_or(DEFAULT_SERVER))?)
    }
}

/// The daemon of a command that otherwise runs in this process.
#[derive(Clone, Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct OptionalDaemonArgs {
    /// Use this daemon [default: $AXED_SERVER; without it, this process]
    #[arg(long, value_name = "URL", conflicts_with_all = ["config", "agents", "data"])]
    server: Option<String>,
    #[command(flatten)]
    key: ClientKey,
}

impl OptionalDaemonArgs {
    /// `None` to run in this process: neither `--server` nor `AXED_SERVER` names a daemon, or other flags, which only
    /// this process can use, override the variable.
    pub fn client(&self, has_local_flags: bool) -> anyhow::Result<Option<Client>> {
        let server = match has_local_flags {
            true => self.server.clone(),
            false => named(self.server.as_deref()),
        };
        match server {
            Some(server) => Ok(Some(self.key.client(&server)?)),
            None if self.key.is_given() => Err(InvalidInput(
                "--key is for a daemon: name one with --server or AXED_SERVER".to_owned(),
            )
            .into()),
            None => Ok(None),
        }
    }
}

/// The daemon that the flag names, otherwise the environment.
pub fn named(flag: Option<&str>) -> Option<String> {
    flag.map(str::to_owned).or_else(environment::client_server)
}
