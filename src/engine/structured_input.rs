//! The input of agents with an `input_schema`: an object that fits it, which reaches the model as JSON or through a template.

use std::sync::Arc;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::agent::Agent;
use crate::domain::content::Content;
use crate::domain::json_schema::Schema;
use crate::domain::json_schema::compiled::Mismatch;
use crate::domain::message::shorten;
use crate::validation;

/// The most bytes of a message that a template makes.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// The most characters of a list of mismatches for a model.
const MAX_REASON_CHARS: usize = 2000;

/// An input that fits its agent.
pub struct CheckedInput {
    /// As it is recorded: an object is its compact JSON.
    pub recorded: Option<Content>,
    /// The user message before a context is appended; the same as the recorded one if the agent has no schema.
    pub message: Option<Content>,
}

/// Checks the input of a root run. `is_object` says that the request had an object. A text that is the JSON of an object
/// also counts as one if the agent has a schema; `owner` is the key that sent it.
///
/// # Errors
/// What does not fit, with pointers into the input.
pub async fn check(
    agent: &Agent,
    input: Option<Content>,
    is_object: bool,
    owner: Option<&str>,
) -> Result<CheckedInput, Vec<Mismatch>> {
    let Some(schema) = &agent.input_schema else {
        if is_object {
            let reason = format!(
                "is an object, but agent {} takes a text or a list of parts: it has no input_schema",
                agent.name
            );
            return Err(vec![Mismatch::of_whole(reason)]);
        }
        return Ok(CheckedInput {
            message: input.clone(),
            recorded: input,
        });
    };
    let text = match input.filter(|input| !input.is_blank()) {
        None => "{}".to_owned(),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(_)) => {
            let reason = format!(
                "is a list of parts, but agent {} takes an object that fits its input_schema",
                agent.name
            );
            return Err(vec![Mismatch::of_whole(reason)]);
        }
    };
    let (json, message) = check_text(agent, schema, &text, owner).await?;
    Ok(CheckedInput {
        recorded: Some(json.into()),
        message: Some(message.into()),
    })
}

/// Checks the task that another agent's model gives to an agent. Returns the task and the user message; `None` if the agent
/// has no schema, so that its task is text.
///
/// # Errors
/// A sentence for the model.
pub async fn check_task(
    agent: &Agent,
    task: &str,
    owner: Option<&str>,
) -> Result<Option<(String, String)>, String> {
    let Some(schema) = &agent.input_schema else {
        return Ok(None);
    };
    let checked = check_text(agent, schema, task, owner).await;
    checked.map(Some).map_err(|mismatches| {
        let reasons: Vec<String> = mismatches.iter().map(Mismatch::to_string).collect();
        let reasons = shorten(&reasons.join("; "), MAX_REASON_CHARS);
        format!("its input does not fit its schema: {reasons}")
    })
}

/// The compact JSON of the object in a text, and the message that it makes.
async fn check_text(
    agent: &Agent,
    schema: &Arc<RawValue>,
    text: &str,
    owner: Option<&str>,
) -> Result<(String, String), Vec<Mismatch>> {
    let whole = |reason: String| vec![Mismatch::of_whole(reason)];
    let value = serde_json::from_str::<Value>(text)
        .ok()
        .filter(Value::is_object)
        .ok_or_else(|| {
            whole(format!(
                "must be an object, or the JSON of one: agent {} has an input_schema",
                agent.name
            ))
        })?;
    let schema = Schema::parse(Arc::clone(schema)).map_err(whole)?;
    let value = validation::check_value(schema, value, owner).await?;
    let json = value.to_string();
    let message = match &agent.input_template {
        None => json.clone(),
        Some(template) => template
            .render(&value, MAX_MESSAGE_BYTES)
            .ok_or_else(|| whole(format!("makes a message of over {MAX_MESSAGE_BYTES} bytes")))?,
    };
    Ok((json, message))
}
