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

/// Kills a daemon with 10,000 active runs, and starts another.
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
    measure_recovery(table, "hang", 10_000, 10_000).await;
    table.title(&format!(
        "recovery: 100 trees of 1 + 9 + 90 runs, {KILLS} kills"
    ));
    measure_recovery(table, "t0", 100, 9_000).await;
}

async fn measure_recovery(table: &mut Table, agent: &str, roots: usize, in_flight: usize) {
    let provider = Process::provider(Duration::ZERO);
    let mut axed = Process::axed_with(&provider, "", &AGENTS);
    let request = load::request(
        &axed.address,
        &format!("/agents/{agent}/runs"),
        "{\"input\":\"go\"}",
    );
    let begin = Instant::now();
    assert_eq!(load::send_all(&request, 64, roots).await, roots, "accepted");
    let in_flight = in_flight.to_string();
    load::wait_for_body(&provider.address, "/busy", &in_flight).await;
    table.number(
        "seconds to bring them there the first time",
        begin.elapsed().as_secs_f64(),
    );
    let (mut listen_times, mut recovery_times) = (Vec::new(), Vec::new());
    for _ in 0..KILLS {
        // Killing and waiting for the dead is not what is measured; reading its directory and binding the port is.
        let home = axed.kill();
        load::wait_for_body(&provider.address, "/busy", "0").await;
        let begin = Instant::now();
        axed = Process::axed_in(home);
        listen_times.push(begin.elapsed().as_secs_f64());
        load::wait_for_body(&provider.address, "/busy", &in_flight).await;
        recovery_times.push(begin.elapsed().as_secs_f64());
    }
    listen_times.sort_by(f64::total_cmp);
    recovery_times.sort_by(f64::total_cmp);
    table.at_most(
        "seconds until it listens, median",
        listen_times[KILLS / 2],
        3.0,
    );
    table.number("seconds until it listens, worst", listen_times[KILLS - 1]);
    table.number(
        "seconds until all are at work, median",
        recovery_times[KILLS / 2],
    );
    table.number(
        "seconds until all are at work, worst",
        recovery_times[KILLS - 1],
    );
    table.number("MiB at the most", axed.peak_kib() as f64 / 1024.0);
}
