//! A temporary daemon in this process, so that commands always use HTTP.

use tokio_util::sync::CancellationToken;

use crate::app::Daemon;
use crate::cli::client::Client;
use crate::config::Config;

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
    let daemon = Daemon::start(config, false).await?;
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
