//! A temporary daemon in this process, so that commands always use HTTP.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::Context;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::app::Daemon;
use crate::cli::client::Client;
use crate::cli::output;
use crate::cli::sources::{Sources, load_quiet_config};
use crate::config::Config;
use crate::config::environment::process_environment;
use crate::config::load::{self, Flags};
use crate::store::StoreError;

/// The configuration of a daemon in this process. Without `data`, its runs and memories are in the `TempDir`.
pub fn private_config(
    sources: Sources,
    data: Option<PathBuf>,
) -> anyhow::Result<(Config, Option<TempDir>)> {
    let temp_dir = match data {
        Some(_) => None,
        None => Some(temp_dir()?),
    };
    let flags = sources.flags();
    let mut config = load_quiet_config(&Flags {
        data,
        ..flags.clone()
    })?;
    match &temp_dir {
        Some(temp_dir) => config = config.with_data_dir(temp_dir.path().join("data")),
        // The daemon's files are in the configured one.
        None => {
            let configured = load::load(&flags, &process_environment())?;
            config.configured_data_dir = Some(configured.data.dir);
        }
    }
    // The configured database is that of the daemon.
    config.data.url = None;
    Ok((config, temp_dir))
}

/// A directory that only this user can read. Removed when it is dropped.
pub fn temp_dir() -> anyhow::Result<TempDir> {
    let private = Permissions::from_mode(0o700);
    let mut dir = tempfile::Builder::new();
    let created = dir.prefix("axed-").permissions(private).tempdir();
    created.context("could not create a temporary directory")
}

/// Says on stderr that the memory of an agent that has one is not kept.
pub async fn warn_of_lost_memory(client: &Client, agent: &str) {
    // If the agent cannot be read, the run fails and says why.
    if let Ok(definition) = client.get_agent(agent).await
        && definition["memory"]["enabled"] == true
    {
        output::eprint_line(format_args!(
            "axed: the memory of {agent} is not kept; --data DIR reads and keeps it"
        ));
    }
}

/// The data directory may be that of a daemon, which can do the same.
pub fn mention_server(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(StoreError::Locked { .. }) => {
            anyhow::anyhow!("{error}; or have the daemon there do it with --server URL")
        }
        _ => error,
    }
}

/// Starts a daemon on a free loopback port, runs `action` with a client of it, and stops it.
pub async fn with_daemon<T>(
    mut config: Config,
    action: impl AsyncFnOnce(&Client) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    config.server.listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    config.server.metrics_listen = None;
    config.server.path_prefix = String::new();
    config.agents.watch = false;
    // Only this process uses the daemon, so it needs no keys.
    config.auth.keys.clear();
    let daemon = Daemon::start(config, false).await.map_err(mention_server)?;
    let client = Client::new(&format!("http://{}", daemon.address))?;
    let stop = CancellationToken::new();
    let run_action = async {
        let result = action(&client).await;
        stop.cancel();
        result
    };
    let (served, result) = tokio::join!(daemon.serve(stop.clone(), stop.clone()), run_action);
    let result = result?;
    served?;
    Ok(result)
}
