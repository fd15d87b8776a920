//! `axed serve`: starts the daemon, prints its address on stdout, and handles signals.

use std::convert::Infallible;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::app::Daemon;
use crate::catalog::reload::Catalog;
use crate::cli::exit::InvalidInput;
use crate::cli::signals::{SignalAction, Signals};
use crate::cli::sources::Sources;
use crate::cli::{output, service_manager};
use crate::config::environment::process_environment;
use crate::config::load::{self, Flags};
use crate::config::{Config, LogFormat};
use crate::settings::document::{self, ProblemKind};
use crate::store::open;
use crate::telemetry;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed serve
  axed serve --listen 127.0.0.1:0 --data /var/lib/axed
  AXED_TELEMETRY__LOG=debug axed serve --config /etc/axed/axed.toml"
)]
pub struct Args {
    #[command(flatten)]
    sources: Sources,
    /// Data directory for runs and memories [default: as configured]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Address to listen on; port 0 is a free port [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Log format on stderr [default: human on a terminal, else json]
    #[arg(long, value_name = "FORMAT", value_parser = ["human", "json"])]
    log_format: Option<String>,
    /// Allow other machines without a key; only for trusted networks
    #[arg(long)]
    insecure_no_auth: bool,
}

/// Serves until a signal, then until every run has ended. A second signal stops at once.
pub async fn serve(args: Args) -> anyhow::Result<ExitCode> {
    let flags = Flags {
        data: args.data,
        listen: args.listen,
        log_format: args.log_format,
        ..args.sources.flags()
    };
    let config = load::load(&flags, &process_environment())?;
    check_urls(&config, &flags)?;
    telemetry::init(&config.telemetry).map_err(InvalidInput)?;
    let log_format = telemetry::log_format(&config.telemetry);
    let signals = Signals::new()?;
    let daemon = Daemon::start(config, args.insecure_no_auth).await?;
    output::print_line(format_args!("axed listening on http://{}", daemon.address))?;
    match (daemon.console_url(), log_format) {
        (Some(url), LogFormat::Human) => {
            output::eprint_line(format_args!("axed: the console is at {url}"));
        }
        // Whatever reads the log expects JSON.
        (Some(url), LogFormat::Json) => info!("The console is at {url}"),
        (None, _) => {}
    }

    service_manager::notify_ready(daemon.address);
    let catalog = daemon.catalog().clone();
    let (stop, stop_now) = (CancellationToken::new(), CancellationToken::new());
    tokio::select! {
        served = daemon.serve(stop.clone(), stop_now.clone()) => served.map(|()| ExitCode::SUCCESS),
        never = handle_signals(signals, catalog, stop, stop_now) => match never {},
        never = service_manager::feed_watchdog() => match never {},
    }
}

/// The error names the file and line, or the variable, that has the URL.
fn check_urls(config: &Config, flags: &Flags) -> anyhow::Result<()> {
    let wrong = open::check_urls(&config.data);
    if wrong.is_empty() {
        return Ok(());
    }
    let loaded = load::load_with_sources(flags, &process_environment())?;
    let problem = |(key, why): (&str, String)| {
        let text = format!("{key} {why}");
        (loaded.positions).problem(key, text, ProblemKind::RuleViolation)
    };
    let problems: Vec<_> = wrong.into_iter().map(problem).collect();
    let text = document::format_problems(&problems, &loaded.file, "\n");
    Err(InvalidInput(text).into())
}

async fn handle_signals(
    mut signals: Signals,
    catalog: Arc<Catalog>,
    stop: CancellationToken,
    stop_now: CancellationToken,
) -> Infallible {
    loop {
        match signals.recv().await {
            SignalAction::Reload => {
                service_manager::notify_reloading();
                let catalog = Arc::clone(&catalog);
                // Reading the directories and fetching documents block.
                let reloaded = tokio::task::spawn_blocking(move || catalog.reload_all());
                if let Err(error) = reloaded.await {
                    warn!("Reloading the agents failed: {error}");
                }
                service_manager::notify_reloaded();
            }
            SignalAction::Stop if stop.is_cancelled() => {
                warn!("Stopping at once; running runs are interrupted");
                stop_now.cancel();
            }
            SignalAction::Stop => {
                info!("Stopping after every run has ended; another signal stops at once");
                service_manager::notify_stopping();
                stop.cancel();
            }
        }
    }
}
