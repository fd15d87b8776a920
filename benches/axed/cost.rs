//! What a run costs: its processor time beside that of a bare handler that makes the same provider calls.
//!
//! The measured process has one core; the clients and the provider share another one. Both processes are measured in
//! turn, five rounds each, and the ratio is that of the medians.

use std::time::Duration;

use crate::load::{Load, measure_throughput, request};
use crate::pin::Cores;
use crate::process::Process;
use crate::provider;
use crate::table::Table;

pub const ROUNDS: usize = 5;
/// How long a round measures, after a warm-up of a fifth of it.
pub const ROUND: Duration = Duration::from_millis(1500);

/// The input of each run.
pub const INPUT: &str = r#"{"input":"Say hello to the whole office."}"#;
/// A run of one turn that its client waits for.
pub const SINGLE: &str = "/agents/solo/runs?wait=30";
/// A run whose agent delegates to three children at once.
pub const TREE: &str = "/agents/root/runs?wait=30";

/// A kind of run, and the bare handler's route that does the same.
struct Work {
    title: &'static str,
    run: &'static str,
    bare: &'static str,
    /// The numbers of clients, and the highest ratio at each.
    clients: &'static [(usize, Option<f64>)],
}

const ONE_TURN: Work = Work {
    title: "single-turn runs, accepted, executed, committed and waited for",
    run: SINGLE,
    bare: "/run",
    clients: &[(1, None), (16, Some(2.0)), (64, Some(2.0))],
};

const THREE_CHILDREN: Work = Work {
    title: "runs with three parallel children (five provider calls)",
    run: TREE,
    bare: "/tree",
    clients: &[(16, Some(1.6)), (64, Some(1.6))],
};

/// Measures runs of one turn.
pub async fn single(table: &mut Table) {
    let loads = measure(table, &ONE_TURN).await;
    let alone = &loads[0];
    let tail = alone.p99.as_secs_f64() / alone.median.as_secs_f64();
    table.at_most("axed, 1 client: p99 to median", tail, 3.0);
}

/// Measures runs with three children.
pub async fn tree(table: &mut Table) {
    measure(table, &THREE_CHILDREN).await;
}

/// Measures one kind of run at each number of clients.
async fn measure(table: &mut Table, work: &Work) -> Vec<Load> {
    table.title(work.title);
    let cores = Cores::split();
    let provider = cores.beside(|| Process::provider(Duration::ZERO));
    let ceiling = provider::direct_request(&provider.address);
    let max_load = measure_throughput(&ceiling, 64, ROUND).await;
    table.throughput("provider without axed, 64 clients", &max_load);
    let bare = cores.measured(|| Process::bare(&provider));
    let axed = cores.measured(|| Process::axed(&provider));
    let bare_request = request(&bare.address, work.bare, INPUT);
    let axed_request = request(&axed.address, work.run, INPUT);
    let mut loads = Vec::new();
    for &(clients, limit) in work.clients {
        let (mut floors, mut rounds) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            floors.push(measure_load(&bare, &bare_request, clients, ROUND).await);
            rounds.push(measure_load(&axed, &axed_request, clients, ROUND).await);
        }
        let (floor, load) = (median(floors), median(rounds));
        table.throughput(&format!("bare handler, {clients} clients"), &floor);
        table.cost(&format!("axed, {clients} clients"), &load, &floor, limit);
        loads.push(load);
    }
    loads
}

/// A throughput with the processor time that the process took for each answer.
pub async fn measure_load(
    process: &Process,
    request: &[u8],
    clients: usize,
    time: Duration,
) -> Load {
    let before = process.cpu();
    let load = measure_throughput(request, clients, time).await;
    let cpu = (process.cpu() - before) / load.responses.max(1) as f64;
    Load {
        cpu: Duration::from_secs_f64(cpu),
        ..load
    }
}

/// The round in the middle by processor time, with the errors of all.
pub fn median(mut rounds: Vec<Load>) -> Load {
    rounds.sort_by_key(|load| load.cpu);
    let errors = rounds.iter().map(|load| load.errors).sum();
    Load {
        errors,
        ..rounds[rounds.len() / 2]
    }
}
