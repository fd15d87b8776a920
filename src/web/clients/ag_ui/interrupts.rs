//! Approvals and questions as interrupts. Their answers come as `resume` entries of the next request, all at once.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::domain::input::ArgumentsHash;
use crate::domain::run::{PendingInput, Run, RunId};
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::clients::ag_ui::input::ResumeEntry;
use crate::web::error::{Problem, quote};
use crate::web::extract::path::visible_run_id;
use crate::web::problem_code::ProblemCode;
use crate::web::routes::approvals::{self, DecisionRequest};
use crate::web::routes::inputs::{self, AnswerRequest};
use crate::web::routes::runs::require_run;
use crate::web::state::AppState;

/// The reason of a denial, or of no answer, by a user who abandons the interrupt.
const CANCELLED: &str = "cancelled by the user";

/// `calls` has the ids that the root's calls were given out with.
pub fn interrupts(
    run: &Run,
    calls: &HashMap<String, String>,
    may_change_arguments: bool,
) -> Vec<Value> {
    let questions = run.pending_questions().map(|(input, question)| {
        let schema = question.schema_json();
        let mut interrupt = json!({
            "id": id(input),
            "reason": "input",
            "message": question.text,
            "responseSchema": {
                "type": "object",
                "properties": {
                    "answer": if schema.is_null() { json!({ "type": "string" }) } else { schema },
                    "decline": { "type": "string" },
                },
            },
            "metadata": {
                "agent": input.agent,
                "options": question.options,
                "server": question.server,
            },
        });
        add_call(&mut interrupt, run, input, &question.call_id, calls);
        interrupt
    });
    let shown = run.pending_approvals();
    let shown = shown.filter(|approval| !approval.request.truncated);
    let interrupts = shown.map(|approval| {
        let request = &approval.request;
        let mut interrupt = json!({
            "id": id(approval),
            "reason": "tool_approval",
            "message": format!("{} wants to call {}", approval.agent, request.tool),
            "responseSchema": {
                "type": "object",
                "properties": {
                    "decision": { "type": "string", "enum": ["approve", "deny"] },
                    "reason": { "type": "string" },
                    "argumentsHash": { "type": "string" },
                },
                "required": ["decision"],
            },
            "metadata": {
                "tool": request.tool,
                "arguments": request.arguments,
                "argumentsHash": request.arguments_hash,
            },
        });
        if may_change_arguments {
            interrupt["responseSchema"]["properties"]["arguments"] = json!({ "type": "object" });
        }
        add_call(&mut interrupt, run, approval, &request.tool_call_id, calls);
        interrupt
    });
    interrupts.chain(questions).collect()
}

/// Adds the call, if it is one of the root's, and the deadline.
fn add_call(
    interrupt: &mut Value,
    run: &Run,
    input: &PendingInput,
    call: &str,
    calls: &HashMap<String, String>,
) {
    if input.run_id == run.id
        && let Some(call) = calls.get(call)
    {
        interrupt["toolCallId"] = json!(call);
    }
    if let Some(deadline) = input.request.deadline {
        interrupt["expiresAt"] = json!(deadline);
    }
}

fn id(input: &PendingInput) -> String {
    format!("{}/{}", input.run_id, input.request.tool_call_id)
}

/// What an entry says.
enum Given {
    Decision(DecisionRequest),
    Answer(AnswerRequest),
}

/// The root run that the entries are for.
pub async fn interrupted_run(
    state: &AppState,
    principal: &Principal,
    agent: &str,
    entries: &[ResumeEntry],
) -> Result<Run, Problem> {
    let first = entries.first().map_or("", |it| it.interrupt_id.as_str());
    let run = first.split_once('/').map_or(first, |(run, _)| run);
    let id = visible_run_id(principal, state, run).await?;
    let root: RunId = require_run(state, id).await?.root_id;
    let run = require_run(state, root).await?;
    match run.agent == agent {
        true => Ok(run),
        false => Err(Problem::run_not_found(id)),
    }
}

