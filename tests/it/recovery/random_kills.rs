//! Trees of depth 3 under a daemon that is killed at any moment, again and again. `AXED_KILLS=200 cargo test --locked
//! recovery` is the long way; without it there are a few kills only.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use axed::config::environment::process_environment;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::events::{Event, assert_complete, count};
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::{ScriptedAnswer, calls, says};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::usage_sums::assert_equals_runs;

/// The number of kills without `AXED_KILLS`.
const KILLS: usize = 25;
/// Leaves below each mid.
const LEAVES: usize = 2;

/// A turn of a run, identified by the run's task: the provider sees no run's id.
type Turn = (String, usize);

#[tokio::test]
async fn random_kills_neither_lose_nor_repeat_a_run() {
    let kills = match process_environment().get("AXED_KILLS") {
        Some(number) => number.parse().expect("AXED_KILLS is a number"),
        None => KILLS,
    };
    let mut app = scenario().spawn().await;
    teach(&app.provider);
    let mut dice = Dice(0x0a_5e_ed);
    let mut story = Story::default();
    while story.kills < kills {
        let grove: Vec<_> = (0..1 + dice.below(3))
            .map(|_| story.tree(2 + dice.below(2)))
            .collect();
        let mut ids = Vec::new();
        for tree in &grove {
            let run = app.start("root", &tree.input()).await;
            ids.push(run.id().to_owned());
        }
        for _ in 0..1 + dice.below(3) {
            story.strike(&mut app, &mut dice, &grove, &ids).await;
        }
        for (tree, id) in grove.iter().zip(&ids) {
            tree.has_ended_well(&app, id).await;
        }
    }
    story.nothing_recorded_was_asked_again(&app.provider);
    story.is_accounted_for(&app).await;
    assert_equals_runs(&app).await;
    let usage = app.get("/usage").await.json();
    let totals = &usage["totals"];
    let tokens = totals["input_tokens"]
        .as_u64()
        .zip(totals["output_tokens"].as_u64());
    let (input, output) = tokens.expect("tokens");
    assert_eq!(usage["budgets"][0]["used_tokens"], input + output);
}

fn scenario() -> Setup {
    TestApp::setup()
        .config("[budgets.all]\ntokens = 1_000_000_000\nper = \"month\"")
        .agent(
            "root",
            "sub_agents = [\"mid\"]\n[sub_agents_config]\nmax_concurrent = 2",
        )
        .agent("mid", "sub_agents = [\"leaf\"]")
        .agent("leaf", "stream = true")
}

/// What the models reply: each mid delegates twice and repeats its results, and so does the root.
fn teach(provider: &FakeProvider) {
    provider.always("root", |seen| match seen.tool_results().as_slice() {
        [] => delegates("mid", &reported(seen), mids_of(&reported(seen))).with_usage(100, 10),
        results => says(format!("{}: {}", reported(seen), results.join(" | "))).with_usage(200, 20),
    });
    provider.always("mid", |seen| match seen.tool_results().as_slice() {
        [] => delegates("leaf", &reported(seen), LEAVES).with_usage(30, 3),
        results => says(format!("{} [{}]", reported(seen), results.join(", "))).with_usage(40, 4),
    });
    provider.always("leaf", |seen| says(reported(seen)).with_usage(5, 1));
}

fn delegates(agent: &str, own: &str, count: usize) -> ScriptedAnswer {
    calls((0..count).map(|n| {
        let task = format!("{own}.{n}");
        ("call_agent", json!({"agent": agent, "task": task}))
    }))
}

/// A run's task.
fn reported(seen: &RecordedRequest) -> String {
    let words = &seen.user_messages()[0];
    words.strip_prefix("Task: ").unwrap_or(words).to_owned()
}

fn mids_of(input: &str) -> usize {
    let (_, mids) = input.split_once('x').expect("an input as Tree::input");
    mids.parse().expect("a number")
}

/// A root and its expected outcome.
struct Tree {
    number: usize,
    mids: usize,
}

impl Tree {
    fn input(&self) -> String {
        format!("{}x{}", self.number, self.mids)
    }

