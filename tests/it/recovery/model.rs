//! Recovery against a model: made-up trees of agents run once to their end, and again in a process that dies after any
//! of its writes. What the next process makes of the record must be what the first would have made of it: the same
//! requests, none of them for a reply that was committed, and the same runs, steps and usage. In one process, over the
//! real store and a provider that speaks a real wire.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axed::catalog::Rules;
use axed::catalog::reload::Catalog;
use axed::config::models::Models;
use axed::config::{
    AttachmentLimits, DEFAULT_MAX_REPLY, Data, Durability, Provider, ProviderKind, Runs,
};
use axed::domain::event::StoredEvent;
use axed::domain::run::{Run, RunId};
use axed::engine::context::EngineDeps;
use axed::engine::memory::memory::Memories;
use axed::engine::record::journal::{EventBroadcaster, Journal};
use axed::engine::request::RunRequest;
use axed::engine::runner::Runner;
use axed::engine::settings::{HistoryLimits, Settings};
use axed::providers::registry::ProviderRegistry;
use axed::ssrf::SsrfGuard;
use axed::store::Step;
use axed::store::events::{EventLog, EventQuery};
use axed::store::open::open;
use axed::store::run_store::RunStore;
use axed::store::runs::RunRecords;
use axed::tools::mcp::pool::McpConnectionPool;
use axed::tools::registry::ToolRegistry;
use axed::workdirs::registry::Workdirs;
use axed::workdirs::reserved::ReservedPaths;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::crashing_store::CrashingStore;
use crate::support::hostile::proptest_config;
use crate::support::provider::FakeProvider;
use crate::support::provider::answer::{ScriptedAnswer, fails, raw};
use crate::support::provider::recorded_request::RecordedRequest;
use crate::support::within_timeout;

/// The turn of an agent, each of which runs once.
type Turn = (String, usize);

/// The position of a step: its turn, and 0 for the reply or the call's number from 1.
type Place = (u32, u32);

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
    /// 0 for none; only where calls are made one after another, for otherwise nobody knows which is refused.
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
    /// Its deadline passes while nobody is there.
    Overdue,
    /// It is cancelled when this part (of 100) of the writes before the death was handed over.
    Cancelled(usize),
}

