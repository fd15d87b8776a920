//! A recorded run as a line of a dataset, from what the API shows of it.

use serde_json::{Map, Value, json};

use crate::catalog::prompt;
use crate::domain::content::{Content, Part};
use crate::domain::event::EventKind;
use crate::engine::history::RecordedConversation;
use crate::record::entry::{self, Entry, RecordedEntry};
use crate::web::response::conversation::Conversation;

/// Why a run cannot be a case; the end of "runs …".
pub type Unsuitable = &'static str;

/// The line of a run: `request` is what its request set besides its input, `messages` are those of its conversation. `expects` adds
/// the answer as what is expected.
pub fn case_line(
    run: &Value,
    request: &Value,
    messages: Vec<Value>,
    expects: bool,
) -> Result<String, Unsuitable> {
    if request["too_large"] == true {
        return Err("whose request is too large to be recorded");
    }
    let context = request["context"].as_str();
    let earlier = earlier_messages(messages, run, context);
    if has_files(&run["input"]) || earlier.iter().any(message_has_files) {
        return Err("with images or files");
    }
    let mut case = Map::new();
    case.insert("input".to_owned(), run["input"].clone());
    if let Some(context) = context {
        case.insert("context".to_owned(), context.into());
    }
    if !earlier.is_empty() {
        case.insert("messages".to_owned(), earlier.into());
    }
    let answers = [&run["structured"], &run["content"]];
    if let (true, Some(answer)) = (expects, answers.into_iter().find(|it| !it.is_null())) {
        case.insert("expected".to_owned(), answer.clone());
    }
    case.insert("run".to_owned(), run["id"].clone());
    Ok(Value::Object(case).to_string())
}

/// What the request for a run set besides its input, messages and labels; null if nothing.
pub fn recorded_request(entries: &[RecordedEntry]) -> serde_json::Result<Value> {
    let request = entries.iter().find_map(|it| match &it.entry {
        Entry::Event(EventKind::RunQueued { request, .. }) => request.as_ref(),
        _ => None,
    });
    let request = request.map(|request| serde_json::from_str(request.get()));
    Ok(request.transpose()?.unwrap_or_default())
}

/// The messages of a run, oldest first.
pub fn recorded_messages(entries: Vec<RecordedEntry>) -> serde_json::Result<Vec<Value>> {
    let recorded = RecordedConversation::from_steps(entry::steps(entries));
    let mut messages = Vec::new();
    while messages.len() < recorded.messages.len() {
        let page = Conversation::page(&recorded, messages.len());
        match &mut serde_json::to_value(page)?["data"] {
            Value::Array(data) if !data.is_empty() => messages.append(data),
            _ => break,
        }
    }
    Ok(messages)
}

/// The messages before those of the run itself. Its own replies are the last ones; before the first is its input, perhaps with messages
/// that were added to the run.
fn earlier_messages(mut messages: Vec<Value>, run: &Value, context: Option<&str>) -> Vec<Value> {
    let mut own_replies = run["turns"].as_u64().unwrap_or_default();
    let mut end = messages.len();
    while own_replies > 0 && end > 0 {
        end -= 1;
        own_replies -= u64::from(messages[end]["role"] == "assistant");
    }
    let before = messages[..end].iter().rposition(|it| it["role"] != "user");
    let start = before.map_or(0, |last| last + 1);
    let input = serde_json::from_value::<Content>(run["input"].clone()).ok();
    let input = json!(prompt::root_message(input, context));
    let own = messages[start..end].iter();
    // The message of an agent with a template differs from the input.
    let skipped = own.into_iter().position(|it| it["content"] == input);
    messages.truncate(start + skipped.unwrap_or_default());
    messages
}

fn message_has_files(message: &Value) -> bool {
    let mut results = message["tool_results"].as_array().into_iter().flatten();
    has_files(&message["content"]) || results.any(|it| it.get("attachments").is_some())
}

/// Whether a content has parts that are not texts: the record shows only their digests.
fn has_files(content: &Value) -> bool {
    let content = serde_json::from_value::<Content>(content.clone());
    let parts = content.iter().filter_map(Content::parts).flatten();
    parts
        .into_iter()
        .any(|part| !matches!(part, Part::Text { .. }))
}
