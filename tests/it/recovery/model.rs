//! Recovery against a model: made-up trees of agents run once to their end, and again in a process that dies after any
//! of its writes. What the next process makes of the record must be what the first would have made of it: the same
//! requests, none of them for a reply that was committed, and the same runs, steps and usage. In one process, over the
//! real store and a provider that speaks a real wire.

use crate::recovery::model_outcome::{Outcome, facts, served_at, settings};
use crate::support::crashing_store::CrashingStore;
use crate::support::hostile::proptest_config;
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::{ScriptedAnswer, fails, raw};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::within_timeout;
use axed::catalog::Rules;
use axed::catalog::reload::Catalog;
use axed::config::{Data, Durability, Logins, Tools};
use axed::domain::run::{Run, RunId};
use axed::engine::context::EngineDeps;
use axed::engine::memories::Memories;
use axed::engine::record::journal::Journal;
use axed::engine::request::RunRequest;
use axed::engine::runner::Runner;
use axed::engine::state::broadcaster::EventBroadcaster;
use axed::engine::state::period_budgets::PeriodBudgets;
use axed::providers::registry::ProviderRegistry;
use axed::record::entry::{self, Entry};
use axed::store::events::{EventLog, EventQuery};
use axed::store::leadership::Leadership;
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::runs::RunRecords;
use axed::tools::mcp::pool::McpConnectionPool;
use axed::tools::registry::ToolRegistry;
use axed::workdirs::registry::Workdirs;
use axed::workdirs::reserved::ReservedPaths;
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The turn of an agent, each of which runs once.
pub type Turn = (String, usize);

/// The position of a step: its turn, and 0 for the reply or the call's number from 1.
pub type Place = (u32, u32);

/// A tree of agents, by what their models say.
#[derive(Clone, Debug)]
struct Scenario {
    root: Node,
    parallel: bool,
    at_once: usize,
}

/// An agent that is called once.
#[derive(Clone, Debug)]
struct Node {
    /// Its replies that ask for tools.
    batches: Vec<Vec<Call>>,
    ending: Ending,
    memory: bool,
    /// 0 for none.
    max_tokens: u64,
    /// 0 for none; only for sequential calls, since otherwise the refused call is not determined.
    max_tool_calls: u64,
    /// 0 for none.
    max_runs: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Ending {
    Says,
    Refused,
    AsksForEver,
}

/// A call, and what its id is.
#[derive(Clone, Debug)]
struct Call(Wanted, &'static str);

#[derive(Clone, Debug)]
enum Wanted {
    Child(Node),
    Ghost,
    NoTask,
    NoTool,
}

/// What happens to a tree besides the death of its process.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    Nothing,
    /// Its deadline passes while no daemon runs.
    Overdue,
    /// It is cancelled after this percentage of the writes before the kill.
    Cancelled(usize),
}

proptest! {
    #![proptest_config(proptest_config(24))]

    #[test]
    fn a_killed_process_leaves_runs_that_end_like_uninterrupted_ones(
        scenario in scenario(),
        deaths in prop::collection::vec((any::<prop::sample::Index>(), trouble()), 1..4),
    ) {
        let runtime = Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let (whole, writes) = scenario.undisturbed().await;
            for (after, trouble) in &deaths {
                scenario.dies_after(after.index(writes), *trouble, &whole).await;
            }
        });
    }
}

fn scenario() -> impl Strategy<Value = Scenario> {
    (node(), any::<bool>(), 0..3_usize).prop_map(|(root, parallel, at_once)| Scenario {
        root,
        parallel,
        at_once,
    })
}

fn node() -> impl Strategy<Value = Node> {
    let leaf = node_of(|| failing().boxed());
    leaf.prop_recursive(2, 10, 3, |below| {
        node_of(move || {
            prop_oneof![3 => below.clone().prop_map(Wanted::Child), 1 => failing()].boxed()
        })
    })
}

fn node_of(wanted: impl Fn() -> BoxedStrategy<Wanted>) -> BoxedStrategy<Node> {
    let id = prop::sample::select(vec!["", "same", "a", "b"]);
    let call = (wanted(), id).prop_map(|(wanted, id)| Call(wanted, id));
    let batches = prop::collection::vec(prop::collection::vec(call, 1..4), 0..4);
    let ending = prop_oneof![6 => Just(Ending::Says), 1 => Just(Ending::Refused), 1 => Just(Ending::AsksForEver)];
    let none_or = |most: u64| prop_oneof![4 => Just(0), 1 => 1..most];
    let limits = (none_or(60), none_or(4), none_or(4));
    (batches, ending, prop::bool::weighted(0.3), limits)
        .prop_map(
            |(batches, ending, memory, (max_tokens, max_tool_calls, max_runs))| Node {
                batches,
                ending,
                memory,
                max_tokens,
                max_tool_calls,
                max_runs,
            },
        )
        .boxed()
}

