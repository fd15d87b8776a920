//! Measures axed against a bare handler that makes the same provider calls, on the machine it runs on, and prints ratios.
//!
//! `ulimit -n 65536; cargo bench --bench axed [-- single tree others many start durability cancel fanout fork recover
//! tools long trees streams]`. Two parts only run if they are named: `-- stored` fills a store with a million runs, `-- soak` tries how
//! much axed bears. Provider, bare handler and daemon are processes of their own, so that each one's memory can be read; the first two are
//! this binary in another role.

mod bare;
mod cancel;
mod cost;
mod fanout;
mod fork;
mod growth;
mod load;
mod others;
mod pin;
mod process;
mod provider;
mod recover;
mod soak;
mod streams;
mod table;
mod tools;

use std::path::Path;
use std::time::{Duration, Instant};

use cost::{INPUT, SINGLE, measure_load};
use load::{burst, request};
use process::{Process, open_files};
use table::Table;

/// Clients that ask at once.
const CLIENTS: [usize; 3] = [1, 16, 64];
/// How long each throughput is measured, after a warm-up of a fifth of it.
const MEASURE: Duration = Duration::from_secs(3);
/// Runs in the crowd.
const CROWD: usize = 5000;
/// What the crowd's provider takes for its answer.
const PROVIDER_DELAY: Duration = Duration::from_secs(2);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let flag_value = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).map(String::as_str)
    };
    match flag_value("--role") {
        Some("provider") => {
            let delay = flag_value("--delay-ms").and_then(|text| text.parse().ok());
            return provider::serve(Duration::from_millis(delay.unwrap_or_default()));
        }
        Some("bare") => {
            return bare::serve(flag_value("--provider").expect("--provider").to_owned());
        }
        Some("once") => {
            return bare::run_once(flag_value("--provider").expect("--provider").to_owned());
        }
        Some("soak") => {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let home = Path::new(flag_value("--home").expect("--home"));
            let is_mounted = flag_value("--data") == Some("mounted");
            return exit(runtime.block_on(soak::run(home, is_mounted)));
        }
        _ => {}
    }
    // `cargo test --all-targets` starts benches as well, unoptimised.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return println!("measures only under `cargo bench --bench axed`");
    }
    // What is no flag names a part.
    let parts: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    // It takes long and measures nothing: only if it is named.
    if parts.contains(&"soak") {
        return exit(soak::start());
    }
    let mut table = Table::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(measure(&parts, &mut table));
    table.print_verdict();
}

/// Measures these parts, or all.
async fn measure(parts: &[&str], table: &mut Table) {
    let is_selected = |part: &str| parts.is_empty() || parts.contains(&part);
    if is_selected("single") {
        cost::single(table).await;
    }
    if is_selected("tree") {
        cost::tree(table).await;
    }
    if is_selected("others") {
        others::measure(table).await;
    }
    if is_selected("many") {
        many(table).await;
    }
    if is_selected("idle") || is_selected("start") {
        start(table).await;
    }
    if is_selected("durability") {
        durability(table).await;
    }
    if is_selected("cancel") {
        cancel::measure(table).await;
    }
    if is_selected("fanout") {
        fanout::measure(table).await;
    }
    if is_selected("fork") {
        fork::measure(table).await;
    }
    if is_selected("recover") {
        recover::measure(table).await;
    }
    if is_selected("tools") {
        tools::overhead(table).await;
    }
    if is_selected("long") {
        tools::long(table).await;
    }
    if is_selected("trees") {
        growth::trees(table).await;
    }
    // Fills a store with a million runs: only if it is named.
    if parts.contains(&"stored") {
        growth::stored(table).await;
    }
    if is_selected("streams") {
        streams::measure(table).await;
    }
}

/// Ends this process, with an error unless everything held.
fn exit(success: bool) {
    std::process::exit(i32::from(!success));
}

