//! Plays a recording back: gives a run of a test its replies and results from the recording, and notes where the run
//! differs. Only the engine of a test has playbacks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::value::RawValue;

use crate::domain::agent::params::Params;
use crate::domain::context::Compaction;
use crate::domain::event::Decision;
use crate::domain::ignore::Ignore;
use crate::domain::mcp::McpServer;
use crate::domain::message::{Message, ToolCall, ToolResult, ToolSpec};
use crate::domain::recording::{
    OutcomeRecording, Recording, ResultRecording, RunRecording, ToolRecording, arguments_text,
};
use crate::domain::redaction::Redactor;
use crate::domain::run::RunId;
use crate::domain::run_path;
use crate::engine::recording::assertions::PlayedCall;
use crate::engine::recording::neutral::{neutral_params, plain_text, result_text, tool_recording};
use crate::engine::recording::playback::compare::{Difference, Tolerance};
use crate::engine::recording::playback::expected::ExpectedMessages;
use crate::engine::recording::playback::observed::{ObservedResult, ObservedRun};
use crate::engine::recording::redact;
use crate::providers::{ErrorCategory, ProviderError, Reply, ReplyOutcome};
use crate::tools::ToolOutput;
use crate::tools::mcp::McpToolset;

pub mod compare;
pub mod expected;
pub mod observed;
pub mod recorded_tool;

/// What a test does not take from its recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    pub models: bool,
    pub tools: bool,
}

#[derive(Debug)]
pub struct Playback {
    recording: Arc<Recording>,
    ignore: Ignore,
    pub live: Live,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    paths: HashMap<RunId, String>,
    /// The turn and the position of calls, by the calling run.
    calls: HashMap<(RunId, String), (u32, usize)>,
    runs: BTreeMap<String, PlayedRun>,
    differences: Vec<Divergence>,
    performed: Vec<PlayedCall>,
    /// Of what is observed and compared: recordings lack what it matches.
    redactor: Redactor,
    /// The results that live models have received, by path, turn and position.
    used: HashSet<(usize, usize)>,
}

#[derive(Debug)]
struct PlayedRun {
    expected: Option<ExpectedMessages>,
    observed: ObservedRun,
}

/// Where a test differs from its recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    pub path: String,
    pub turn: u32,
    pub difference: Difference,
}

/// A request of a test.
pub struct PlayedRequest<'a> {
    pub run: RunId,
    pub turn: u32,
    /// False for a summary of the conversation.
    pub is_turn: bool,
    pub definition: &'a str,
    /// `provider/model`.
    pub model: &'a str,
    pub system: &'a str,
    /// The agent's memory in the system prompt, which then is without it.
    pub memory: Option<&'a str>,
    pub messages: &'a [Message],
    pub tools: &'a [ToolSpec],
    pub params: &'a Params,
    pub loop_warn: u32,
}

/// What a test found.
#[derive(Debug, Default)]
pub struct PlaybackReport {
    /// In the order of the recording.
    pub divergences: Vec<Divergence>,
    /// In the order of the calls, whichever ended first.
    pub calls: Vec<PlayedCall>,
    /// By path.
    pub observed: BTreeMap<String, ObservedRun>,
}