fn failing() -> impl Strategy<Value = Wanted> {
    prop_oneof![
        Just(Wanted::Ghost),
        Just(Wanted::NoTask),
        Just(Wanted::NoTool)
    ]
}

fn trouble() -> impl Strategy<Value = Trouble> {
    prop_oneof![
        6 => Just(Trouble::Nothing),
        1 => Just(Trouble::Overdue),
        1 => (0..100_usize).prop_map(Trouble::Cancelled),
    ]
}

impl Scenario {
    /// A life that nothing happens to: what it comes to, and its writes.
    async fn undisturbed(&self) -> (Outcome, usize) {
        let place = tempfile::tempdir().expect("a directory");
        self.furnish(place.path());
        let life = Life::begin(self, place.path(), usize::MAX).await;
        let run = life.start().await;
        life.ended(run.id).await;
        let outcome = life.outcome(run.id).await;
        let writes = life.store.writes();
        life.end().await;
        (outcome, writes)
    }

    /// A process that ends after this many writes, and the next one.
    async fn dies_after(&self, writes: usize, trouble: Trouble, whole: &Outcome) {
        let place = tempfile::tempdir().expect("a directory");
        self.furnish(place.path());
        let life = Life::begin(self, place.path(), writes).await;
        let living = async {
            let run = life.start().await;
            if let Trouble::Cancelled(part) = trouble {
                life.store.wait_for_writes(1 + writes * part / 100).await;
                let _ = life.runner.cancel(run.id, None).await;
            }
            let _ = life.runner.wait(run.id, Duration::MAX).await;
        };
        // Parallel calls may need fewer writes than before, and so may a cancelled tree.
        within_timeout("the death", async {
            tokio::select! {
                () = living => {}
                () = life.store.wait_for_crash() => {}
            }
        })
        .await;
        life.end().await;
        if trouble == Trouble::Overdue {
            let db =
                rusqlite::Connection::open(place.path().join("data/axed.db")).expect("the store");
            let late = db.execute(
                "UPDATE runs SET deadline_at = 1 WHERE deadline_at IS NOT NULL",
                [],
            );
            late.expect("an update");
        }

        let next = Life::begin(self, place.path(), usize::MAX).await;
        let Some(root) = next.root().await else {
            assert!(writes == 0, "the run was lost");
            return next.end().await;
        };
        let left = next.outcome(root.id).await;
        next.runner.recover().await.expect("a recovery");
        next.ended(root.id).await;
        let outcome = next.outcome(root.id).await;
        outcome.is_in_order();
        left.is_kept_in(&outcome);
        for turn in outcome.requests.keys() {
            assert!(!left.replies.contains(turn), "{turn:?} is requested again");
        }
        let was_cancelled = matches!(
            left.runs[ROOT]["status"].as_str(),
            Some("cancelling" | "cancelled")
        );
        match trouble {
            Trouble::Cancelled(_) if was_cancelled => {
                assert_eq!(
                    outcome.requests,
                    BTreeMap::new(),
                    "requested after the cancel"
                );
                assert_eq!(outcome.runs[ROOT]["status"], "cancelled");
            }
            Trouble::Overdue => {
                assert_eq!(
                    outcome.requests,
                    BTreeMap::new(),
                    "requested after the deadline"
                );
            }
            Trouble::Nothing | Trouble::Cancelled(_) => {
                let mut expected = whole.clone();
                expected.requests.retain(|turn, _| !left.is_over(turn));
                left.unanswered_are_unreported(&mut expected.runs);
                assert_eq!(outcome.requests, expected.requests, "after {left:#?}");
                assert_eq!(outcome.runs, expected.runs, "after {left:#?}");
                assert_eq!(outcome.steps, expected.steps, "after {left:#?}");
                assert_eq!(outcome.memories, expected.memories);
            }
        }
        next.end().await;
    }