/// Single-turn runs at both durabilities, against the handler that commits nothing.
async fn durability(table: &mut Table) {
    table.title("single-turn runs by what a commit survives");
    let provider = Process::provider(Duration::ZERO);
    for clients in CLIENTS {
        let bare = Process::bare(&provider);
        let baseline = measure_load(
            &bare,
            &request(&bare.address, "/run", INPUT),
            clients,
            MEASURE,
        )
        .await;
        table.throughput(&format!("bare handler, {clients} clients"), &baseline);
        drop(bare);
        for (durability, floor) in [("process", 0.30), ("power", 0.0)] {
            let config = format!("[data]\ndurability = \"{durability}\"");
            let axed = Process::axed_with(&provider, &config, &[]);
            let load = measure_load(
                &axed,
                &request(&axed.address, SINGLE, INPUT),
                clients,
                MEASURE,
            )
            .await;
            let name = format!("axed, {durability}, {clients} clients");
            table.ratio(&name, &load, &baseline, floor);
        }
    }
}

/// A crowd of runs whose provider is slow.
async fn many(table: &mut Table) {
    table.title(&format!(
        "{CROWD} runs at once, the provider takes {PROVIDER_DELAY:?}"
    ));
    let files = open_files();
    if files < 12_000 {
        println!(
            "  left out: this needs 12000 open files for each process and {files} are allowed; \
             run `ulimit -n 65536` first"
        );
        return;
    }
    let provider = Process::provider(PROVIDER_DELAY);

    let bare = Process::bare(&provider);
    let crowd = burst(&request(&bare.address, "/run", INPUT), CROWD).await;
    let bare_peak = bare.peak_kib();
    table.note(&format!(
        "bare handler: {:.2} s, {} errors, peak {} KiB",
        crowd.wall.as_secs_f64(),
        crowd.errors,
        bare_peak
    ));
    drop(bare);

    let axed = Process::axed(&provider);
    let crowd = burst(&request(&axed.address, SINGLE, INPUT), CROWD).await;
    let peak = axed.peak_kib();
    let wall = crowd.wall.as_secs_f64();
    table.at_most("axed, clients wait: seconds until all are done", wall, 5.0);
    table.at_most("axed, clients wait: errors", crowd.errors as f64, 0.0);
    let ratio = peak as f64 / bare_peak as f64;
    table.at_most(
        "axed, clients wait: peak memory to bare handler's",
        ratio,
        1.3,
    );
    drop(axed);

    let axed = Process::axed(&provider);
    let idle = axed.resident_kib();
    let begin = Instant::now();
    let mut accepted = 0;
    let http_request = request(&axed.address, "/agents/solo/runs", INPUT);
    accepted += load::send_all(&http_request, 64, CROWD).await;
    load::wait_until_none(&axed.address, &["queued", "running"]).await;
    let wall = begin.elapsed().as_secs_f64();
    let failed = load::count(&axed.address, "failed").await;
    table.at_most("axed, nobody waits: seconds until all are done", wall, 5.0);
    let errors = (CROWD - accepted + failed) as f64;
    table.at_most("axed, nobody waits: errors", errors, 0.0);
    let kib_per_run = axed.peak_kib().saturating_sub(idle) as f64 / CROWD as f64;
    table.at_most(
        "axed, nobody waits: KiB a run above idle",
        kib_per_run,
        40.0,
    );
}

/// Starting, and doing nothing.
async fn start(table: &mut Table) {
    table.title("start and rest");
    let provider = Process::provider(Duration::ZERO);
    let mut times = Vec::new();
    let mut idle = 0;
    for _ in 0..7 {
        let begin = Instant::now();
        let axed = Process::axed(&provider);
        load::get(&axed.address, "/livez").await;
        times.push(begin.elapsed());
        idle = idle.max(axed.resident_kib());
    }
    times.sort();
    let median = times[times.len() / 2].as_secs_f64() * 1000.0;
    table.at_most("cold start to first answer, ms (median of 7)", median, 50.0);
    table.at_most("idle, MiB", idle as f64 / 1024.0, 20.0);
}
