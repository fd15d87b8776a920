//! Compares two trees run by run and turn by turn. Runs are the same if the same calls led to them.

use std::collections::{BTreeMap, HashMap, HashSet};

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::domain::message::{AssistantMessage, ToolResult, truncate_to_bytes};
use crate::domain::run::{Run, RunId, Status, now};
use crate::domain::run_path;
use crate::domain::usage::TreeUsage;
use crate::engine::history::tree_reads;
use crate::record::entry::{self, Entry};
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::store::turn_record::TurnRecord;

/// Longer texts are cut.
const MAX_VALUE_BYTES: usize = 8 << 10;
/// Further changes are left out.
const MAX_CHANGES: usize = 4000;

/// The differences of two trees.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "RunDiff")]
pub struct RunDiff {
    /// The runs of both trees, in the order of their calls. Runs whose results a fork took over are among them.
    pub nodes: Vec<DiffNode>,
    /// What both trees used.
    pub totals: DiffTotals,
    /// Present if there are more changes than these.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// A run in both trees, or in one of them.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiffNode {
    /// The agent of the root, then `/<turn>.<position>:<agent>` for each call that leads to the run.
    pub path: String,
    /// The run in the first tree; null if it is not there.
    pub a: Option<RunId>,
    /// The run in the second tree; null if it is not there.
    pub b: Option<RunId>,
    /// Differences of the whole run.
    pub changes: Vec<Change>,
    /// The turns that differ.
    pub turns: Vec<DiffTurn>,
}

/// A turn that differs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiffTurn {
    /// The number of the turn.
    pub turn: u32,
    /// Its differences.
    pub changes: Vec<Change>,
}

/// A difference.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "DiffChange")]
pub struct Change {
    /// Of a run `system`, `message`, `status` or `error`; of a turn `text`, `calls` (their tools), `calls/<position>/arguments`,
    /// `calls/<position>/result`, `model`, `input_tokens`, `output_tokens` or `cost_usd`.
    pub field: String,
    /// The value in the first tree; null if there is none.
    pub a: Value,
    /// The value in the second tree; null if there is none.
    pub b: Value,
    /// Present if a long text was cut.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// The usage of both trees.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiffTotals {
    /// Of the first tree.
    pub a: TreeTotals,
    /// Of the second tree.
    pub b: TreeTotals,
}

/// The usage of a tree.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TreeTotals {
    /// The number of runs.
    pub runs: u64,
    /// Replies of models.
    pub model_calls: u64,
    /// Executed tool calls.
    pub tool_calls: u64,
    /// Input tokens, cached ones included.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// US dollars; null if no price is known.
    pub cost_usd: Option<f64>,
    /// Milliseconds from the start to the end, or until now.
    pub duration_ms: u64,
}

impl TreeTotals {
    fn new(run: &Run) -> Self {
        let TreeUsage { runs, usage } = &run.tree;
        Self {
            runs: *runs,
            model_calls: usage.model_calls,
            tool_calls: usage.tool_calls,
            input_tokens: usage.tokens.input,
            output_tokens: usage.tokens.output,
            cost_usd: usage.cost.map(|cost| cost.to_usd()),
            duration_ms: run.duration_ms(now()),
        }
    }
}

/// The differences of the trees below two runs. At most two runs are in memory with their texts.
pub async fn diff(store: &dyn RunStore, a: &Run, b: &Run) -> Result<RunDiff, StoreError> {
    let _permit = tree_reads::acquire(a.owner.as_deref()).await;
    let (runs_a, runs_b) = (read_tree(store, a.id).await?, read_tree(store, b.id).await?);
    let mut paths: Vec<&String> = runs_a.keys().chain(runs_b.keys()).collect();
    paths.sort_by_key(|path| run_path::calls(path));
    paths.dedup();
    let mut changes = Changes::default();
    let mut nodes = Vec::new();
    for path in paths {
        let (a, b) = (runs_a.get(path), runs_b.get(path));
        nodes.push(changes.node(store, path, a, b).await?);
    }
    Ok(RunDiff {
        nodes,
        totals: DiffTotals {
            a: TreeTotals::new(a),
            b: TreeTotals::new(b),
        },
        truncated: changes.is_truncated,
    })
}

/// A run of a tree, without its steps.
struct TreeRun {
    id: RunId,
    status: Status,
    error: Option<String>,
}

/// What is compared of a run.
struct ComparedRun {
    status: Status,
    error: Option<String>,
    system: String,
    message: String,
    turns: BTreeMap<u32, ComparedTurn>,
}

#[derive(Default)]
struct ComparedTurn {
    message: AssistantMessage,
    /// By the position of the call.
    results: HashMap<u32, ToolResult>,
    record: Option<TurnRecord>,
}

