//! Approvals as input that a task requires, and the messages that decide on them.

use crate::web::clients::a2a::types::Part;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::domain::input::ArgumentsHash;
use crate::domain::run::{PendingInput, Run};
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::body::json_body::{self, Object};
use crate::web::clients::a2a::message::PartInput;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::routes::approvals::{self, DecisionRequest};
use crate::web::state::AppState;

/// A message of one of these words decides like a data part.
const APPROVE: &str = "approve";
const DENY: &str = "deny";

/// A data part that decides on a call.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DecisionInput {
    decision: String,
    reason: Option<String>,
    arguments: Option<Map<String, Value>>,
    /// Of the part that was looked at.
    arguments_hash: Option<ArgumentsHash>,
    /// Which call; needed only if several wait.
    approval_id: Option<String>,
}

/// A text for people, and one data part for each call that waits and whose arguments can be shown.
pub fn request_parts(run: &Run) -> Vec<Part> {
    let pending = &run.pending_inputs;
    let mut parts = Vec::with_capacity(pending.len() + 1);
    if !pending.is_empty() {
        parts.push(Part::text(request_text(pending)));
    }
    let shown = pending.iter();
    let shown = shown.filter(|approval| !approval.request.truncated);
    parts.extend(shown.map(|approval| {
        let request = &approval.request;
        Part::json(json!({
            "approvalId": id(approval),
            "agent": approval.agent,
            "tool": request.tool,
            "arguments": request.arguments,
            "argumentsHash": request.arguments_hash,
            "deadline": request.deadline,
        }))
    }));
    parts
}

fn request_text(pending: &[PendingInput]) -> String {
    let calls = pending.iter();
    let calls =
        calls.map(|approval| format!("{} wants to call {}", approval.agent, approval.request.tool));
    let calls = calls.collect::<Vec<_>>().join("; ");
    match pending.len() {
        1 => format!(
            "{calls}. Reply \"{APPROVE}\" or \"{DENY}\", or with data: {{\"decision\", \"reason\", \"arguments\"}}."
        ),
        _ => format!(
            "{calls}. Reply with one data part for each: {{\"approvalId\", \"decision\", \"reason\", \"arguments\"}}."
        ),
    }
}

fn id(approval: &PendingInput) -> String {
    format!("{}/{}", approval.run_id, approval.request.tool_call_id)
}

/// Whether the message can only be meant as a decision.
pub fn is_decision(parts: &[PartInput]) -> bool {
    let is_word = |part: &PartInput| {
        part.text
            .as_deref()
            .is_some_and(|text| word(text).is_some())
    };
    let has_decision = |part: &PartInput| {
        let data = part.data.as_deref();
        data.and_then(|json| serde_json::from_str::<Object<DecisionInput>>(json.get()).ok())
            .is_some_and(|Object(input)| !input.decision.is_empty())
    };
    matches!(parts, [part] if is_word(part)) || parts.iter().any(has_decision)
}

fn word(text: &str) -> Option<&'static str> {
    let text = text.trim();
    [APPROVE, DENY]
        .into_iter()
        .find(|word| text.eq_ignore_ascii_case(word))
}

/// Decides on the calls of the run that the message is about.
pub async fn apply(
    state: &AppState,
    principal: &Principal,
    run: &Run,
    parts: &[PartInput],
    claim: &IdempotencyClaim,
) -> Result<(), Problem> {
    let run = &*approvals::with_whole_arguments(state, run).await?;
    let mut decisions = Vec::new();
    for (at, input) in read(parts)? {
        let pointer = format!("/message/parts/{at}");
        let approval = approval_of(run, &input, &pointer)?;
        let decision = decision(input, &pointer)?;
        let shown = decision.check_shown(approval);
        shown.map_err(|why| Problem::invalid_field(&pointer, why))?;
        decisions.push((approval, decision));
    }
    let mut is_decided = false;
    let last = decisions.len().saturating_sub(1);
    for (at, (approval, decision)) in decisions.into_iter().enumerate() {
        let call = &approval.request.tool_call_id;
        // A repetition must not decide on another call that waits by then.
        let claim = (at == last).then(|| Box::new(claim.clone()));
        match approvals::apply(state, principal, approval.run_id, call, decision, claim).await {
            Ok(_) => is_decided = true,
            // Somebody else was quicker.
            Err(problem) if problem.code() == ProblemCode::NothingWaits.as_str() => {}
            Err(problem) => return Err(problem),
        }
    }
    match is_decided {
        true => Ok(()),
        false => Err(nothing_waits(run)),
    }
}

