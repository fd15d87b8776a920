//! `axed health`: the health check of a container.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::client::Client;
use crate::cli::output;
use crate::cli::server;
use crate::cli::sources::Sources;
use crate::config::environment::process_environment;
use crate::config::load;

/// Longer than the daemon waits for its store: its response says why it is not ready.
const TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed health --server http://127.0.0.1:8080 && echo ready"
)]
pub struct Args {
    /// Address of the daemon [default: $AXED_SERVER, or as configured]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    sources: Sources,
}

/// Exit code 0 if the daemon accepts new runs, otherwise 1.
pub async fn health(args: Args) -> anyhow::Result<ExitCode> {
    match check_server(args).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            output::eprint_line(format_args!("axed: {error:#}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

async fn check_server(args: Args) -> anyhow::Result<()> {
    let server = match server::named(args.server.as_deref()) {
        Some(server) => server,
        None => {
            let config = load::load(&args.sources.flags(), &process_environment())?;
            format!("http://{}", connect_address(config.server.listen))
        }
    };
    Ok(Client::new(&server)?.check_readiness(TIMEOUT).await?)
}

/// A daemon that listens on all addresses is reached by loopback.
fn connect_address(mut listen: SocketAddr) -> SocketAddr {
    match listen.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => listen.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => listen.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listen
}