impl Playback {
    pub fn new(recording: Arc<Recording>, ignore: Ignore, live: Live) -> Self {
        Self {
            recording,
            ignore,
            live,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self, path: &str) -> Option<&RunRecording> {
        self.recording.runs.iter().find(|run| run.path == path)
    }

    /// The redactor is that of `[data] redact`.
    pub fn start_root(&self, run: RunId, agent: &str, redactor: &Redactor) {
        let mut state = self.state();
        state.redactor = redactor.clone();
        state.paths.insert(run, agent.to_owned());
    }

    /// A call of `parent` starts a run of `agent`.
    pub fn start_child(&self, parent: RunId, call: &str, child: RunId, agent: &str) {
        let mut state = self.state();
        let position = state.calls.get(&(parent, call.to_owned())).copied();
        if let (Some(path), Some((turn, position))) = (state.paths.get(&parent), position) {
            let path = run_path::child(path, turn, position, agent);
            state.paths.insert(child, path);
        }
    }

    /// The recorded conversation before the run.
    pub fn history(&self, run: RunId) -> (Vec<Message>, Option<Compaction>) {
        let path = self.state().path(run);
        let Some(recorded) = self.recorded(&path) else {
            return (Vec::new(), None);
        };
        let compaction = recorded.compaction.as_ref().map(expected::to_compaction);
        (expected::history(recorded), compaction)
    }

    /// The recorded memory of the run's agent.
    pub fn memory(&self, run: RunId) -> String {
        let path = self.state().path(run);
        let memory = self.recorded(&path).and_then(|it| it.memory.clone());
        memory.unwrap_or_default()
    }

    /// The recorded messages that were sent to the run before this turn.
    pub fn added(&self, run: RunId, turn: u32) -> Vec<String> {
        let path = self.state().path(run);
        let recorded = self.recorded(&path);
        recorded.map_or(Vec::new(), |it| it.added(turn).to_vec())
    }

    /// The reason for which the run was cancelled after this reply, if the reply alone would end it.
    pub fn cancel_reason_after(&self, run: RunId, turn: u32) -> Option<String> {
        let path = self.state().path(run);
        let recorded = self.recorded(&path)?;
        let reply = recorded.turn(turn)?;
        let would_end = reply.calls.is_empty() && reply.followup.is_none();
        let reason = recorded.cancelled.clone();
        reason.filter(|_| would_end && recorded.is_cancelled_in(turn))
    }

    /// The reason for which the run was cancelled before it had a reply in this turn.
    pub fn cancel_reason(&self, run: RunId, turn: u32) -> Option<String> {
        let path = self.state().path(run);
        let recorded = self.recorded(&path)?;
        let reason = recorded.cancelled.clone();
        reason.filter(|_| recorded.turn(turn).is_none())
    }

    /// The recorded tools of these servers.
    pub fn mcp_toolset(&self, servers: &[McpServer]) -> McpToolset {
        let of_servers = self.recording.mcp.iter();
        recorded_tool::toolset(of_servers.flat_map(|server| &server.tools), servers)
    }

    /// Compares the request with the recording, and returns the recorded reply.
    pub fn reply(&self, request: &PlayedRequest<'_>) -> Result<Reply, ProviderError> {
        let mut state = self.state();
        let path = state.path(request.run);
        let recorded = self.recorded(&path);
        if !request.is_turn {
            let summary = recorded.and_then(|run| expected::summary_before(run, request.turn));
            return summary.ok_or_else(|| no_reply("it has no summary at this point"));
        }
        let added = recorded.map_or(0, |run| run.added(request.turn).len());
        state.observe(&path, request, added);
        let Some(recorded) = recorded else {
            let message = request.messages.last().map(message_text);
            state.diverge(
                &path,
                request.turn,
                Difference::unacceptable("run", "(none)", message.unwrap_or_default()),
            );
            return Err(no_reply(&format!("it has no run {path}")));
        };
        if let Some(difference) = self.compare(&mut state, &path, recorded, request) {
            state.diverge(&path, request.turn, difference);
        }
        if let Some(turn) = recorded.turn(request.turn) {
            return Ok(Reply {
                message: expected::reply_message(turn),
                usage: turn.usage.map(Into::into),
                stop_reason: turn.stop_reason.clone(),
                model: turn.model.clone(),
                outcome: match turn.outcome {
                    OutcomeRecording::Complete => ReplyOutcome::Complete,
                    OutcomeRecording::Truncated => ReplyOutcome::Truncated,
                    OutcomeRecording::Refused => ReplyOutcome::Refused,
                },
                refusal: None,
            });
        }
        if let Some(error) = &recorded.error {
            let category = ErrorCategory::parse(&error.category);
            let category = category.unwrap_or(ErrorCategory::Server);
            return Err(ProviderError::new(category, error.message.clone()));
        }
        let ended = format!("the run ended after turn {}", recorded.turns.len());
        let difference = Difference::unacceptable("turn", ended, format!("turn {}", request.turn));
        state.diverge(&path, request.turn, difference);
        Err(no_reply(&format!("{path} has no turn {}", request.turn)))
    }

    fn compare(
        &self,
        state: &mut State,
        path: &str,
        recorded: &RunRecording,
        request: &PlayedRequest<'_>,
    ) -> Option<Difference> {
        let State { runs, redactor, .. } = state;
        let played = runs.get_mut(path)?;
        let tolerance = Tolerance {
            ignore: &self.ignore,
            redactor,
        };
        if request.turn <= 1 {
            let tools = self.recorded_tools(recorded);
            let found = compare::compare_preamble(tolerance, recorded, &tools, &played.observed);
            if found.is_some() {
                return found;
            }
        }
        if self.live.tools {
            // What the tools return today may differ.
            return None;
        }
        let new = || ExpectedMessages::new(recorded, request.loop_warn);
        let expected = played.expected.get_or_insert_with(new);
        let messages = expected.of_turn(recorded, request.turn);
        compare::compare_messages(tolerance, messages, request.messages)
    }

    /// The recorded tools with these ids.
    fn recorded_tools(&self, run: &RunRecording) -> Vec<&ToolRecording> {
        let recording = &self.recording;
        let of_servers = recording.mcp.iter().flat_map(|server| &server.tools);
        let all: HashMap<&str, _> = of_servers
            .chain(&recording.tools)
            .map(|tool| (tool.id.as_str(), tool))
            .collect();
        let ids = run.tools.iter();
        ids.filter_map(|id| all.get(id.as_str()).copied()).collect()
    }

    /// A call begins. `position` counts from 1.
    pub fn begin_call(&self, run: RunId, turn: u32, position: usize, call: &ToolCall) {
        let mut state = self.state();
        let path = state.path(run);
        state.calls.insert((run, call.id.clone()), (turn, position));
        state.performed.push(PlayedCall {
            path,
            turn,
            position,
            tool: call.name.clone(),
            arguments: call.sent_arguments().to_owned(),
        });
    }

    /// The arguments that a person approved instead of the model's. Notes whether the call needs an approval as it did when
    /// it was recorded. Nobody decides during a test: with live tools, a call without a recorded approval is denied.
    ///
    /// # Errors
    /// Why the call is not executed.
    pub fn permit(
        &self,
        run: RunId,
        call: &ToolCall,
        needs_approval: bool,
    ) -> Result<Option<Arc<RawValue>>, String> {
        let mut state = self.state();
        let recorded = self.recorded_result(&state, run, call);
        let decision = recorded.and_then(|result| result.decision);
        // A copied call that failed may have been denied: its recording does not say so.
        let is_known = recorded.is_some_and(|it| decision.is_some() || !it.is_error);
        if is_known && decision.is_some() != needs_approval {
            let describe = |needed| if needed { "needed" } else { "not needed" };
            let difference = Difference::unacceptable(
                &format!("approval of {}", call.name),
                describe(decision.is_some()),
                describe(needs_approval),
            );
            let path = state.path(run);
            let turn = state.position(run, &call.id).0;
            state.diverge(&path, turn, difference);
        }
        match (decision, recorded) {
            (Some(Decision::Approved), Some(result)) => {
                Ok(result.arguments.as_ref().and_then(expected::raw_arguments))
            }
            (Some(_), Some(result)) => Err(result.text.clone()),
            _ if needs_approval && self.live.tools => Err(format!(
                "The call of {} was denied: the recording has no approval of it",
                call.name
            )),
            _ => Ok(None),
        }
    }

    /// Whether the call of another agent has a recorded result, but no recorded run: a fork had taken the result over, or the
    /// calling run was cancelled before the other one started.
    pub fn has_result_only(&self, run: RunId, call: &ToolCall) -> bool {
        if self.live.models {
            return false;
        }
        let state = self.state();
        let (path, (turn, position)) = (state.path(run), state.position(run, &call.id));
        let is_cancelled = self
            .recorded(&path)
            .is_some_and(|it| it.is_cancelled_in(turn));
        let prefix = format!("{path}/{turn}.{position}:");
        let mut runs = self.recording.runs.iter();
        let has_run = runs.any(|run| run.path.starts_with(&prefix));
        match self.recorded_result(&state, run, call) {
            Some(result) => result.reused || (!has_run && (!result.is_error || is_cancelled)),
            None => !has_run && is_cancelled,
        }
    }

    /// The recorded result of the call.
    pub fn result(&self, run: RunId, call: &ToolCall) -> Result<ToolOutput, String> {
        let mut state = self.state();
        let result = match self.live.models {
            true => self.result_of_same_call(&mut state, call),
            false => self.recorded_result(&state, run, call),
        };
        let Some(result) = result else {
            let text = format!(
                "The recording has no result of this call of {}. Record the run again, or use live tools.",
                call.name
            );
            if !self.live.models {
                let path = state.path(run);
                let (turn, position) = state.position(run, &call.id);
                let field = format!("result {turn}.{position} of {}", call.name);
                let difference = Difference::unacceptable(&field, "(none)", call.sent_arguments());
                // The call of a cancelled run may have had none.
                if self
                    .recorded(&path)
                    .is_none_or(|it| !it.is_cancelled_in(turn))
                {
                    state.diverge(&path, turn, difference);
                }
            }
            return Err(text);
        };
        match result.is_error {
            true => Err(result.text.clone()),
            false => Ok(result.text.clone().into()),
        }
    }

    fn recorded_result(
        &self,
        state: &State,
        run: RunId,
        call: &ToolCall,
    ) -> Option<&ResultRecording> {
        if self.live.models {
            return None;
        }
        let (turn, position) = state.position(run, &call.id);
        let result = self.recorded(&state.path(run))?.result(turn, position)?;
        (result.tool.is_empty() || result.tool == call.name).then_some(result)
    }

    /// The first unused result of a call with the same arguments, wherever it was made.
    fn result_of_same_call(&self, state: &mut State, call: &ToolCall) -> Option<&ResultRecording> {
        let json = |text: &str| {
            serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|_| text.into())
        };
        let arguments = json(call.sent_arguments());
        let runs = self.recording.runs.iter().enumerate();
        for (run_index, run) in runs {
            for (index, result) in run.results.iter().enumerate() {
                let turn = run.turn(result.turn);
                let recorded = turn.and_then(|it| it.calls.get(result.position.wrapping_sub(1)));
                let is_same = recorded.is_some_and(|recorded| {
                    recorded.tool == call.name
                        && json(&arguments_text(&recorded.arguments)) == arguments
                });
                if is_same && state.used.insert((run_index, index)) {
                    return Some(result);
                }
            }
        }
        None
    }