    /// Writes the agents' files.
    fn furnish(&self, place: &Path) {
        fs::create_dir_all(place.join("agents")).expect("a directory");
        // One counted limit in a tree: if two budgets refuse calls of one reply, only the first is in the record.
        let mut is_counted = false;
        self.root.each(ROOT, &mut |name, node| {
            let (calls, runs) = match (is_counted, node.max_tool_calls) {
                (true, _) => (0, 0),
                (false, 0) => (0, node.max_runs),
                (false, calls) => (calls, 0),
            };
            is_counted |= calls + runs > 0;
            let children: Vec<_> = node.children(name).map(|(name, _)| name).collect();
            let parallel = self.parallel;
            let mut text = format!(
                "name = \"{name}\"\nmodel = \"fake/{name}\"\nsub_agents = {children:?}\n\
                 [sub_agents_config]\nparallel = {parallel}\nmax_concurrent = {}\n[limits]\nmax_turns = 6\n\
                 [memory]\nenabled = {}\n[retry]\nmax_retries = 0\n",
                self.at_once, node.memory,
            );
            if !parallel {
                text.push_str(&format!(
                    "[budget]\nmax_tokens = {}\nmax_tool_calls = {}\nmax_runs = {}\n",
                    node.max_tokens, calls, runs
                ));
            }
            fs::write(place.join(format!("agents/{name}.toml")), text).expect("a file");
        });
    }
}

/// The root's name; those below it are called by their calls' places.
pub const ROOT: &str = "r";

impl Node {
    fn children(&self, name: &str) -> impl Iterator<Item = (String, &Node)> {
        let calls = self.batches.iter().enumerate().flat_map(|(turn, calls)| {
            let calls = calls.iter().enumerate();
            calls.map(move |(place, call)| (turn, place, call))
        });
        calls.filter_map(move |(turn, place, call)| match &call.0 {
            Wanted::Child(node) => Some((format!("{name}-{turn}{place}"), node)),
            _ => None,
        })
    }

    fn each(&self, name: &str, reported: &mut impl FnMut(&str, &Node)) {
        reported(name, self);
        for (name, node) in self.children(name) {
            node.each(&name, reported);
        }
    }

    /// The model's reply in this turn.
    fn says(&self, name: &str, seen: &RecordedRequest) -> ScriptedAnswer {
        let turn = seen.turn() - 1;
        let batch = match (self.batches.get(turn), &self.ending) {
            (Some(batch), _) => batch.as_slice(),
            (None, Ending::Refused) => return fails(400, "no more"),
            (None, Ending::AsksForEver) => &[Call(Wanted::NoTool, "again")],
            (None, Ending::Says) => &[],
        };
        let mut blocks = vec![
            json!({"type": "text", "text": format!("{name} in turn {turn}: {:?}", seen.tool_results())}),
        ];
        for (place, Call(wanted, id)) in batch.iter().enumerate() {
            let (tool, input) = match wanted {
                Wanted::Child(_) => {
                    let agent = format!("{name}-{turn}{place}");
                    (
                        "call_agent",
                        json!({"agent": agent, "task": format!("be {agent}")}),
                    )
                }
                Wanted::Ghost => ("call_agent", json!({"agent": "ghost", "task": "haunt"})),
                Wanted::NoTask => ("call_agent", json!({"agent": "ghost"})),
                Wanted::NoTool => ("hammer", json!({"nail": turn})),
            };
            blocks.push(json!({"type": "tool_use", "id": id, "name": tool, "input": input}));
        }
        let body = json!({
            "type": "message", "role": "assistant", "model": name, "content": blocks,
            "stop_reason": if batch.is_empty() { "end_turn" } else { "tool_use" },
            "usage": {"input_tokens": 10 + turn, "output_tokens": 3},
        });
        raw(200, "application/json", body.to_string())
    }
}

/// One process's life.
pub struct Life {
    pub store: Arc<CrashingStore>,
    pub runner: Runner,
    pub provider: FakeProvider,
    memory: std::path::PathBuf,
}

impl Life {
    async fn begin(scenario: &Scenario, place: &Path, lets_through: usize) -> Self {
        // A provider for each life: what the dead one sent may still be on its way.
        let provider = FakeProvider::start().await;
        scenario.root.each(ROOT, &mut |name, node| {
            let (own, node) = (name.to_owned(), node.clone());
            provider.always(name, move |seen| node.says(&own, seen));
        });
        Self::open(place, lets_through, provider)
    }

