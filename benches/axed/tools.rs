//! What tool calls cost: a call's own overhead in a reply of many, and whole runs of growing length.

use std::time::{Duration, Instant};

use crate::load::{self, burst, measure_throughput, request};
use crate::process::Process;
use crate::table::Table;

/// Calls of the long reply.
const CALLS: usize = 100;
/// How long the runs of each kind are hammered, several times in turn.
const MEASURE: Duration = Duration::from_secs(1);
/// Times that each kind has its turn: the machine's swings fall on all of them.
const ROUNDS: usize = 7;
/// Lengths of a run, in tool calls; a reply makes five.
const LENGTHS: [usize; 4] = [10, 50, 100, 200];
/// Runs at once whose memory is taken together: one alone is lost among the allocator's pages.
const CROWD: usize = 32;
/// Runs of each length whose times are taken.
const TIMED: usize = 41;

/// The name of the model sets the number of replies, the calls in each, and the tool.
fn agent(model: &str, workdir: &str) -> String {
    format!(
        "model = \"bench/{model}\"\nworkdir = {workdir:?}\n\
         tools = [\"list_directory\", \"read_file\"]\n[sub_agents_config]\nparallel = false"
    )
}

/// One tool call: the difference between replies of one call and of many, in runs of the same two turns.
pub async fn overhead(table: &mut Table) {
    let kinds = [
        ("list_directory of an empty workdir", "list_directory"),
        ("a call that its schema refuses", "refused"),
        ("a call of a tool that is not there", "no_such_tool"),
    ];
    let workdir = tempfile::tempdir().expect("a directory");
    let provider = Process::provider(Duration::ZERO);
    for (name, tool) in kinds {
        table.title(&format!(
            "a tool call ({name}): runs of two turns with {CALLS} calls against runs with one"
        ));
        let workdir_path = workdir.path().display().to_string();
        let agents = [
            ("one", agent(&format!("steps-1-1-{tool}"), &workdir_path)),
            (
                "many",
                agent(&format!("steps-1-{CALLS}-{tool}"), &workdir_path),
            ),
            ("none", agent("steps-0-0-none", &workdir_path)),
        ];
        let agents = agents.each_ref().map(|(name, rest)| (*name, rest.as_str()));
        let axed = Process::axed_with(&provider, "", &agents);
        let mut walls = [const { Vec::new() }; 3];
        let mut cpus = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            for (kind, (agent, _)) in agents.iter().enumerate() {
                let http_request = request(
                    &axed.address,
                    &format!("/agents/{agent}/runs?wait=30"),
                    crate::INPUT,
                );
                let before = axed.cpu();
                let load = measure_throughput(&http_request, 1, MEASURE).await;
                assert_eq!(load.errors, 0, "{tool}");
                let cpu_per_run = (axed.cpu() - before) / load.responses.max(1) as f64;
                walls[kind].push(load.median.as_secs_f64() * 1e6);
                cpus[kind].push(cpu_per_run * 1e6);
            }
        }
        let [one, many, none] = walls.map(median);
        table.number("µs a run without a call, one turn", none);
        table.number("µs a run with one call, two turns", one);
        let calls = (CALLS - 1) as f64;
        table.at_most("µs a further call", (many - one) / calls, 200.0);
        let [one, many, _] = cpus.map(median);
        table.number("µs of processor time a further call", (many - one) / calls);
    }
}

/// Runs with more and more tool calls: what one call costs must not grow with the calls before it.
pub async fn long(table: &mut Table) {
    let workdir = tempfile::tempdir().expect("a directory");
    let line = "Every hotel has a cellar, a hall and an attic.\n";
    std::fs::write(workdir.path().join("f"), line.repeat(4096 / line.len())).expect("a file");
    let empty = tempfile::tempdir().expect("a directory");
    for (name, tool, dir) in [
        (
            "list_directory of an empty workdir",
            "list_directory",
            &empty,
        ),
        ("read_file of 4 KiB", "read_file", &workdir),
    ] {
        table.title(&format!(
            "runs of growing length: {name}, five calls a reply, one after another"
        ));
        let mut shortest = None;
        for calls in LENGTHS {
            let model = format!("steps-{}-5-{tool}", calls / 5);
            let agent_toml = agent(&model, &dir.path().display().to_string());
            let provider = Process::provider(Duration::ZERO);
            let config = "[limits]\nloop_warn = 0\nloop_stop = 0";
            let axed = Process::axed_with(&provider, config, &[("long", &agent_toml)]);
            let path = "/agents/long/runs?wait=60";
            let http_request = request(&axed.address, path, crate::INPUT);
            // What the first runs allocate stays; it is no part of a run's own memory.
            load::send_all(&http_request, 1, 5).await;
            let before = axed.cpu();
            let mut walls = Vec::with_capacity(TIMED);
            for _ in 0..TIMED {
                let begin = Instant::now();
                assert_eq!(
                    load::send_all(&http_request, 1, 1).await,
                    1,
                    "{calls} calls"
                );
                walls.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            let cpu = (axed.cpu() - before) / TIMED as f64 * 1e6;
            let idle_kib = axed.resident_kib();
            let crowd = burst(&http_request, CROWD).await;
            assert_eq!(crowd.errors, 0, "{calls} calls");
            let memory = axed.peak_kib().saturating_sub(idle_kib) as f64 / CROWD as f64;
            let [wall, cpu, memory] = [median(walls), cpu, memory].map(|it| it / calls as f64);
            table.note(&format!(
                "{calls:>4} calls: {wall:>7.1} µs a call, {cpu:>7.1} µs of processor time, {memory:>6.2} KiB"
            ));
            // Each turn sends the whole conversation, so the bytes on the wire grow with the square of the turns.
            match shortest {
                None => shortest = Some((wall, cpu)),
                Some((first, first_cpu)) if calls == 200 => {
                    table.at_most("time a call at 200 to that at 10", wall / first, 2.0);
                    table.number("processor time a call, likewise", cpu / first_cpu);
                }
                Some(_) => {}
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