/// The runs of a tree by path, with the runs whose results it reuses as far as they exist.
async fn read_tree(
    store: &dyn RunStore,
    root: RunId,
) -> Result<HashMap<String, TreeRun>, StoreError> {
    let mut runs: HashMap<String, TreeRun> = HashMap::new();
    // The path of the root of a part does not begin with the agent of its caller where that is compared too.
    let mut parts = vec![(root, None)];
    while let Some((part_root, path)) = parts.pop() {
        let mut paths: HashMap<RunId, String> = HashMap::new();
        let mut calls: HashMap<RunId, HashMap<String, (u32, usize)>> = HashMap::new();
        let tree = store.tree(part_root).await?;
        let callers: HashSet<RunId> = tree.iter().filter_map(|run| run.parent_id).collect();
        for run in tree {
            let is_part_root = run.id == part_root;
            let path = match (&path, run.parent_id.filter(|_| !is_part_root)) {
                (Some(path), None) => String::clone(path),
                (None, None) => root_path(&run),
                (_, Some(parent)) => {
                    let call = run.tool_call_id.as_ref();
                    let position = calls.get(&parent).and_then(|calls| calls.get(call?));
                    let (turn, position) = position.copied().unwrap_or_default();
                    let parent = paths.get(&parent).map(String::as_str).unwrap_or_default();
                    run_path::child(parent, turn, position, &run.agent)
                }
            };
            if callers.contains(&run.id) || run.fork.is_some() {
                let positions = call_positions(&entry::steps(store.entries(run.id).await?));
                for link in run.fork.iter().flat_map(|fork| &fork.reused_runs) {
                    let position = positions.get(&link.tool_call_id).copied();
                    let (turn, position) = position.unwrap_or_default();
                    let path = run_path::child(&path, turn, position, &link.agent);
                    parts.push((link.id, Some(path)));
                }
                calls.insert(run.id, positions);
            }
            paths.insert(run.id, path.clone());
            runs.insert(path, TreeRun::new(run));
        }
    }
    Ok(runs)
}

fn root_path(run: &Run) -> String {
    run.agent.clone()
}

/// The turn and the position from 1 of each call.
fn call_positions(steps: &[Entry]) -> HashMap<String, (u32, usize)> {
    let replies = steps.iter().filter_map(|step| match step {
        Entry::Replied { turn, message, .. } => Some((*turn, &message.tool_calls)),
        _ => None,
    });
    let calls = replies.flat_map(|(turn, calls)| {
        let calls = calls.iter().enumerate();
        calls.map(move |(at, call)| (call.id.clone(), (turn, at + 1)))
    });
    calls.collect()
}

impl TreeRun {
    fn new(run: Run) -> Self {
        Self {
            id: run.id,
            status: run.status,
            error: run.error.map(|error| error.message),
        }
    }
}

impl ComparedRun {
    async fn load(store: &dyn RunStore, run: Option<&TreeRun>) -> Result<Option<Self>, StoreError> {
        let Some(run) = run else {
            return Ok(None);
        };
        let mut compared = Self {
            status: run.status,
            error: run.error.clone(),
            system: String::new(),
            message: String::new(),
            turns: BTreeMap::new(),
        };
        for step in entry::steps(store.entries(run.id).await?) {
            match step {
                Entry::Prompted {
                    system, message, ..
                } => {
                    compared.system = system;
                    compared.message = message.to_plain_text().into_owned();
                }
                Entry::Replied { turn, message, .. } => {
                    compared.turns.entry(turn).or_default().message = message;
                }
                Entry::CallCompleted {
                    turn,
                    position,
                    result,
                    ..
                } => {
                    let turn = compared.turns.entry(turn).or_default();
                    turn.results.insert(position, result);
                }
                _ => {}
            }
        }
        for record in store.turns(run.id).await? {
            let turn = compared.turns.entry(record.turn).or_default();
            turn.record = Some(record);
        }
        Ok(Some(compared))
    }
}

/// Counts the changes, so that a response has a bound.
#[derive(Default)]
struct Changes {
    count: usize,
    is_truncated: bool,
}

impl Changes {
    /// Loads these runs and compares them, unless they are the same or the limit of changes is exceeded.
    async fn node(
        &mut self,
        store: &dyn RunStore,
        path: &str,
        a: Option<&TreeRun>,
        b: Option<&TreeRun>,
    ) -> Result<DiffNode, StoreError> {
        let id = |run: &TreeRun| run.id;
        let mut node = DiffNode {
            path: path.to_owned(),
            a: a.map(id),
            b: b.map(id),
            changes: Vec::new(),
            turns: Vec::new(),
        };
        if node.a != node.b && !self.is_truncated {
            let a = ComparedRun::load(store, a).await?;
            let b = ComparedRun::load(store, b).await?;
            self.runs(&mut node, a.as_ref(), b.as_ref());
        }
        Ok(node)
    }