pub fn nothing_waits(run: &Run) -> Problem {
    let detail = format!("no call of the task {} waits for a decision", run.id);
    Problem::new(ProblemCode::NothingWaits, detail)
}

/// The decisions in the parts, with their positions. A text beside data parts is not read.
fn read(parts: &[PartInput]) -> Result<Vec<(usize, DecisionInput)>, Problem> {
    let mut inputs = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        if let Some(data) = &part.data {
            let pointer = format!("/message/parts/{at}/data");
            let Object(input) =
                json_body::parse_raw::<Object<DecisionInput>>(data.get(), &pointer)?;
            inputs.push((at, input));
        }
    }
    if let ([part], true) = (parts, inputs.is_empty())
        && let Some(word) = part.text.as_deref().and_then(word)
    {
        let decision = word.to_owned();
        inputs.push((
            0,
            DecisionInput {
                decision,
                ..DecisionInput::default()
            },
        ));
    }
    match inputs.is_empty() {
        false => Ok(inputs),
        true => Err(missing()),
    }
}

/// What a message without a decision gets.
pub fn missing() -> Problem {
    let why = "the task waits for approval: send the text approve or deny, or data with a decision";
    Problem::invalid_field("/message/parts", why)
}

fn approval_of<'r>(
    run: &'r Run,
    input: &DecisionInput,
    pointer: &str,
) -> Result<&'r PendingInput, Problem> {
    let pending = &run.pending_inputs;
    let pointer = format!("{pointer}/data/approvalId");
    match (&input.approval_id, pending.as_slice()) {
        (None, [only]) => Ok(only),
        (None, _) => Err(Problem::invalid_field(
            pointer,
            "is required, because several calls wait: send one data part for each",
        )),
        (Some(wanted), pending) => {
            let found = pending.iter().find(|approval| id(approval) == *wanted);
            found.ok_or_else(|| {
                let why = format!("{} does not wait for a decision", quote(wanted));
                Problem::invalid_field(pointer, why)
            })
        }
    }
}

fn decision(input: DecisionInput, pointer: &str) -> Result<DecisionRequest, Problem> {
    let hash = input.arguments_hash;
    match word(&input.decision) {
        Some(APPROVE) => {
            let approved = DecisionRequest::approve(input.arguments, input.reason);
            Ok(approved.for_arguments(hash))
        }
        Some(_) => Ok(DecisionRequest::deny(input.reason).for_arguments(hash)),
        None => Err(Problem::invalid_field(
            format!("{pointer}/data/decision"),
            "must be \"approve\" or \"deny\"",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{is_decision, read};

    fn is(parts: Value) -> bool {
        is_decision(&serde_json::from_value::<Vec<_>>(parts).expect("parts"))
    }

    #[test]
    fn words_and_data_are_decisions() {
        assert!(is(json!([{"text": " Approve "}])));
        assert!(is(
            json!([{"text": "see below"}, {"data": {"decision": "deny"}}])
        ));
        for other in [
            json!([{"text": "approve it"}]),
            json!([{"text": "approve"}, {"text": "now"}]),
            json!([{"data": {"approve": true}}]),
            json!([{"data": [1]}]),
        ] {
            assert!(!is(other.clone()), "{other}");
        }
    }

    #[test]
    fn a_message_without_a_decision_says_what_to_send() {
        let parts: Vec<_> = serde_json::from_value(json!([{"text": "yes?"}])).expect("parts");
        let problem = read(&parts).expect_err("no decision");
        assert!(problem.detail().contains("approve or deny"));
    }

    #[test]
    fn data_of_another_shape_is_named() {
        let wrong = |data: Value| {
            let parts = json!([{"data": {"decision": "deny"}}, {"data": data}]);
            let parts: Vec<_> = serde_json::from_value(parts).expect("parts");
            read(&parts).expect_err("a problem").detail().to_owned()
        };
        assert_eq!(
            wrong(json!({"decision": 5})),
            "/message/parts/1/data/decision: invalid type: integer `5`, expected a string"
        );
        assert_eq!(
            wrong(json!(["deny"])),
            "/message/parts/1/data: invalid type: array, expected an object"
        );
    }
}
