//! `axed test`: runs recordings against the agents of today, in this process and without a network.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream;

use crate::app::Services;
use crate::cli::in_process;
use crate::cli::output;
use crate::cli::signals::Signals;
use crate::cli::sources::Sources;
use crate::cli::test::case::{Case, CaseResult, Outcome};
use crate::cli::test::report::Report;
use crate::config::Config;
use crate::engine::recording::playback::Live;

mod case;
mod diff;
mod ended_run;
mod files;
mod judge;
pub mod junit;
mod report;
mod request;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "axed runs save RUN tests/name.toml makes a recording. A test runs its agent as
it is today; models and tools answer from the recording. It fails at the first
difference between what a model is sent now and what is recorded, or if its
[expect] does not hold.

Examples:
  axed test
  axed test tests/planner.toml --accept
  axed test --live-models --repeat 5 --pass 0.8

Exit codes:
  0  every test passed
  1  a test failed
  2  a file or an agent is invalid, or not found
  3  a live provider failed"
)]
pub struct Args {
    /// Recordings, or directories with them [default: tests]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Take over into the files what is sent now
    #[arg(long, conflicts_with_all = ["live", "live_models", "live_tools", "repeat"])]
    accept: bool,
    /// Ask the models; only the assertions decide. Costs money
    #[arg(long)]
    live_models: bool,
    /// Execute the tools, and use MCP servers
    #[arg(long)]
    live_tools: bool,
    /// Both --live-models and --live-tools
    #[arg(long)]
    live: bool,
    /// Run each test this often
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Share of the repetitions that must pass, such as 0.8
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = parse_share)]
    pass: f64,
    /// Tests at the same time [default: twice the number of processors]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    jobs: Option<u16>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Write the results as JUnit XML to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    sources: Sources,
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be between 0 and 1, such as 0.8".to_owned()),
    }
}

impl Args {
    fn live(&self) -> Live {
        Live {
            models: self.live || self.live_models,
            tools: self.live || self.live_tools,
        }
    }
}

pub async fn test(args: Args) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let found = files::find(&args.paths)?;
    let (mut config, _temp_dir) = in_process::private_config(args.sources.clone(), None)?;
    prepare_config(&mut config);
    let services = Arc::new(Services::build_for_tests(&config).await?);
    let mut signals = Signals::new()?;
    let run_all = run_all(&args, &services, found);
    let results = tokio::select! {
        results = run_all => Ok(results),
        () = signals.wait_for_stop() => Err(anyhow::anyhow!("stopped before the tests had ended")),
    };
    if let Some(services) = Arc::into_inner(services) {
        services.close().await;
    }
    let results = results?;
    let report = Report::new(&results, started.elapsed());
    if let Some(path) = &args.junit {
        junit::write(path, &results, started.elapsed())?;
    }
    match args.json {
        true => output::print_json(&report.to_json(&results))?,
        false => output::eprint_styled(&report.summary()),
    }
    Ok(exit_code(&results))
}

/// A test listens nowhere, exports nothing and needs no keys.
fn prepare_config(config: &mut Config) {
    config.agents.watch = false;
    config.auth.keys.clear();
    config.telemetry.otlp = None;
}

async fn run_all(
    args: &Args,
    services: &Arc<Services>,
    found: Vec<files::FoundFile>,
) -> Vec<CaseResult> {
    let default_jobs = std::thread::available_parallelism().map_or(2, |count| count.get() * 2);
    let jobs = args.jobs.map_or(default_jobs, usize::from);
    let settings = case::CaseSettings {
        live: args.live(),
        repeat: args.repeat,
        pass: args.pass,
        accept: args.accept,
    };
    let cases = found.into_iter().map(|file| {
        let case = Case::new(file, settings);
        let services = Arc::clone(services);
        async move { case.run(&services.runner).await }
    });
    let mut progress = report::Progress::new(args.json);
    let mut results = Vec::new();
    // In the order of the files, so that the output is the same each time.
    let mut running = stream::iter(cases).buffered(jobs);
    while let Some(result) = running.next().await {
        progress.show(&result);
        results.push(result);
    }
    progress.clear();
    results
}

fn exit_code(results: &[CaseResult]) -> ExitCode {
    let has = |outcome: fn(&Outcome) -> bool| results.iter().any(|it| outcome(&it.outcome));
    let code = if has(|it| matches!(it, Outcome::Invalid { .. })) {
        2
    } else if has(|it| matches!(it, Outcome::ProviderFailed { .. })) {
        3
    } else {
        u8::from(has(|it| !matches!(it, Outcome::Passed)))
    };
    ExitCode::from(code)
}