    /// The final text that the models' rules make.
    fn text(&self) -> String {
        let input = self.input();
        let mids = (0..self.mids).map(|mid| {
            let leaves: Vec<_> = (0..LEAVES)
                .map(|leaf| format!("{input}.{mid}.{leaf}"))
                .collect();
            format!("{input}.{mid} [{}]", leaves.join(", "))
        });
        format!("{input}: {}", mids.collect::<Vec<_>>().join(" | "))
    }

    /// Every turn that must be requested.
    fn turns(&self) -> Vec<Turn> {
        let input = self.input();
        let mut turns = vec![(input.clone(), 1), (input.clone(), 2)];
        for mid in 0..self.mids {
            let mid = format!("{input}.{mid}");
            turns.extend([(mid.clone(), 1), (mid.clone(), 2)]);
            turns.extend((0..LEAVES).map(|leaf| (format!("{mid}.{leaf}"), 1)));
        }
        turns
    }

    /// Input tokens, output tokens and tool calls, each counted once.
    fn usage(&self) -> (u64, u64, u64) {
        let (mids, leaves) = (self.mids as u64, LEAVES as u64);
        (
            300 + mids * (70 + 5 * leaves),
            30 + mids * (7 + leaves),
            mids * (1 + leaves),
        )
    }

    async fn has_ended_well(&self, app: &TestApp, id: &str) {
        let run = app.find(id).await.wait_for_end().await;
        assert_eq!(run.output(), self.text());
        assert_eq!(run.tree_usage(), self.usage(), "{run:?}");
        let family = run.tree_runs().await;
        assert_eq!(family.len(), 1 + self.mids * (1 + LEAVES), "{family:#?}");
        assert_eq!(run["tree"]["runs"], family.len());
        let started_by: BTreeSet<_> = family
            .iter()
            .map(|run| {
                (
                    run["parent_id"].to_string(),
                    run["tool_call_id"].to_string(),
                )
            })
            .collect();
        assert_eq!(started_by.len(), family.len(), "{family:#?}");
        let events = run.events().await;
        assert_complete(&events);
        for run in &family {
            tells_one_life(run, &events);
        }
        let last = events.last().expect("events");
        assert_eq!(last.kind(), "run.completed");
        assert_eq!(last["run_id"], run["id"]);
    }
}

/// A run's events are those of one life, however often it was resumed.
fn tells_one_life(run: &Value, log: &[Event]) {
    assert_eq!(run["status"], "completed", "{run}");
    let own: Vec<_> = log
        .iter()
        .filter(|event| event["run_id"] == run["id"])
        .cloned()
        .collect();
    assert_eq!(own[0].kind(), "run.queued", "{own:#?}");
    for kind in ["run.queued", "run.started", "run.completed"] {
        assert_eq!(count(&own, kind), 1, "{kind} of {run} in {own:#?}");
    }
    let resumed = count(&own, "run.resumed") as u64;
    assert_eq!(run["attempt"], 1 + resumed, "{own:#?}");
    let named = |kind: &str, key: &str| {
        let events = own.iter().filter(|event| event.kind() == kind);
        events
            .map(|event| event[key].to_string())
            .collect::<Vec<_>>()
    };
    let turns = named("turn.completed", "turn");
    assert_eq!(Some(turns.len() as u64), run["turns"].as_u64(), "{own:#?}");
    let completed = named("tool.completed", "tool_call_id");
    let calls: BTreeSet<_> = completed.iter().cloned().collect();
    assert_eq!(calls.len(), completed.len(), "a result twice in {own:#?}");
    for kind in ["tool.started", "agent.called", "agent.returned"] {
        let reported: BTreeSet<_> = named(kind, "tool_call_id").into_iter().collect();
        assert_eq!(reported, calls, "{kind} in {own:#?}");
    }
}

/// What has happened over all kills.
#[derive(Default)]
struct Story {
    trees: Vec<(usize, usize)>,
    kills: usize,
    /// For each turn whose reply was seen on the record: how many requests there had been by then.
    recorded: HashMap<Turn, usize>,
    /// How many kills each tree has lived through.
    hurt: HashMap<usize, usize>,
}

impl Story {
    fn tree(&mut self, mids: usize) -> Tree {
        let number = self.trees.len();
        self.trees.push((number, mids));
        Tree { number, mids }
    }