/// Decides on every pending approval of the run, and answers every question.
pub async fn decide(
    state: &AppState,
    principal: &Principal,
    run: &Run,
    entries: Vec<ResumeEntry>,
    claim: Option<&IdempotencyClaim>,
) -> Result<(), Problem> {
    let run = &*approvals::with_whole_arguments(state, run).await?;
    let mut decisions = HashMap::new();
    for (at, entry) in entries.into_iter().enumerate() {
        let mut inputs = run.pending_inputs.iter();
        let input = inputs.find(|it| id(it) == entry.interrupt_id);
        let given = match input {
            Some(input) if input.request.question.is_some() => Given::Answer(answer(&entry, at)?),
            Some(approval) => {
                let decision = decision(&entry, at)?;
                let shown = decision.check_shown(approval);
                shown
                    .map_err(|why| Problem::invalid_field(format!("/resume/{at}/payload"), why))?;
                Given::Decision(decision)
            }
            // Somebody else was quicker, perhaps.
            None => continue,
        };
        decisions.insert(entry.interrupt_id, given);
    }
    let pending = run.pending_inputs.iter();
    let mut pending: Vec<_> = pending
        .filter(|approval| principal.can_use_agent(&approval.agent))
        .collect();
    let is_answered = |it: &&PendingInput| decisions.contains_key(&id(it));
    let is_any_answered = pending.iter().any(is_answered);
    let mut open = pending.iter().filter(|it| !is_answered(it));
    // Those that were not shown may be left to others.
    if let Some(open) = open.find(|it| !it.request.truncated || !is_any_answered) {
        let why = format!(
            "does not answer {}; answer every interrupt at once",
            quote(&id(open))
        );
        return Err(Problem::invalid_field("/resume", why));
    }
    pending.retain(is_answered);
    let last = pending.len().saturating_sub(1);
    for (at, approval) in pending.into_iter().enumerate() {
        let Some(given) = decisions.remove(&id(approval)) else {
            continue;
        };
        let (run, call) = (approval.run_id, &approval.request.tool_call_id);
        let claim = claim.filter(|_| at == last).cloned().map(Box::new);
        let applied = match given {
            Given::Decision(decision) => {
                approvals::apply(state, principal, run, call, decision, claim).await
            }
            Given::Answer(answer) => {
                inputs::apply(state, principal, run, call, answer, claim).await
            }
        };
        match applied {
            // Somebody else may have been quicker.
            Err(problem) if problem.code() != ProblemCode::NothingWaits.as_str() => {
                return Err(problem);
            }
            _ => {}
        }
    }
    Ok(())
}

fn answer(entry: &ResumeEntry, at: usize) -> Result<AnswerRequest, Problem> {
    if entry.status == "cancelled" {
        return Ok(AnswerRequest::decline(CANCELLED));
    }
    let payload = &entry.payload;
    match (payload.get("answer"), payload["decline"].as_str()) {
        (Some(answer), None) => Ok(AnswerRequest::answer(answer.clone())),
        (None, Some(reason)) => Ok(AnswerRequest::decline(reason)),
        _ => {
            let pointer = format!("/resume/{at}/payload");
            let why = "must be {\"answer\": …} or {\"decline\": \"why\"}";
            Err(Problem::invalid_field(pointer, why))
        }
    }
}

fn decision(entry: &ResumeEntry, at: usize) -> Result<DecisionRequest, Problem> {
    if entry.status == "cancelled" {
        return Ok(DecisionRequest::deny(Some(CANCELLED.to_owned())));
    }
    let payload = &entry.payload;
    let is_approved = match (payload["decision"].as_str(), payload["approved"].as_bool()) {
        (Some("approve"), _) => true,
        (Some("deny"), _) => false,
        (None, Some(approved)) => approved,
        _ => {
            let pointer = format!("/resume/{at}/payload");
            let why = "must be {\"decision\": \"approve\" or \"deny\"}";
            return Err(Problem::invalid_field(pointer, why));
        }
    };
    let reason = payload["reason"].as_str().map(str::to_owned);
    let arguments: Option<Map<String, Value>> = payload["arguments"].as_object().cloned();
    let hash = payload["argumentsHash"].as_str();
    let decision = match is_approved {
        true => DecisionRequest::approve(arguments, reason),
        false => DecisionRequest::deny(reason),
    };
    Ok(decision.for_arguments(hash.map(|hash| ArgumentsHash(hash.to_owned()))))
}