proptest! {
    #![proptest_config(proptest_config(24))]

    #[test]
    fn what_a_process_left_goes_on_as_if_it_had_lived(
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

    /// A life that ends after so many writes, and the next one.
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
        // Calls at work at once may need fewer writes than before, and so may a cancelled tree.
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
        // One counted limit in a tree: where two accounts refuse calls of one reply, only the first is in the record.
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
const ROOT: &str = "r";

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

    /// What its model says in this turn.
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
struct Life {
    store: Arc<CrashingStore>,
    runner: Runner,
    provider: FakeProvider,
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
        let data = Data {
            dir: place.join("data"),
            durability: Durability::Process,
            retention: Default::default(),
        };
        let real = open(&data, Box::new(|_, _| ()), Box::new(|_| false)).expect("a store");
        let store = Arc::new(CrashingStore::new(real, lets_through));
        let providers = BTreeMap::from([("fake".to_owned(), served_at(provider.url()))]);
        let providers = ProviderRegistry::build(&providers).expect("a provider");
        let shared: Arc<dyn RunStore> = Arc::clone(&store) as _;
        let runner = Runner::new(EngineDeps {
            catalog: Arc::new(Catalog::open(vec![place.join("agents")], Rules::default())),
            providers,
            tool_registry: ToolRegistry::default(),
            workdirs: Arc::new(Workdirs::new(
                place.to_owned(),
                &[],
                ReservedPaths::default(),
            )),
            mcp: Arc::new(McpConnectionPool::new(BTreeMap::new())),
            journal: Journal::new(shared, Arc::new(EventBroadcaster::default())),
            memories: Memories::new(&data.dir.join("memory")),
            settings: settings(place),
            traces: None,
        });
        Self {
            store,
            runner,
            provider,
            memory: data.dir.join("memory"),
        }
    }

    /// Starts the root; does not come back where it cannot be committed.
    async fn start(&self) -> Arc<Run> {
        let ask = RunRequest {
            agent: ROOT.to_owned(),
            input: Some("go".into()),
            ..RunRequest::default()
        };
        self.runner.start(ask).await.expect("accepted")
    }

    async fn ended(&self, id: RunId) {
        within_timeout("the end", async {
            self.runner.wait(id, Duration::MAX).await.expect("a run");
            self.runner.drain();
            self.runner.wait_idle().await;
        })
        .await;
    }

    async fn root(&self) -> Option<Run> {
        let filter = axed::store::runs::RunFilter {
            limit: 1,
            ..Default::default()
        };
        self.store.list(filter).await.expect("runs").runs.pop()
    }

    /// Drops everything at once.
    async fn end(self) {
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
            for step in self.store.steps(run.id).await.expect("steps") {
                let place = match &step {
                    Step::Prompt { .. } => (0, 0),
                    Step::Reply { turn, .. } => {
                        outcome.replies.insert((run.agent.clone(), *turn as usize));
                        (*turn, 0)
                    }
                    Step::Result { turn, position, .. } => (*turn, 1 + position),
                    Step::Said { .. } => unreachable!("no run requests a shape"),
                    // A time.
                    Step::Remembers { .. } => continue,
                    Step::Compacting | Step::Compacted { .. } => {
                        unreachable!("no window is known")
                    }
                };
                steps.push((place, serde_json::to_string(&step).expect("JSON")));
            }
            // Calls at work at once end in any order.
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

/// What lives come to, without what must differ: times, ids and attempts.
#[derive(Clone, Default)]
struct Outcome {
    requests: BTreeMap<Turn, String>,
    runs: BTreeMap<String, Value>,
    steps: BTreeMap<String, Vec<(Place, String)>>,
    memories: BTreeMap<String, usize>,
    replies: BTreeSet<Turn>,
    ids: BTreeMap<String, RunId>,
    events: Vec<StoredEvent>,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for event in &self.events {
            writeln!(f, "{} {}", event.seq, event.data)?;
        }
        Ok(())
    }
}

fn has_ended(run: &Value) -> bool {
    matches!(
        run["status"].as_str(),
        Some("completed" | "failed" | "cancelled")
    )
}

fn facts(run: &Run) -> Value {
    let failure = run.error.as_ref();
    json!({
        "status": run.status.as_str(), "depth": run.depth.0, "input": run.input, "task": run.task,
        "content": run.content, "partial": run.partial_content, "model": run.model, "stop": run.stop_reason,
        "error": failure.map(|failure| format!("{failure:?}")), "turns": run.turns, "tool_call": run.tool_call_id,
        "usage": run.usage, "tree": run.tree,
    })
}

impl Outcome {
    /// The log has one life of each run, with every number once, and all of them have ended.
    fn is_in_order(&self) {
        let mut reported = BTreeSet::new();
        for (at, event) in self.events.iter().enumerate() {
            assert_eq!(event.seq, at as u64 + 1, "{self:?}");
            let data: Value = serde_json::from_str(&event.data).expect("JSON");
            let once = match event.name.as_str() {
                "run.resumed" | "retry.scheduled" | "memory.warning" | "loop.warning" => continue,
                "turn.started" | "turn.completed" => data["turn"].to_string(),
                _ => data["tool_call_id"].to_string(),
            };
            // A turn whose reply was lost is begun again.
            let is_new = reported.insert((event.run_id, event.name.to_string(), once));
            assert!(
                is_new || event.name == "turn.started",
                "{data} twice in {self:?}"
            );
        }
        for (agent, run) in &self.runs {
            assert!(has_ended(run), "{agent} is {run}");
        }
    }

    /// Whether nobody may ask for this turn any more: its reply is there, or its run has ended.
    fn is_over(&self, turn: &Turn) -> bool {
        self.replies.contains(turn) || self.runs.get(&turn.0).is_some_and(has_ended)
    }

    /// What was in the record is still there.
    fn is_kept_in(&self, later: &Self) {
        for (agent, steps) in &self.steps {
            let kept = &later.steps[agent];
            assert!(
                steps.iter().all(|step| kept.contains(step)),
                "{agent} lost a step"
            );
        }
        assert!(
            later
                .ids
                .iter()
                .all(|(agent, id)| self.ids.get(agent).is_none_or(|it| it == id))
        );
    }

    /// A turn that was begun and has no reply has cost what nobody knows.
    fn unanswered_are_unreported(&self, runs: &mut BTreeMap<String, Value>) {
        let unfinished = self.runs.iter().filter(|(_, run)| !has_ended(run));
        for (agent, _) in unfinished {
            let own = self
                .events
                .iter()
                .filter(|event| event.run_id == self.ids[agent]);
            let begun = own.filter(|event| event.name == "turn.started").count();
            let answered = self.replies.iter().filter(|(of, _)| of == agent).count();
            if begun <= answered {
                continue;
            }
            let count = |usage: &mut Value| {
                let sum = usage["unreported"].as_u64().expect("a number") + 1;
                usage["unreported"] = sum.into();
            };
            count(&mut runs.get_mut(agent).expect("the same runs")["usage"]);
            // Its own tree and those above it: a name begins with its caller's.
            for (name, run) in runs.iter_mut() {
                if agent == name || agent.starts_with(&format!("{name}-")) {
                    count(&mut run["tree"]["usage"]);
                }
            }
        }
    }
}

fn served_at(url: String) -> Provider {
    Provider {
        kind: ProviderKind::Anthropic,
        api_key: Some("sk-fake-key".to_owned().into()),
        key_env: String::new(),
        base_url: Some(url),
        headers: BTreeMap::new(),
        max_concurrent: None,
        timeout: None,
        version: None,
        max_tokens_field: None,
        api: None,
        max_reply: DEFAULT_MAX_REPLY,
        batch_poll: axed::config::DEFAULT_BATCH_POLL,
        services: Vec::new(),
        scripts: Vec::new(),
        is_preset: false,
        missing_address: None,
        models: BTreeMap::new(),
    }
}

fn settings(place: &Path) -> Settings {
    Settings {
        config_dir: place.to_owned(),
        runs: Runs {
            max_running: 10,
            max_queued: 10,
            ..Runs::default()
        },
        default_timeout: Duration::from_secs(60),
        max_timeout: Duration::from_secs(60),
        loop_warn: 2,
        loop_stop: 3,
        max_context_file_bytes: 0,
        max_conversation_bytes: 1 << 20,
        history_limits: HistoryLimits {
            messages: 0,
            bytes: 0,
            attachments: AttachmentLimits {
                count: 0,
                bytes: 0,
                total: 0,
            },
        },
        webhook_guard: SsrfGuard::new([], "webhooks.allow_hosts"),
        webhook_secret_env: None,
        keys: BTreeMap::new(),
        models: Models::default(),
    }
}