    /// Notes what a call of another agent returned.
    pub fn delegated(&self, run: RunId, call: &ToolCall, result: &ToolResult) {
        let mut state = self.state();
        let (path, position) = (state.path(run), state.position(run, &call.id));
        let State { runs, redactor, .. } = &mut *state;
        if let Some(played) = runs.get_mut(&path) {
            let mut observed = ObservedResult {
                text: result_text(result),
                is_error: result.is_error,
            };
            redact::redact_result(&mut observed, redactor);
            played.observed.results.insert(position, observed);
        }
    }

    /// What the test found. Call it when the tree has ended.
    pub fn finish(&self) -> PlaybackReport {
        let mut state = self.state();
        let mut ended_early: Vec<String> = Vec::new();
        for recorded in &self.recording.runs {
            // A run that ended early explains the runs that it did not start.
            if ended_early.iter().any(|it| recorded.path.starts_with(it)) {
                continue;
            }
            let played = state.runs.get(&recorded.path);
            let turns = played.map_or(0, |played| played.observed.turns);
            let recorded_turns = recorded.turns.last().map_or(0, |turn| turn.turn);
            if turns >= recorded_turns {
                continue;
            }
            let now = match turns {
                0 => "the run did not start".to_owned(),
                _ => format!("the run ended after turn {turns}"),
            };
            let difference = Difference::unacceptable("turn", format!("turn {}", turns + 1), now);
            state.diverge(&recorded.path, turns + 1, difference);
            ended_early.push(format!("{}/", recorded.path));
        }
        let mut state = std::mem::take(&mut *state);
        if self.live.models {
            state.differences.clear();
        }
        let order = |path: &str, turn: u32, position: usize| {
            let mut calls = run_path::calls(path);
            calls.push((turn, position));
            calls
        };
        let differences = &mut state.differences;
        differences.sort_by_cached_key(|it| order(&it.path, it.turn, 0));
        let performed = &mut state.performed;
        performed.sort_by_cached_key(|it| order(&it.path, it.turn, it.position));
        let runs = state.runs.into_iter();
        PlaybackReport {
            divergences: state.differences,
            calls: state.performed,
            observed: runs.map(|(path, run)| (path, run.observed)).collect(),
        }
    }
}

