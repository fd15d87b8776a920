//! How long a cancel takes to settle: from the request to the answer that the whole tree has ended.

use std::time::{Duration, Instant};

use crate::load;
use crate::process::{Process, open_files};
use crate::table::Table;

/// Trees of 1 + 3 + 9 + 27 + 81 runs that are cancelled one after another.
const TREES: usize = 100;
/// Trees of 1 + 9 + 90 + 900 + 9,000 runs.
const BIG_TREES: usize = 5;

/// The default bound of a tree is 1,000 runs.
const CONFIG: &str = "[runs]\nmax_tree = 20000\n";

const SMALL_TREE: [(&str, &str); 5] = [
    (
        "s0",
        "model = \"bench/fan-3-s1\"\nsub_agents = [\"s1\"]\n[sub_agents_config]\nmax_depth = 4",
    ),
    ("s1", "model = \"bench/fan-3-s2\"\nsub_agents = [\"s2\"]"),
    ("s2", "model = \"bench/fan-3-s3\"\nsub_agents = [\"s3\"]"),
    (
        "s3",
        "model = \"bench/fan-3-hang\"\nsub_agents = [\"hang\"]",
    ),
    ("hang", "model = \"bench/hang\""),
];
const BIG_TREE: [(&str, &str); 5] = [
    (
        "b0",
        "model = \"bench/fan-9-b1\"\nsub_agents = [\"b1\"]\n[sub_agents_config]\nmax_depth = 4",
    ),
    ("b1", "model = \"bench/fan-10-b2\"\nsub_agents = [\"b2\"]"),
    ("b2", "model = \"bench/fan-10-b3\"\nsub_agents = [\"b3\"]"),
    (
        "b3",
        "model = \"bench/fan-10-hang\"\nsub_agents = [\"hang\"]",
    ),
    ("hang", "model = \"bench/hang\""),
];

/// Cancels trees whose leaves wait for their provider.
pub async fn measure(table: &mut Table) {
    table.title(&format!(
        "cancel: {TREES} trees of 121 runs, one after another"
    ));
    let times = measure_cancels(&SMALL_TREE, 81, TREES).await;
    table.number(
        "milliseconds until all have ended, median",
        times[TREES / 2],
    );
    table.at_most(
        "milliseconds until all have ended, p99",
        times[TREES * 99 / 100],
        100.0,
    );
    table.number("milliseconds until all have ended, worst", times[TREES - 1]);

    table.title(&format!(
        "cancel: {BIG_TREES} trees of 10000 runs, one after another"
    ));
    let files = open_files();
    if files < 12_000 {
        println!(
            "  left out: this needs 12000 open files and {files} are allowed; run `ulimit -n 65536` first"
        );
        return;
    }
    table.number(
        "milliseconds a bare client takes to drop 9000 requests",
        measure_drops(9000).await,
    );
    let times = measure_cancels(&BIG_TREE, 9000, BIG_TREES).await;
    table.number("milliseconds until all have ended, best", times[0]);
    table.at_most(
        "milliseconds until all have ended, median",
        times[BIG_TREES / 2],
        2000.0,
    );
    table.number(
        "milliseconds until all have ended, worst",
        times[BIG_TREES - 1],
    );
}

/// Milliseconds of each cancel, sorted.
async fn measure_cancels(agents: &[(&str, &str)], leaves: usize, trees: usize) -> Vec<f64> {
    let provider = Process::provider(Duration::ZERO);
    let axed = Process::axed_with(&provider, CONFIG, agents);
    let root = agents[0].0;
    let mut times = Vec::with_capacity(trees);
    for _ in 0..trees {
        let id = load::start_run(&axed.address, root).await;
        load::wait_for_body(&provider.address, "/busy", &leaves.to_string()).await;
        // Commits of the creation of the tree are not part of the measurement.
        tokio::time::sleep(Duration::from_millis(20 + leaves as u64 / 10)).await;
        let path = format!("/runs/{id}/cancel?wait=60");
        let begin = Instant::now();
        let response = load::post(&axed.address, &path, "{}").await;
        times.push(begin.elapsed().as_secs_f64() * 1000.0);
        assert!(response.contains("\"status\":\"cancelled\""), "{response}");
        load::wait_for_body(&provider.address, "/busy", "0").await;
    }
    times.sort_by(f64::total_cmp);
    times
}

/// Milliseconds in which a client without anything around it hangs up so many times and the provider has noticed.
async fn measure_drops(count: usize) -> f64 {
    let provider = Process::provider(Duration::ZERO);
    let body = r#"{"model":"hang","messages":[{"role":"user","content":"Say hello."}]}"#;
    let request = load::request(&provider.address, "/v1/chat/completions", body);
    let streams = load::send_without_reading(&request, count).await;
    load::wait_for_body(&provider.address, "/busy", &count.to_string()).await;
    let begin = Instant::now();
    drop(streams);
    load::wait_for_body(&provider.address, "/busy", "0").await;
    begin.elapsed().as_secs_f64() * 1000.0
}
