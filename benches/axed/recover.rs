//! How long a daemon takes to be there again after `kill -9`, with many unfinished runs on its record.

use std::time::{Duration, Instant};

use crate::load;
use crate::process::{Process, open_files};
use crate::table::Table;

/// Times that the daemon is killed.
const KILLS: usize = 5;

const AGENTS: [(&str, &str); 3] = [
    ("t0", "model = \"bench/fan-9-t1\"\nsub_agents = [\"t1\"]"),
    (
        "t1",
        "model = \"bench/fan-10-hang\"\nsub_agents = [\"hang\"]",
    ),
    ("hang", "model = \"bench/hang\""),
];

/// Kills a daemon with 10,000 runs at work, and starts another.
pub async fn measure(table: &mut Table) {
    let files = open_files();
    if files < 12_000 {
        table.title("recovery");
        println!(
            "  left out: this needs 12000 open files and {files} are allowed; run `ulimit -n 65536` first"
        );
        return;
    }
    table.title(&format!(
        "recovery: 10000 root runs that wait for their provider, {KILLS} kills"
    ));
    recovered(table, "hang", 10_000, 10_000).await;
    table.title(&format!(
        "recovery: 100 trees of 1 + 9 + 90 runs, {KILLS} kills"
    ));
    recovered(table, "t0", 100, 9_000).await;
}

async fn recovered(table: &mut Table, agent: &str, roots: usize, waiting: usize) {
    let provider = Process::provider(Duration::ZERO);
    let mut axed = Process::axed_with(&provider, "", &AGENTS);
    let ask = load::request(
        &axed.address,
        &format!("/agents/{agent}/runs"),
        "{\"input\":\"go\"}",
    );
    let begin = Instant::now();
    assert_eq!(load::each(&ask, 64, roots).await, roots, "accepted");
    let waiting = waiting.to_string();
    load::until_body(&provider.address, "/busy", &waiting).await;
    table.number(
        "seconds to bring them there the first time",
        begin.elapsed().as_secs_f64(),
    );
    let (mut listening, mut at_work) = (Vec::new(), Vec::new());
    for _ in 0..KILLS {
        // Killing and waiting for the dead is not what is measured; reading its directory and binding the port is.
        let home = axed.kill();
        load::until_body(&provider.address, "/busy", "0").await;
        let begin = Instant::now();
        axed = Process::axed_in(home);
        listening.push(begin.elapsed().as_secs_f64());
        load::until_body(&provider.address, "/busy", &waiting).await;
        at_work.push(begin.elapsed().as_secs_f64());
    }
    listening.sort_by(f64::total_cmp);
    at_work.sort_by(f64::total_cmp);
    table.most(
        "seconds until it listens, median",
        listening[KILLS / 2],
        3.0,
    );
    table.number("seconds until it listens, worst", listening[KILLS - 1]);
    table.number("seconds until all are at work, median", at_work[KILLS / 2]);
    table.number("seconds until all are at work, worst", at_work[KILLS - 1]);
    table.number("MiB at the most", axed.peak_kib() as f64 / 1024.0);
}