    fn runs(&mut self, node: &mut DiffNode, a: Option<&ComparedRun>, b: Option<&ComparedRun>) {
        let text = |of: fn(&ComparedRun) -> Option<&str>| (a.and_then(of), b.and_then(of));
        let fields = [
            ("system", text(|run| Some(&run.system))),
            ("message", text(|run| Some(&run.message))),
            ("status", text(|run| Some(run.status.as_str()))),
            ("error", text(|run| run.error.as_deref())),
        ];
        for (field, (a, b)) in fields {
            self.compare(
                &mut node.changes,
                field,
                a.map(Value::from),
                b.map(Value::from),
            );
        }
        let turns = [a, b].into_iter().flatten();
        let mut numbers: Vec<u32> = turns.flat_map(|run| run.turns.keys().copied()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for turn in numbers {
            let of_a = a.and_then(|run| run.turns.get(&turn));
            let of_b = b.and_then(|run| run.turns.get(&turn));
            let changes = self.turn(of_a, of_b);
            if !changes.is_empty() {
                node.turns.push(DiffTurn { turn, changes });
            }
        }
    }

    fn turn(&mut self, a: Option<&ComparedTurn>, b: Option<&ComparedTurn>) -> Vec<Change> {
        let mut changes = Vec::new();
        let both = |of: &dyn Fn(&ComparedTurn) -> Option<Value>| (a.and_then(of), b.and_then(of));
        let (text_a, text_b) = both(&|turn| Some(turn.message.content.as_str().into()));
        self.compare(&mut changes, "text", text_a, text_b);
        let (tools_a, tools_b) = both(&|turn| Some(turn.tools()));
        self.compare(&mut changes, "calls", tools_a, tools_b);
        let calls = |turn: Option<&ComparedTurn>| turn.map_or(0, |it| it.message.tool_calls.len());
        for position in 0..calls(a).max(calls(b)) {
            let (of_a, of_b) = both(&|turn| turn.arguments(position));
            let field = format!("calls/{}/arguments", position + 1);
            self.compare(&mut changes, &field, of_a, of_b);
            let (of_a, of_b) = both(&|turn| turn.result(position));
            let field = format!("calls/{}/result", position + 1);
            self.compare(&mut changes, &field, of_a, of_b);
        }
        type Read = fn(&TurnRecord) -> Option<Value>;
        let numbers: [(&str, Read); 4] = [
            ("model", |it| Some(it.model.as_str().into())),
            ("input_tokens", |it| Some(it.usage?.input.into())),
            ("output_tokens", |it| Some(it.usage?.output.into())),
            ("cost_usd", |it| Some(it.cost?.to_usd().into())),
        ];
        for (field, of) in numbers {
            let (of_a, of_b) = both(&|turn| of(turn.record.as_ref()?));
            self.compare(&mut changes, field, of_a, of_b);
        }
        changes
    }

    fn compare(
        &mut self,
        changes: &mut Vec<Change>,
        field: &str,
        a: Option<Value>,
        b: Option<Value>,
    ) {
        if a == b {
            return;
        }
        if self.count == MAX_CHANGES {
            self.is_truncated = true;
            return;
        }
        self.count += 1;
        let (mut a, mut b) = (a.unwrap_or_default(), b.unwrap_or_default());
        let is_cut = [cut(&mut a), cut(&mut b)];
        changes.push(Change {
            field: field.to_owned(),
            a,
            b,
            truncated: is_cut.contains(&true),
        });
    }
}

/// Cuts a long text; other long values become a text.
fn cut(value: &mut Value) -> bool {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Object(_) | Value::Array(_) => value.to_string(),
        Value::Null | Value::Bool(_) | Value::Number(_) => return false,
    };
    let is_long = text.len() > MAX_VALUE_BYTES;
    if is_long {
        *value = truncate_to_bytes(&text, MAX_VALUE_BYTES).into();
    }
    is_long
}

impl ComparedTurn {
    /// The names of the called tools.
    fn tools(&self) -> Value {
        let names = self
            .message
            .tool_calls
            .iter()
            .map(|call| call.name.as_str());
        names.collect::<Vec<_>>().into()
    }

    fn arguments(&self, position: usize) -> Option<Value> {
        let call = self.message.tool_calls.get(position)?;
        let json = call.sent_arguments();
        Some(serde_json::from_str(json).unwrap_or_else(|_| json.into()))
    }

    fn result(&self, position: usize) -> Option<Value> {
        let position = u32::try_from(position).ok()?;
        Some(self.results.get(&position)?.content.as_str().into())
    }
}