    /// Kills the daemon at some moment, and starts the next one.
    async fn strike(&mut self, app: &mut TestApp, dice: &mut Dice, grove: &[Tree], ids: &[String]) {
        self.look(app, ids).await;
        let seen = app.provider.requests();
        let sent: BTreeSet<_> = seen
            .iter()
            .map(|seen| (reported(seen), seen.turn()))
            .collect();
        let to_come = grove
            .iter()
            .flat_map(Tree::turns)
            .filter(|turn| !sent.contains(turn))
            .count();
        // Either when a request comes in, or when an event has just been committed.
        if dice.below(2) == 0 {
            let more = dice.below(to_come + 1);
            app.provider.wait_for_requests(seen.len() + more).await;
        } else {
            let id = &ids[dice.below(ids.len())];
            let last = app.find(id).await["last_event"]
                .as_u64()
                .unwrap_or_default();
            // After the last event of a run that has ended there is no stream.
            let after = last.saturating_sub(1);
            let path = format!("/runs/{id}/events?after={after}");
            let mut events = app.events_at(&path).await;
            let mut more = dice.below(40);
            while more > 0 && events.next().await.is_some() {
                more -= 1;
            }
        }
        app.daemon.kill().await;
        self.kills += 1;
        for tree in grove {
            *self.hurt.entry(tree.number).or_default() += 1;
        }
        app.restart_after_end().await;
    }

    /// Notes the recorded replies, with the requests that had been made after they were read.
    async fn look(&mut self, app: &TestApp, ids: &[String]) {
        let mut turns = Vec::new();
        for id in ids {
            let run = app.find(id).await;
            let mut tasks = BTreeMap::from([(run["id"].to_string(), run["input"].clone())]);
            for event in run.events().await {
                match event.kind() {
                    "agent.called" => {
                        tasks.insert(event["child_id"].to_string(), event["task"].clone());
                    }
                    "turn.completed" => {
                        let task = tasks[&event["run_id"].to_string()].as_str();
                        let turn = event["turn"].as_u64().expect("a number");
                        turns.push((task.expect("a text").to_owned(), turn as usize));
                    }
                    _ => {}
                }
            }
        }
        let sent = app.provider.requests().len();
        for turn in turns {
            self.recorded.entry(turn).or_insert(sent);
        }
    }

    fn nothing_recorded_was_asked_again(&self, provider: &FakeProvider) {
        let mut requests: BTreeMap<Turn, usize> = BTreeMap::new();
        for (number, seen) in provider.requests().iter().enumerate() {
            let turn = (reported(seen), seen.turn());
            if let Some(&sent) = self.recorded.get(&turn) {
                assert!(
                    number < sent,
                    "{turn:?} is requested again after its reply was recorded"
                );
            }
            *requests.entry(turn).or_default() += 1;
        }
        for (turn, requests) in requests {
            let (number, _) = turn.0.split_once('x').expect("an input");
            let number: usize = number.parse().expect("a number");
            let most = 1 + self.hurt[&number];
            assert!(
                requests <= most,
                "{turn:?} was requested {requests} times, over {most} lives"
            );
        }
    }

    /// Every tree exists and has ended, and no more is counted than in the provider's ledger.
    async fn is_accounted_for(&self, app: &TestApp) {
        for status in ["queued", "running", "waiting", "cancelling"] {
            let page = app.get(&format!("/runs?all=true&status={status}")).await;
            assert_eq!(page.json()["data"], json!([]), "{status}");
        }
        let mut roots = 0;
        let mut cursor = String::new();
        loop {
            let page = app.get(&format!("/runs?limit=200{cursor}")).await.json();
            roots += page["data"].as_array().expect("data").len();
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(roots, self.trees.len());
        let trees = self.trees.iter();
        let usages = trees.map(|&(number, mids)| Tree { number, mids }.usage());
        let (input, output) = usages.fold((0, 0), |sum, usage| (sum.0 + usage.0, sum.1 + usage.1));
        let ledger = app.provider.ledger();
        assert!(
            ledger.input >= input && ledger.output >= output,
            "{ledger:?}"
        );
    }
}

/// Numbers that are the same in every run of the test; what the kills hit is up to the machine. (SplitMix64.)
struct Dice(u64);

impl Dice {
    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        (x % bound as u64) as usize
    }
}
