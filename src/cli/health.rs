//! `axed health`: what a container's health check calls.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::client::Client;
use crate::cli::output;
use crate::cli::sources::Sources;
use crate::config::environment::process_environment;
use crate::config::load;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The daemon's address [default: where the configuration says that it listens]
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    sources: Sources,
}

/// 0 where the daemon answers, 1 otherwise, whatever the reason.
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
    let server = match args.server {
        Some(server) => server,
        None => {
            let config = load::load(&args.sources.flags(), &process_environment())?;
            format!("http://{}", connect_address(config.server.listen))
        }
    };
    Ok(Client::new(&server)?
        .check_liveness(Duration::from_secs(3))
        .await?)
}

/// Who listens everywhere is reached on this machine.
fn connect_address(mut listen: SocketAddr) -> SocketAddr {
    match listen.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => listen.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => listen.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listen
}
