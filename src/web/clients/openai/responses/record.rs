//! What the record of a run says about one of its responses: a run that waits for results of its client's tools has a
//! response for each request that it got.

use std::collections::HashSet;
use std::sync::Arc;

use crate::domain::agent::Agent;
use crate::domain::agent::client_additions::{ClientAdditions, ClientTool};
use crate::domain::message::{AssistantMessage, Message, ToolResult};
use crate::domain::run::{Run, RunId, Status};
use crate::domain::usage::TokenUsage;
use crate::engine::delete_at_end::RunUse;
use crate::engine::history::RecordedConversation;
use crate::engine::record::agent_snapshots;
use crate::record::entry::{self, Entry};
use crate::web::auth::Principal;
use crate::web::clients::call_id::CallRef;
use crate::web::clients::openai::responses::echo::Echo;
use crate::web::clients::openai::responses::reference::ResponseRef;

use crate::web::clients::stop::{ClientCall, tokens_in};
use crate::web::error::Problem;
use crate::web::state::AppState;

/// A response with the part of its run's record that belongs to it.
pub struct ResponseRecord {
    pub reference: ResponseRef,
    pub run: Arc<Run>,
    /// What the client sent, for the response to show again.
    pub echo: Echo,
    pub tools: Vec<ClientTool>,
    /// The texts of the model with their turns.
    pub texts: Vec<(u32, String)>,
    /// The calls that the response ends with.
    pub calls: Vec<ClientCall>,
    /// `None` until the response has ended.
    pub tokens: Option<TokenUsage>,
    /// The results that the request brought.
    pub results: Vec<(CallRef, ToolResult)>,
    /// The turn with the calls that the request brought results for; 0 for the first response.
    after: u32,
    /// The turn with the calls that it ends with.
    end: Option<u32>,
    steps: Vec<Entry>,
}

impl ResponseRecord {
    /// The response with this id; 404 if there is none that the principal may see.
    pub async fn find(state: &AppState, principal: &Principal, id: &str) -> Result<Self, Problem> {
        let not_found = || ResponseRef::not_found(id);
        let reference = ResponseRef::parse(id).ok_or_else(not_found)?;
        let store = state.runner.store();
        let run = store.run(reference.run).await?.ok_or_else(not_found)?;
        if run.parent_id.is_some() || !principal.can_see_run(&run, store.as_ref()).await? {
            return Err(not_found());
        }
        let record = Self::load(state, Arc::new(run), reference.number).await?;
        record.ok_or_else(not_found)
    }

    /// Whether the run is one of this protocol.
    pub async fn has_responses(state: &AppState, run: RunId) -> Result<bool, Problem> {
        let additions = client_additions(state, run).await?;
        Ok(echo_of(&additions).is_some())
    }

    /// `None` if the run has no such response.
    pub async fn load(
        state: &AppState,
        run: Arc<Run>,
        number: u32,
    ) -> Result<Option<Self>, Problem> {
        let store = state.runner.store();
        let additions = client_additions(state, run.id).await?;
        let Some(echo) = echo_of(&additions) else {
            return Ok(None);
        };
        let steps = entry::steps(store.entries(run.id).await?);
        let turns = client_turns(&steps, &additions.tools);
        let Some(after) = turn_before(&turns, number) else {
            return Ok(None);
        };
        let results = client_results(&run, &steps, after, &additions.tools);
        if number > 1 && results.is_empty() {
            return Ok(None);
        }
        let end = turns.get(number as usize - 1).copied();
        let mut record = Self {
            reference: ResponseRef {
                run: run.id,
                number,
            },
            texts: texts(&run, &steps, after, end),
            calls: Vec::new(),
            tokens: None,
            results,
            run,
            echo,
            tools: additions.tools,
            after,
            end,
            steps,
        };
        record.calls = record.client_calls();
        if record.has_ended() {
            let is_only = after == 0 && end.is_none();
            record.tokens = Some(match is_only {
                true => record.run.tree.usage.tokens,
                false => tokens_in(state, &record.run, &record.steps, after, end).await?,
            });
        }
        Ok(Some(record))
    }

