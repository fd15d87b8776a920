//! Makes a case of a recorded run: its input, its context and the messages before it.

use serde_json::{Map, Value, json};

use crate::catalog::prompt;
use crate::domain::content::{Content, Part};
use crate::domain::event::EventKind;
use crate::domain::run::{MARKS, RunId};
use crate::engine::history::RecordedConversation;
use crate::record::entry::{self, Entry};
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::web::response::conversation::Conversation;

/// Why a run cannot be a case; the end of "runs …".
pub type Unsuitable = &'static str;

/// What the record has of a run's request, as the HTTP API sends it.
pub struct RecordedRequest {
    /// What the request set besides its input, messages and labels; null if nothing.
    pub fields: Value,
    /// The conversation of the run, oldest first.
    pub messages: Vec<Value>,
}

/// Reads the request of a run.
///
/// # Errors
/// A text of the record is damaged, or the store fails.
pub async fn read(store: &dyn RunStore, id: RunId) -> Result<RecordedRequest, StoreError> {
    let damaged = |error: serde_json::Error| StoreError::Corrupt(format!("{id}: {error}"));
    let entries = store.entries(id).await?;
    let request = entries.iter().find_map(|it| match &it.entry {
        Entry::Event(EventKind::RunQueued { request, .. }) => request.clone(),
        _ => None,
    });
    let fields = request.map(|request| serde_json::from_str(request.get()));
    let fields = fields.transpose().map_err(damaged)?.unwrap_or_default();
    let recorded = RecordedConversation::from_steps(entry::steps(entries));
    let mut messages = Vec::new();
    while messages.len() < recorded.messages.len() {
        let page = Conversation::page(&recorded, messages.len());
        match &mut serde_json::to_value(page).map_err(damaged)?["data"] {
            Value::Array(data) if !data.is_empty() => messages.append(data),
            _ => break,
        }
    }
    Ok(RecordedRequest { fields, messages })
}

/// Whether axed started the run to judge others.
pub fn is_marked(run: &Value) -> bool {
    MARKS.iter().any(|mark| run["labels"].get(mark).is_some())
}

/// The case of a run, which is as the HTTP API sends it; or why it cannot be one.
pub fn case(
    run: &Value,
    recorded: RecordedRequest,
    with_expected: bool,
) -> Result<Map<String, Value>, Unsuitable> {
    let RecordedRequest { fields, messages } = recorded;
    if fields["too_large"] == true {
        return Err("whose request is too large to be recorded");
    }
    let context = fields["context"].as_str();
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
    if let (true, Some(answer)) = (with_expected, answers.into_iter().find(|it| !it.is_null())) {
        case.insert("expected".to_owned(), answer.clone());
    }
    case.insert("run".to_owned(), json!(run["id"]));
    Ok(case)
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