    pub fn open(place: &Path, lets_through: usize, provider: FakeProvider) -> Self {
        let data = Data {
            dir: place.join("data"),
            url: None,
            listen_url: None,
            cluster: Default::default(),
            durability: Durability::Process,
            retention: Default::default(),
            usage_retention: None,
            requests: Default::default(),
        };
        let real = open(&data, Box::new(|_, _| ()), Box::new(|_| false)).expect("a store");
        let store = Arc::new(CrashingStore::new(real, lets_through));
        let providers = BTreeMap::from([("fake".to_owned(), served_at(provider.url()))]);
        let providers = ProviderRegistry::build(&providers).expect("a provider");
        let shared: Arc<dyn RunStore> = Arc::clone(&store) as _;
        let tools = Tools {
            max_result: 1 << 16,
            ..Tools::default()
        };
        let logins = Logins {
            dir: data.dir.join("logins"),
            key_env: String::new(),
        };
        let runner = Runner::new(EngineDeps {
            catalog: Arc::new(Catalog::open(vec![place.join("agents")], Rules::default())),
            providers,
            tool_registry: ToolRegistry::new(
                &tools,
                &ReservedPaths::default(),
                &[],
                Default::default(),
            ),
            workdirs: Arc::new(Workdirs::new(
                place.to_owned(),
                &[],
                ReservedPaths::default(),
            )),
            mcp: Arc::new(McpConnectionPool::new(BTreeMap::new(), &logins)),
            memories: Memories::new(Arc::clone(&shared)),
            journal: Journal::new(shared, Arc::new(EventBroadcaster::default())),
            settings: settings(place),
            period_budgets: PeriodBudgets::default(),
            leadership: Leadership::alone(),
            traces: None,
            playbacks: None,
        });
        Self {
            store,
            runner,
            provider,
            memory: data.dir.join("memory"),
        }
    }

    /// Starts the root; does not return if it cannot be committed.
    pub async fn start(&self) -> Arc<Run> {
        let ask = RunRequest {
            agent: ROOT.to_owned(),
            input: Some("go".into()),
            ..RunRequest::default()
        };
        self.runner.start(ask).await.expect("accepted")
    }

    pub async fn ended(&self, id: RunId) {
        within_timeout("the end", async {
            self.runner.wait(id, Duration::MAX).await.expect("a run");
            self.runner.drain();
            self.runner.wait_idle().await;
        })
        .await;
    }

    pub async fn root(&self) -> Option<Run> {
        let filter = axed::store::runs::RunFilter {
            limit: 1,
            ..Default::default()
        };
        self.store.list(filter).await.expect("runs").runs.pop()
    }

    /// Drops everything at once.
    pub async fn end(self) {
        within_timeout("the halt", self.runner.shut_down()).await;
        self.store.close().await;
    }

    async fn outcome(&self, root: RunId) -> Outcome {
        let mut outcome = Outcome::default();
        let query = EventQuery {
            root,
            run: root,
            exclude_descendants: false,
            after: 0,
            limit: 100_000,
        };
        outcome.events = self.store.events(query).await.expect("events");
        for run in self.store.tree(root).await.expect("a tree") {
            let mut steps = Vec::new();
            for mut step in entry::steps(self.store.entries(run.id).await.expect("entries")) {
                let place = match &mut step {
                    Entry::Prompted { .. } => (0, 0),
                    Entry::Replied { turn, .. } => {
                        outcome.replies.insert((run.agent.clone(), *turn as usize));
                        (*turn, 0)
                    }
                    Entry::CallCompleted {
                        turn,
                        position,
                        duration_ms,
                        ..
                    } => {
                        *duration_ms = 0;
                        (*turn, 1 + *position)
                    }
                    Entry::Event(_)
                    | Entry::MessageAdded { .. }
                    | Entry::MessagesRead { .. }
                    | Entry::CallSuspended { .. }
                    | Entry::CallDecided { .. } => {
                        unreachable!("no client sends any")
                    }
                    Entry::Followup { .. } => unreachable!("no run requests a shape"),
                    // A time.
                    Entry::Remembers { .. } => continue,
                    Entry::Compacting | Entry::Compacted { .. } => {
                        unreachable!("no window is known")
                    }
                };
                steps.push((place, serde_json::to_string(&step).expect("JSON")));
            }
            // Parallel calls end in any order.
            steps.sort();
            outcome.steps.insert(run.agent.clone(), steps);
            outcome.ids.insert(run.agent.clone(), run.id);
            let facts = facts(&run);
            assert_eq!(outcome.runs.insert(run.agent, facts), None, "a run twice");
        }
        for seen in self.provider.requests() {
            let turn = (seen.model().to_owned(), seen.turn());
            let before = outcome.requests.insert(turn, seen.body.to_string());
            assert_eq!(before, None, "requested twice in one life");
        }
        for agent in outcome.runs.keys() {
            let file = self.memory.join(format!("{agent}.md"));
            let text = fs::read_to_string(file).unwrap_or_default();
            outcome
                .memories
                .insert(agent.clone(), text.matches("be ").count());
        }
        outcome
    }
}