    /// Ends the use of the run. A run that waits for its client is deleted after its last response, or if that never comes.
    pub async fn finish(&self, run_use: Option<RunUse>) {
        if let Some(run_use) = run_use
            && self.run.status.is_terminal()
        {
            run_use.finish().await;
        }
    }

    pub fn has_ended(&self) -> bool {
        self.end.is_some() || self.run.status.is_terminal()
    }

    pub fn ends_with_calls(&self) -> bool {
        self.end.is_some()
    }

    pub fn status(&self) -> &'static str {
        if self.end.is_some() {
            return "completed";
        }
        match self.run.status {
            Status::Queued => "queued",
            Status::Running | Status::Waiting | Status::Cancelling => "in_progress",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::Cancelled => "cancelled",
        }
    }

    /// The conversation up to the end of this response. Calls of the client have the ids that they were given out with.
    pub fn conversation(&self) -> Vec<Message> {
        let last = self.end.unwrap_or(u32::MAX);
        let own_names: HashSet<&str> = self.tools.iter().map(|tool| tool.name.as_str()).collect();
        let mut kept = Vec::new();
        for mut step in self.steps.iter().cloned() {
            match &mut step {
                Entry::Replied { turn, .. } | Entry::CallCompleted { turn, .. } if *turn > last => {
                    continue;
                }
                Entry::Replied { turn, message, .. } => {
                    *message = self.with_given_ids(*turn, message, &own_names);
                }
                Entry::CallCompleted {
                    turn,
                    position,
                    result,
                    ..
                } => {
                    let call = self.call_name(*turn, *position);
                    if call.is_some_and(|name| own_names.contains(name)) {
                        if *turn == last {
                            continue;
                        }
                        result.call_id = self.given_id(*turn, *position);
                    }
                }
                _ => {}
            }
            kept.push(step);
        }
        RecordedConversation::from_steps(kept).messages
    }

    /// The number of messages before the first reply.
    pub fn prompt_length(&self) -> usize {
        let mut steps = self.steps.iter().rev();
        let earlier = steps.find_map(|step| match step {
            Entry::Prompted { earlier, .. } => Some(earlier.len()),
            _ => None,
        });
        earlier.map_or(0, |earlier| earlier + 1)
    }

    fn given_id(&self, turn: u32, position: u32) -> String {
        let call = CallRef {
            run: self.run.id,
            turn,
            position,
        };
        call.to_id()
    }

    fn with_given_ids(
        &self,
        turn: u32,
        message: &AssistantMessage,
        own_names: &HashSet<&str>,
    ) -> AssistantMessage {
        let mut message = message.clone();
        for (position, call) in (0..).zip(&mut message.tool_calls) {
            if own_names.contains(call.name.as_str()) {
                call.id = self.given_id(turn, position);
                call.provider_id = String::new();
                message.echo = None;
            }
        }
        message
    }

    fn call_name(&self, turn: u32, position: u32) -> Option<&str> {
        let reply = reply_of(&self.steps, turn)?;
        let call = reply.tool_calls.get(position as usize)?;
        Some(&call.name)
    }

    fn client_calls(&self) -> Vec<ClientCall> {
        let Some(turn) = self.end else {
            return Vec::new();
        };
        let reply = reply_of(&self.steps, turn);
        let calls = (0..).zip(reply.map_or(&[][..], |reply| reply.tool_calls.as_slice()));
        let is_client = |name: &str| self.tools.iter().any(|tool| tool.name == name);
        let calls = calls.filter(|(_, call)| is_client(&call.name));
        let calls = calls.map(|(position, call)| ClientCall {
            id: self.given_id(turn, position),
            call: call.clone(),
        });
        calls.collect()
    }

    /// The turn with the calls for the client that the response ends with.
    pub fn end_turn(&self) -> Option<u32> {
        self.end
    }

    /// The number of the last event of the run, when it was read.
    pub fn last_event(&self) -> u64 {
        self.run.last_event
    }

    /// The turn of the last recorded reply; 0 if there is none.
    pub fn last_turn(&self) -> u32 {
        let turns = self.steps.iter().filter_map(|step| match step {
            Entry::Replied { turn, .. } => Some(*turn),
            _ => None,
        });
        turns.max().unwrap_or_default()
    }

    /// The turn with the calls that the request brought results for.
    pub fn seen_turn(&self) -> Option<u32> {
        (self.after > 0).then_some(self.after)
    }

    /// The number of the response that results for this turn begin.
    pub async fn number_after(state: &AppState, run: &Run, turn: u32) -> Result<u32, Problem> {
        let store = state.runner.store();
        let definition = store.definition(run.id).await?;
        let agent = definition.and_then(|json| agent_snapshots::parse(&json));
        let tools = agent.map(|agent| agent.client_tools().to_vec());
        let steps = entry::steps(store.entries(run.id).await?);
        let turns = client_turns(&steps, &tools.unwrap_or_default());
        let before = turns.iter().filter(|it| **it <= turn).count();
        Ok(u32::try_from(before + 1).unwrap_or(u32::MAX))
    }
}

