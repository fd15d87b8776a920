//! What a run costs elsewhere: by a process of its own, and in a handler whose agents are rig's. Neither keeps anything.

use std::time::Duration;

use crate::cost::{self, INPUT, ROUND, ROUNDS, SINGLE, TREE, measure_load};
use crate::load::request;
use crate::pin::Cores;
use crate::process::Process;
use crate::table::Table;

const CLIENTS: usize = 16;

/// Measures all of them in turn, each with one core.
pub async fn measure(table: &mut Table) {
    let cores = Cores::split();
    let provider = cores.beside(|| Process::provider(Duration::ZERO));
    let bare = cores.measured(|| Process::bare(&provider));
    let axed = cores.measured(|| Process::axed(&provider));
    let rig = cores.measured(|| Process::rig(&provider));
    if rig.is_none() {
        println!(
            "\n  without rig: run `cargo build --release --manifest-path benches/rig/Cargo.toml` first"
        );
    }
    let rig = rig.as_ref();

    table.title("single-turn runs, beside what else there is");
    let processes = [
        ("bare handler", Some((&bare, "/run"))),
        ("a process for each run", Some((&bare, "/process"))),
        ("rig", rig.map(|rig| (rig, "/run"))),
        ("axed", Some((&axed, SINGLE))),
    ];
    compare(table, &processes).await;

    table.title("runs with three parallel children, beside what else there is");
    let processes = [
        ("bare handler", Some((&bare, "/tree"))),
        ("rig", rig.map(|rig| (rig, "/tree"))),
        ("axed", Some((&axed, TREE))),
    ];
    compare(table, &processes).await;
}

/// The first one is what the others are compared with.
async fn compare(table: &mut Table, processes: &[(&str, Option<(&Process, &str)>)]) {
    let mut rounds = vec![Vec::new(); processes.len()];
    for _ in 0..ROUNDS {
        for ((_, process), loads) in processes.iter().zip(&mut rounds) {
            if let Some((process, path)) = process {
                let request = request(&process.address, path, INPUT);
                loads.push(measure_load(process, &request, CLIENTS, ROUND).await);
            }
        }
    }
    let mut floor = None;
    for ((name, _), loads) in processes.iter().zip(rounds) {
        if !loads.is_empty() {
            let load = cost::median(loads);
            let name = format!("{name}, {CLIENTS} clients");
            table.cost(&name, &load, floor.get_or_insert(load), None);
        }
    }
}