impl State {
    fn path(&self, run: RunId) -> String {
        self.paths.get(&run).cloned().unwrap_or_default()
    }

    fn position(&self, run: RunId, call: &str) -> (u32, usize) {
        let position = self.calls.get(&(run, call.to_owned()));
        position.copied().unwrap_or_default()
    }

    fn diverge(&mut self, path: &str, turn: u32, difference: Difference) {
        self.differences.push(Divergence {
            path: path.to_owned(),
            turn,
            difference,
        });
    }

    /// `added` is the number of messages at the end of the request that were sent to the run.
    fn observe(&mut self, path: &str, request: &PlayedRequest<'_>, added: usize) {
        let last = request.messages.iter().rev().nth(added);
        let Self { runs, redactor, .. } = self;
        let played = runs.entry(path.to_owned()).or_insert_with(|| {
            let params = neutral_params(request.params);
            let mut observed = ObservedRun {
                definition: request.definition.to_owned(),
                model: request.model.to_owned(),
                effort: params.effort,
                params: params.others,
                response_format: params.response_format,
                tools: request.tools.iter().map(tool_recording).collect(),
                system: request.system.to_owned(),
                memory: request.memory.map(str::to_owned),
                message: last.map(message_text).unwrap_or_default(),
                ..ObservedRun::default()
            };
            redact::redact_observed(&mut observed, redactor);
            PlayedRun {
                expected: None,
                observed,
            }
        });
        let observed = &mut played.observed;
        observed.turns = observed.turns.max(request.turn);
        if let (Some(message @ Message::User { .. }), true) = (last, request.turn > 1) {
            let followup = redactor.redact(&message_text(message)).into_owned();
            observed.followups.insert(request.turn - 1, followup);
        }
    }
}

fn message_text(message: &Message) -> String {
    match message {
        Message::User { content } => plain_text(content),
        Message::Assistant(reply) => reply.content.clone(),
        Message::Tool { .. } => String::new(),
    }
}

fn no_reply(why: &str) -> ProviderError {
    let message = format!("the recording has no reply: {why}");
    ProviderError::new(ErrorCategory::BadRequest, message)
}

/// The playbacks of the trees of an engine that runs tests.
#[derive(Debug, Default)]
pub struct Playbacks(Mutex<HashMap<RunId, Arc<Playback>>>);

impl Playbacks {
    pub fn insert(&self, root: RunId, playback: Arc<Playback>) {
        self.lock().insert(root, playback);
    }

    pub fn remove(&self, root: RunId) {
        self.lock().remove(&root);
    }

    pub fn get(&self, root: RunId) -> Option<Arc<Playback>> {
        self.lock().get(&root).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, Arc<Playback>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