/// What the client of the run has added to its agent.
async fn client_additions(state: &AppState, run: RunId) -> Result<ClientAdditions, Problem> {
    let definition = state.runner.store().definition(run).await?;
    let agent = definition.and_then(|json| agent_snapshots::parse(&json));
    let additions = agent
        .as_deref()
        .and_then(|agent: &Agent| agent.client.clone());
    Ok(additions.map(|it| *it).unwrap_or_default())
}

fn echo_of(additions: &ClientAdditions) -> Option<Echo> {
    let json = additions.echo.as_ref()?;
    serde_json::from_str(json.get()).ok()
}

fn reply_of(steps: &[Entry], turn: u32) -> Option<&AssistantMessage> {
    steps.iter().find_map(|step| match step {
        Entry::Replied {
            turn: own, message, ..
        } if *own == turn => Some(message),
        _ => None,
    })
}

/// The turns whose replies call tools of the client.
fn client_turns(steps: &[Entry], tools: &[ClientTool]) -> Vec<u32> {
    let is_client = |name: &str| tools.iter().any(|tool| tool.name == name);
    let turns = steps.iter().filter_map(|step| match step {
        Entry::Replied { turn, message, .. } => {
            let mut calls = message.tool_calls.iter();
            calls.any(|call| is_client(&call.name)).then_some(*turn)
        }
        _ => None,
    });
    turns.collect()
}

/// The turn before the response with this number; `None` if there is no such response.
fn turn_before(turns: &[u32], number: u32) -> Option<u32> {
    match number {
        0 => None,
        1 => Some(0),
        number => turns.get(number as usize - 2).copied(),
    }
}

/// The texts of the replies of a response, without those that the model had to correct. The last text of a run that ended
/// with JSON is the JSON alone.
fn texts(run: &Run, steps: &[Entry], after: u32, end: Option<u32>) -> Vec<(u32, String)> {
    let mut texts: Vec<(u32, String)> = Vec::new();
    for step in steps {
        match step {
            Entry::Replied { turn, message, .. }
                if *turn > after
                    && end.is_none_or(|end| *turn <= end)
                    && !message.content.trim().is_empty() =>
            {
                texts.push((*turn, message.content.clone()));
            }
            Entry::Followup { .. } => drop(texts.pop()),
            _ => {}
        }
    }
    if let (true, Some(content), Some((turn, text))) =
        (run.structured, &run.content, texts.last_mut())
        && *turn == run.turns
    {
        text.clone_from(content);
    }
    texts
}

fn client_results(
    run: &Run,
    steps: &[Entry],
    after: u32,
    tools: &[ClientTool],
) -> Vec<(CallRef, ToolResult)> {
    let Some(reply) = reply_of(steps, after) else {
        return Vec::new();
    };
    let results = steps.iter().filter_map(|step| match step {
        Entry::CallCompleted {
            turn,
            position,
            result,
            ..
        } if *turn == after => {
            let call = reply.tool_calls.get(*position as usize)?;
            tools.iter().find(|tool| tool.name == call.name)?;
            let reference = CallRef {
                run: run.id,
                turn: *turn,
                position: *position,
            };
            Some((reference, result.clone()))
        }
        _ => None,
    });
    results.collect()
}
