//! Approvals and questions as input that a task requires, and the messages that decide on them and answer them.

use crate::web::clients::a2a::types::Part;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::domain::input::{ArgumentsHash, Question};
use crate::domain::run::{PendingInput, Run};
use crate::store::IdempotencyClaim;
use crate::web::auth::Principal;
use crate::web::body::json_body::{self, Object};
use crate::web::clients::a2a::message::PartInput;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::routes::approvals::{self, DecisionRequest};
use crate::web::routes::inputs::{self, AnswerRequest};
use crate::web::state::AppState;

/// A message of one of these words decides like a data part.
const APPROVE: &str = "approve";
const DENY: &str = "deny";

/// A data part that decides on a call, or answers a question.
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
    /// The question that is answered.
    input_id: Option<String>,
    answer: Option<Value>,
    /// Why there is no answer.
    decline: Option<String>,
}

/// What a part is about, and what it says.
enum Given<'r> {
    Decision(&'r PendingInput, DecisionRequest),
    Answer(&'r PendingInput, AnswerRequest),
}

/// A text for people, and one data part for each question, and for each call that waits and whose arguments can be shown.
pub fn request_parts(run: &Run) -> Vec<Part> {
    let pending: Vec<&PendingInput> = run.pending_approvals().collect();
    let questions: Vec<(&PendingInput, &Question)> = run.pending_questions().collect();
    let mut parts = Vec::with_capacity(run.pending_inputs.len() + 2);
    if !pending.is_empty() {
        parts.push(Part::text(request_text(&pending)));
    }
    if !questions.is_empty() {
        parts.push(Part::text(questions_text(&questions)));
    }
    parts.extend(questions.iter().map(|(input, question)| {
        Part::json(json!({
            "inputId": id(input),
            "agent": input.agent,
            "server": question.server,
            "question": question.text,
            "schema": question.schema_json(),
            "options": question.options,
            "deadline": input.request.deadline,
        }))
    }));
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

fn request_text(pending: &[&PendingInput]) -> String {
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

fn questions_text(questions: &[(&PendingInput, &Question)]) -> String {
    let texts = questions.iter();
    let texts = texts.map(|(input, question)| question.sentence(&input.agent));
    let texts = texts.collect::<Vec<_>>().join("\n");
    match questions {
        [(_, question)] if question.schema.is_none() => texts,
        _ => format!(
            "{texts}\nReply with one data part for each: {{\"inputId\", \"answer\"}}, or {{\"inputId\", \"decline\"}}."
        ),
    }
}

fn id(input: &PendingInput) -> String {
    format!("{}/{}", input.run_id, input.request.tool_call_id)
}

/// Whether the message can only be meant as a decision or an answer.
pub fn is_decision(parts: &[PartInput]) -> bool {
    let is_word = |part: &PartInput| {
        part.text
            .as_deref()
            .is_some_and(|text| word(text).is_some())
    };
    let has_decision = |part: &PartInput| {
        let data = part.data.as_deref();
        data.and_then(|json| serde_json::from_str::<Object<DecisionInput>>(json.get()).ok())
            .is_some_and(|Object(input)| {
                let is_answer = input.answer.is_some() || input.decline.is_some();
                !input.decision.is_empty() || input.input_id.is_some() && is_answer
            })
    };
    matches!(parts, [part] if is_word(part)) || parts.iter().any(has_decision)
}

fn word(text: &str) -> Option<&'static str> {
    let text = text.trim();
    [APPROVE, DENY]
        .into_iter()
        .find(|word| text.eq_ignore_ascii_case(word))
}

/// Answers the only question of the run with a text.
pub async fn answer_text(
    state: &AppState,
    principal: &Principal,
    run: &Run,
    text: &str,
    claim: &IdempotencyClaim,
) -> Result<(), Problem> {
    let mut questions = run.pending_questions();
    let (Some((input, question)), None) = (questions.next(), questions.next()) else {
        return Err(missing(run));
    };
    if question.schema.is_some() || run.pending_approvals().next().is_some() {
        return Err(missing(run));
    }
    let answer = AnswerRequest::answer(json!(text));
    let (id, claim) = (&input.request.tool_call_id, Some(Box::new(claim.clone())));
    let answered = inputs::apply(state, principal, input.run_id, id, answer, claim);
    answered.await.map(drop)
}

/// Decides on the calls of the run that the message is about, and answers its questions.
pub async fn apply(
    state: &AppState,
    principal: &Principal,
    run: &Run,
    parts: &[PartInput],
    claim: &IdempotencyClaim,
) -> Result<(), Problem> {
    if let ([part], None) = (parts, run.pending_approvals().next())
        && let Some(text) = &part.text
    {
        return answer_text(state, principal, run, text, claim).await;
    }
    let run = &*approvals::with_whole_arguments(state, run).await?;
    let mut given = Vec::new();
    for (at, input) in read(run, parts)? {
        let pointer = format!("/message/parts/{at}");
        if let Some(wanted) = &input.input_id {
            let question = question_of(run, wanted, &pointer)?;
            given.push(Given::Answer(question, answer(input, &pointer)?));
            continue;
        }
        let approval = approval_of(run, &input, &pointer)?;
        let decision = decision(input, &pointer)?;
        let shown = decision.check_shown(approval);
        shown.map_err(|why| Problem::invalid_field(&pointer, why))?;
        given.push(Given::Decision(approval, decision));
    }
    let mut is_decided = false;
    let last = given.len().saturating_sub(1);
    for (at, given) in given.into_iter().enumerate() {
        // A repetition must not decide on another call that waits by then.
        let claim = (at == last).then(|| Box::new(claim.clone()));
        let applied = match given {
            Given::Decision(approval, decision) => {
                let (run, call) = (approval.run_id, &approval.request.tool_call_id);
                approvals::apply(state, principal, run, call, decision, claim).await
            }
            Given::Answer(question, answer) => {
                let (run, id) = (question.run_id, &question.request.tool_call_id);
                inputs::apply(state, principal, run, id, answer, claim).await
            }
        };
        match applied {
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
    let detail = format!(
        "nothing of the task {} waits for a decision or an answer",
        run.id
    );
    Problem::new(ProblemCode::NothingWaits, detail)
}

/// The decisions in the parts, with their positions. A text beside data parts is not read.
fn read(run: &Run, parts: &[PartInput]) -> Result<Vec<(usize, DecisionInput)>, Problem> {
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
        true => Err(missing(run)),
    }
}

/// What a message without a decision, or without an answer, gets.
pub fn missing(run: &Run) -> Problem {
    let why = match run.pending_approvals().next() {
        Some(_) => {
            "the task waits for approval: send the text approve or deny, or data with a decision"
        }
        None => "the task waits for answers: send data with inputId and answer, or decline",
    };
    Problem::invalid_field("/message/parts", why)
}

fn question_of<'r>(run: &'r Run, wanted: &str, pointer: &str) -> Result<&'r PendingInput, Problem> {
    let mut questions = run.pending_questions().map(|(input, _)| input);
    questions.find(|input| id(input) == wanted).ok_or_else(|| {
        let why = format!("{} does not wait for an answer", quote(wanted));
        Problem::invalid_field(format!("{pointer}/data/inputId"), why)
    })
}

fn answer(input: DecisionInput, pointer: &str) -> Result<AnswerRequest, Problem> {
    match (input.answer, input.decline) {
        (Some(answer), None) => Ok(AnswerRequest::answer(answer)),
        (None, Some(reason)) => Ok(AnswerRequest::decline(&reason)),
        _ => Err(Problem::invalid_field(
            format!("{pointer}/data"),
            "needs either answer or decline",
        )),
    }
}

fn approval_of<'r>(
    run: &'r Run,
    input: &DecisionInput,
    pointer: &str,
) -> Result<&'r PendingInput, Problem> {
    let pending: Vec<&PendingInput> = run.pending_approvals().collect();
    let pointer = format!("{pointer}/data/approvalId");
    match (&input.approval_id, pending.as_slice()) {
        (None, [only]) => Ok(*only),
        (None, _) => Err(Problem::invalid_field(
            pointer,
            "is required, because several calls wait: send one data part for each",
        )),
        (Some(wanted), pending) => {
            let found = pending.iter().find(|approval| id(approval) == *wanted);
            found.copied().ok_or_else(|| {
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
    use crate::domain::run::{Run, RunId, Scope};

    fn run() -> Run {
        Run::queued(&Scope::root(RunId::new(), None), "a".to_owned())
    }

    fn is(parts: Value) -> bool {
        is_decision(&serde_json::from_value::<Vec<_>>(parts).expect("parts"))
    }

    #[test]
    fn words_and_data_are_decisions() {
        assert!(is(json!([{"text": " Approve "}])));
        assert!(is(
            json!([{"text": "see below"}, {"data": {"decision": "deny"}}])
        ));
        assert!(is(json!([{"data": {"inputId": "run/call", "answer": 1}}])));
        for other in [
            json!([{"text": "approve it"}]),
            json!([{"text": "approve"}, {"text": "now"}]),
            json!([{"data": {"approve": true}}]),
            json!([{"data": [1]}]),
            json!([{"data": {"answer": 1}}]),
        ] {
            assert!(!is(other.clone()), "{other}");
        }
    }

    #[test]
    fn a_message_without_a_decision_says_what_to_send() {
        let parts: Vec<_> = serde_json::from_value(json!([{"text": "yes?"}])).expect("parts");
        let problem = read(&run(), &parts).expect_err("no decision");
        assert!(problem.detail().contains("inputId"));
    }

    #[test]
    fn data_of_another_shape_is_named() {
        let wrong = |data: Value| {
            let parts = json!([{"data": {"decision": "deny"}}, {"data": data}]);
            let parts: Vec<_> = serde_json::from_value(parts).expect("parts");
            read(&run(), &parts)
                .expect_err("a problem")
                .detail()
                .to_owned()
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
