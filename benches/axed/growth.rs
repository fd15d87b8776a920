//! What a run costs as the store fills, and what a run of a tree costs as the tree grows: neither may grow with it.

use std::time::Duration;

use crate::cost::{INPUT, ROUND, ROUNDS, SINGLE, measure_load, median};
use crate::load::{request, send_all};
use crate::pin::Cores;
use crate::process::Process;
use crate::table::Table;

/// Stored runs before each measurement.
const STORED: [usize; 3] = [1_000, 100_000, 1_000_000];
const CLIENTS: usize = 16;
/// Children that a root calls at once.
const CHILDREN: [usize; 4] = [1, 4, 16, 64];
/// Runs of each size of tree together, about.
const RUNS: usize = 6_000;

/// Measures runs of one turn beside more and more stored ones.
pub async fn stored(table: &mut Table) {
    table.title("single-turn runs of 16 clients by the number of stored runs");
    let cores = Cores::split();
    let provider = cores.beside(|| Process::provider(Duration::ZERO));
    let axed = cores.measured(|| Process::axed(&provider));
    let http_request = request(&axed.address, SINGLE, INPUT);
    let (mut stored, mut costs) = (0, Vec::new());
    for count in STORED {
        // The rounds before have stored some.
        let missing = usize::saturating_sub(count, stored);
        assert_eq!(send_all(&http_request, 64, missing).await, missing);
        stored += missing;
        let before = stored;
        let mut rounds = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let load = measure_load(&axed, &http_request, CLIENTS, ROUND).await;
            stored += load.responses;
            rounds.push(load);
        }
        let load = median(rounds);
        table.throughput(&format!("after {before} runs"), &load);
        costs.push(load.cpu.as_secs_f64());
    }
    let growth = costs[costs.len() - 1] / costs[0];
    table.at_most("processor time with the most to the least", growth, 1.25);
    table.number("MiB in memory", axed.resident_kib() as f64 / 1024.0);
}

/// Measures trees of growing size.
pub async fn trees(table: &mut Table) {
    table.title("a root that calls its children at once, by their number, one tree after another");
    let cores = Cores::split();
    let provider = cores.beside(|| Process::provider(Duration::ZERO));
    let agents = CHILDREN.map(|children| {
        let toml = format!("model = \"bench/fan-{children}-leaf\"\nsub_agents = [\"leaf\"]");
        (format!("fan{children}"), toml)
    });
    let agents: Vec<_> = agents
        .iter()
        .map(|(name, toml)| (&**name, &**toml))
        .collect();
    let axed = cores.measured(|| Process::axed_with(&provider, "", &agents));
    let mut costs = Vec::new();
    for children in CHILDREN {
        let path = format!("/agents/fan{children}/runs?wait=30");
        let http_request = request(&axed.address, &path, INPUT);
        let trees = RUNS / (children + 1);
        assert_eq!(send_all(&http_request, 1, trees / 5).await, trees / 5);
        let before = axed.cpu();
        assert_eq!(send_all(&http_request, 1, trees).await, trees);
        let cpu = (axed.cpu() - before) * 1e6 / (trees * (children + 1)) as f64;
        table.number(
            &format!("µs of processor time a run, {children} children"),
            cpu,
        );
        costs.push(cpu);
    }
    let growth = costs[costs.len() - 1] / costs[0];
    table.at_most("a run of the largest tree to the smallest", growth, 1.25);
}
