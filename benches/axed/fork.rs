//! How long a fork takes to its first new request: of a run at turn 50, in a tree of 50 runs.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::load;
use crate::process::Process;
use crate::table::Table;

/// Forks that are timed, one after another.
const FORKS: usize = 21;

const AGENT: (&str, &str) = (
    "deep",
    "model = \"bench/steps-49-1-call_agent\"\nsub_agents = [\"leaf\"]",
);

/// The provider replies at once and the reply ends the fork, so that the time to its end is more than what is looked for.
pub async fn measure(table: &mut Table) {
    table.title("forks: at turn 50 of a root with 49 children");
    let provider = Process::provider(Duration::ZERO);
    let config = "[limits]\nloop_warn = 0\nloop_stop = 0";
    let axed = Process::axed_with(&provider, config, &[AGENT]);
    let path = "/agents/deep/runs?wait=60";
    let source = run(&load::post(&axed.address, path, "{\"input\":\"go\"}").await);
    assert_eq!(source["tree"]["runs"], 50, "{source}");
    let id = source["id"].as_str().expect("an id");
    let mut times = Vec::with_capacity(FORKS);
    for _ in 0..FORKS {
        let begin = Instant::now();
        let path = format!("/runs/{id}/fork?wait=30");
        let response = load::post(&axed.address, &path, "{\"at\":{\"turn\":50}}").await;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        let fork = run(&response);
        assert_eq!(fork["tree"]["reused"]["runs"], 49, "{fork}");
        assert_eq!(fork["status"], "completed", "{fork}");
    }
    times.sort_by(f64::total_cmp);
    let name = "ms from the request to the end of a fork, median";
    table.at_most(name, times[FORKS / 2], 20.0);
    table.number("ms, worst", times[FORKS - 1]);
}

fn run(response: &str) -> Value {
    serde_json::from_str(response).expect("a run")
}
