//! `ask_person`: asks a person a question, and waits for the answer.

use std::sync::{Arc, LazyLock};

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};

use crate::domain::input::{ASK_PERSON, MAX_QUESTION_BYTES, Question};
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::tools::{
    AnswerToQuestion, AskRequest, CallContext, Effect, StaticSpec, Tool, ToolOutput,
};
use crate::validation;

const DESCRIPTION: &str = "Ask a person, and wait for the answer, which may take long. For what only a person can decide or know: \
                     which of several readings of the task is meant, a preference, a missing fact. Ask for one thing, with all \
                     that is needed to answer; the person does not see this conversation.";

const MAX_SCHEMA_BYTES: usize = 8 << 10;
const MAX_OPTIONS: usize = 20;
const MAX_OPTION_BYTES: usize = 200;

static SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<Arguments>(ASK_PERSON, DESCRIPTION));

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Arguments {
    /// The question.
    #[schemars(length(min = 1, max = 4000))]
    question: String,
    /// A JSON Schema of the answer, if it has to have a form: an object with simple fields becomes a form, an enum a choice. Without
    /// one the answer is a text.
    #[serde(default)]
    schema: Option<Map<String, Value>>,
    /// Suggested answers.
    #[serde(default)]
    #[schemars(length(max = 20))]
    options: Vec<String>,
}

struct AskPerson;

pub fn tool() -> Arc<dyn Tool> {
    Arc::new(AskPerson)
}

impl Tool for AskPerson {
    fn spec(&self) -> ToolSpec {
        SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::Asking
    }

    fn schema(&self) -> Option<&Schema> {
        SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let question = question(call, context.key).await?;
            let request = AskRequest {
                id: call.id.clone(),
                question,
                withdrawn: None,
            };
            let answer = context.delegate.ask(request).await?;
            describe(answer).map(ToolOutput::from)
        })
    }
}

/// `key` is the API key of the run.
async fn question(call: &ToolCall, key: Option<&str>) -> Result<Question, String> {
    let Arguments {
        question,
        schema,
        options,
    } = call.parse_arguments()?;
    if question.trim().is_empty() {
        return Err("question is empty".to_owned());
    }
    if question.len() > MAX_QUESTION_BYTES {
        return Err(format!("question has more than {MAX_QUESTION_BYTES} bytes"));
    }
    if options.len() > MAX_OPTIONS || options.iter().any(|it| it.len() > MAX_OPTION_BYTES) {
        return Err(format!(
            "options may be at most {MAX_OPTIONS}, of at most {MAX_OPTION_BYTES} bytes each"
        ));
    }
    let schema = match schema.filter(|it| !it.is_empty()) {
        Some(schema) => Some(checked_schema(&schema, key).await?),
        None => None,
    };
    Ok(Question {
        begun: None,
        call_id: call.id.clone(),
        text: question,
        schema,
        options,
        server: None,
    })
}

/// The schema of an answer.
///
/// # Errors
/// It is too large, or no schema.
pub async fn checked_schema(
    schema: &Map<String, Value>,
    key: Option<&str>,
) -> Result<Arc<RawValue>, String> {
    let invalid = |why: String| format!("schema cannot be used: {why}");
    let raw = to_raw_value(schema).map_err(|error| invalid(error.to_string()))?;
    if raw.get().len() > MAX_SCHEMA_BYTES {
        return Err(invalid(format!(
            "it has more than {MAX_SCHEMA_BYTES} bytes"
        )));
    }
    let schema = validation::compile_schema(raw.into(), key).await;
    Ok(Arc::clone(schema.map_err(invalid)?.raw()))
}

/// The result for the model, which is to know whose words it reads.
fn describe(answer: AnswerToQuestion) -> Result<String, String> {
    match answer {
        AnswerToQuestion::Answered(answer) => Ok(format!("A person answered: {}", text(&answer))),
        AnswerToQuestion::Declined(Some(reason)) => {
            Err(format!("A person declined to answer: {reason}"))
        }
        AnswerToQuestion::Declined(None) => Err("A person declined to answer".to_owned()),
        AnswerToQuestion::TimedOut { after, default } => {
            let after = after.as_secs();
            match default {
                Some(default) => Ok(format!(
                    "No person answered within {after}s. The default answer: {}",
                    text(&default)
                )),
                None => Err(format!("No person answered within {after}s")),
            }
        }
    }
}

/// A text as it is, other JSON as JSON.
fn text(answer: &RawValue) -> String {
    serde_json::from_str(answer.get()).unwrap_or_else(|_| answer.get().to_owned())
}
