//! Approvals and questions as input requests: a form for each tool call that waits for a decision and for each question, and the
//! client's answers to them.

use rmcp::model::{
    ElicitResult, ElicitationAction, InputRequest, InputRequests, InputRequiredResult,
    InputResponses,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::KeyScope;
use crate::domain::input::Question;
use crate::domain::run::{PendingInput, Run};
use crate::domain::terminal_text::{escape_json, sanitize_line};
use crate::web::auth::Principal;
use crate::web::body::json_body;
use crate::web::clients::mcp::protocol::Caller;
use crate::web::error::Problem;
use crate::web::problem_code::ProblemCode;
use crate::web::routes::approvals::{self, DecisionRequest};
use crate::web::routes::inputs::{self, AnswerRequest};
use crate::web::state::AppState;

/// The reason of a denial, or of no answer, by a client whose user declined the form.
const DECLINED: &str = "declined by the client's user";

/// The content of an accepted form.
#[derive(Default, Deserialize)]
#[serde(default)]
struct FormContent {
    decision: Option<FormDecision>,
    reason: Option<String>,
    /// A JSON object as text, because a form has no fields for objects.
    arguments: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FormDecision {
    Approve,
    Deny,
}

/// How forms are shown to a client.
#[derive(Clone, Copy)]
pub struct Forms {
    /// Whether the client's key may approve calls with other arguments.
    may_change_arguments: bool,
}

impl Forms {
    /// `None` if the client has no forms.
    pub fn new(caller: &Caller, principal: &Principal) -> Option<Self> {
        caller.supports_forms().then(|| Self {
            may_change_arguments: principal.has_scope(KeyScope::Approve),
        })
    }
}

/// One request for each question of the run's tree, and for each pending approval whose arguments fit a form. Its key is unique over the life of the
/// run.
pub async fn input_requests(
    state: &AppState,
    run: &Run,
    forms: Forms,
) -> Result<InputRequests, Problem> {
    let run = approvals::with_whole_arguments(state, run).await?;
    let shown = run.pending_inputs.iter();
    let shown = shown.filter(|input| !input.request.truncated);
    let requests = shown.map(|input| {
        let form = match input.request.question.as_deref() {
            Some(question) => question_form(input, question).0,
            None => form(input, forms),
        };
        let request = InputRequest::deserialize(form)
            .map_err(|error| Problem::internal(format!("an invalid form: {error}")))?;
        Ok((key(input), request))
    });
    requests.collect()
}

/// The result of a call that waits for approval. The client sends the call again with its answers and the run's id.
pub async fn input_required(
    state: &AppState,
    run: &Run,
    forms: Forms,
) -> Result<InputRequiredResult, Problem> {
    let requests = input_requests(state, run, forms).await?;
    Ok(InputRequiredResult::new(
        Some(requests),
        Some(run.id.to_string()),
    ))
}

fn key(approval: &PendingInput) -> String {
    format!("{}/{}", approval.run_id, approval.request.tool_call_id)
}

fn form(approval: &PendingInput, forms: Forms) -> Value {
    // A person decides on what is shown, also on characters that are invisible or change the order of others.
    let arguments = &escape_json(approval.request.arguments.get());
    let message = format!(
        "{} wants to call {} with {arguments}",
        approval.agent,
        sanitize_line(&approval.request.tool)
    );
    let mut properties = json!({
        "decision": {
            "type": "string",
            "title": "Decision",
            "enum": ["approve", "deny"],
        },
        "reason": {
            "type": "string",
            "title": "Reason",
            "description": "Why; the agent's model reads it if the call is denied.",
        },
    });
    if forms.may_change_arguments {
        properties["arguments"] = json!({
            "type": "string",
            "title": "Arguments",
            "description": "The JSON object that the tool is called with, if it is approved.",
            "default": arguments,
        });
    }
    json!({
        "method": "elicitation/create",
        "params": {
            "mode": "form",
            "message": message,
            "requestedSchema": {
                "type": "object",
                "properties": properties,
                "required": ["decision"],
            },
        },
    })
}

/// What the content of a form is to its question.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FormAnswer {
    /// The answer.
    Whole,
    /// Its field `answer` is.
    Field,
    /// Its field `answer` is the answer's JSON as text: forms have few types.
    Json,
}

/// The form of a question: its schema if it is one of a form, else one field.
fn question_form(input: &PendingInput, question: &Question) -> (Value, FormAnswer) {
    let message = question.sentence(&input.agent);
    let form = |schema: Value| {
        json!({
            "method": "elicitation/create",
            "params": { "mode": "form", "message": escape_json(&message), "requestedSchema": schema },
        })
    };
    let field = |schema: Value| {
        let properties = json!({ "answer": schema });
        form(json!({ "type": "object", "properties": properties, "required": ["answer"] }))
    };
    let schema = question.schema_json();
    if schema.is_null() {
        let text = json!({ "type": "string", "title": "Answer" });
        return (field(text), FormAnswer::Field);
    }
    let is_form = |form: &Value| InputRequest::deserialize(form).is_ok();
    if schema["type"] == "object" {
        let (properties, required) = (&schema["properties"], &schema["required"]);
        let mut whole = json!({ "type": "object", "properties": properties });
        if required.is_array() {
            whole["required"] = required.clone();
        }
        let whole = form(whole);
        if properties.is_object() && is_form(&whole) {
            return (whole, FormAnswer::Whole);
        }
    } else {
        let single = field(schema.clone());
        if is_form(&single) {
            return (single, FormAnswer::Field);
        }
    }
    let description = format!("JSON that fits this schema: {schema}");
    let text = json!({ "type": "string", "title": "Answer", "description": description });
    (field(text), FormAnswer::Json)
}

/// `None` if the user closed the form without an answer.
fn answer(
    input: &PendingInput,
    question: &Question,
    response: &Value,
) -> Result<Option<AnswerRequest>, String> {
    let response = ElicitResult::deserialize(response);
    let response = response.map_err(|error| json_body::describe(&error))?;
    match response.action {
        ElicitationAction::Accept => {}
        ElicitationAction::Decline => return Ok(Some(AnswerRequest::decline(DECLINED))),
        _ => return Ok(None),
    }
    let content = response.content.unwrap_or_default();
    let content = serde_json::to_value(content).map_err(|error| error.to_string())?;
    let field = || content.get("answer").ok_or("its content has no answer");
    let answer = match question_form(input, question).1 {
        FormAnswer::Whole => content,
        FormAnswer::Field => field()?.clone(),
        FormAnswer::Json => {
            let text = field()?.as_str().unwrap_or_default();
            let parsed = serde_json::from_str(text);
            parsed.map_err(|error| format!("its answer is not JSON: {error}"))?
        }
    };
    Ok(Some(AnswerRequest::answer(answer)))
}

/// Decides on the calls of the run that the client answered, and answers its questions. Answers to other calls are ignored. Returns whether any
/// decision was made.
pub async fn apply(
    state: &AppState,
    principal: &Principal,
    run: &Run,
    responses: &InputResponses,
) -> Result<bool, Problem> {
    let mut is_decided = false;
    let run = approvals::with_whole_arguments(state, run).await?;
    for approval in &run.pending_inputs {
        let key = key(approval);
        let Some(response) = responses.get(&key) else {
            continue;
        };
        if let Some(question) = approval.request.question.as_deref() {
            let given = answer(approval, question, response).map_err(|why| {
                let pointer = json_body::join_pointer("/inputResponses", &key);
                Problem::invalid_field(pointer, why)
            })?;
            let Some(given) = given else { continue };
            let (run, id) = (approval.run_id, &approval.request.tool_call_id);
            match inputs::apply(state, principal, run, id, given, None).await {
                Ok(_) => is_decided = true,
                // Somebody else was quicker.
                Err(problem) if problem.code() == ProblemCode::NothingWaits.as_str() => {}
                Err(problem) => return Err(problem),
            }
            continue;
        }
        let Some(decision) = decision(approval, response).map_err(|why| {
            let pointer = json_body::join_pointer("/inputResponses", &key);
            Problem::invalid_field(pointer, why)
        })?
        else {
            continue;
        };
        decision.check_shown(approval).map_err(|why| {
            let pointer = json_body::join_pointer("/inputResponses", &key);
            Problem::invalid_field(pointer, why)
        })?;
        let hash = approval.request.arguments_hash.clone();
        let decision = decision.for_arguments(Some(hash));
        let call = &approval.request.tool_call_id;
        match approvals::apply(state, principal, approval.run_id, call, decision, None).await {
            Ok(_) => is_decided = true,
            // Somebody else was quicker.
            Err(problem) if problem.code() == ProblemCode::NothingWaits.as_str() => {}
            Err(problem) => return Err(problem),
        }
    }
    Ok(is_decided)
}

/// `None` if the user closed the form without a decision.
fn decision(approval: &PendingInput, response: &Value) -> Result<Option<DecisionRequest>, String> {
    let response = ElicitResult::deserialize(response);
    let response = response.map_err(|error| json_body::describe(&error))?;
    match response.action {
        ElicitationAction::Accept => {}
        ElicitationAction::Decline => {
            return Ok(Some(DecisionRequest::deny(Some(DECLINED.to_owned()))));
        }
        _ => return Ok(None),
    }
    let content = response.content.unwrap_or_default();
    let content = FormContent::deserialize(content);
    let content = content.map_err(|error| json_body::describe(&error))?;
    match content.decision {
        None => Err("its content has no decision: \"approve\" or \"deny\"".to_owned()),
        Some(FormDecision::Deny) => Ok(Some(DecisionRequest::deny(content.reason))),
        Some(FormDecision::Approve) => {
            let arguments = changed_arguments(approval, content.arguments.as_deref())?;
            Ok(Some(DecisionRequest::approve(arguments, content.reason)))
        }
    }
}

/// The arguments of the form; `None` if they are the model's.
fn changed_arguments(
    approval: &PendingInput,
    text: Option<&str>,
) -> Result<Option<Map<String, Value>>, String> {
    let Some(text) = text.filter(|text| !text.trim().is_empty()) else {
        return Ok(None);
    };
    let arguments: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| format!("its arguments are not a JSON object: {error}"))?;
    let original = serde_json::from_str(approval.request.arguments.get()).ok();
    Ok(Some(arguments).filter(|changed| original.as_ref() != Some(changed)))
}
