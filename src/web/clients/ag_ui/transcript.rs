//! What of a run the client has seen: events while it streams, and from the record what these have left out.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use crate::domain::event::EventKind;
use crate::domain::run::RunId;
use crate::record::entry::Entry;
use crate::web::clients::ag_ui::events::{self, Frames};
use crate::web::clients::call_id::CallRef;

/// The transcript of the root run.
pub struct Transcript {
    run: RunId,
    /// The ids that calls are given out with, by their ids in the run.
    pub calls: HashMap<String, String>,
    /// How often the text of a turn was begun. Each time it is another message.
    attempts: HashMap<u32, u32>,
    /// The message whose text is streaming.
    open: Option<OpenText>,
    shown_texts: HashSet<u32>,
    shown_calls: HashSet<String>,
    shown_results: HashSet<String>,
}

struct OpenText {
    turn: u32,
    id: String,
    /// What was shown of it.
    text: String,
}

impl Transcript {
    pub fn new(run: RunId) -> Self {
        Self {
            run,
            calls: HashMap::new(),
            attempts: HashMap::new(),
            open: None,
            shown_texts: HashSet::new(),
            shown_calls: HashSet::new(),
            shown_results: HashSet::new(),
        }
    }

    /// Everything that is recorded was shown by earlier responses.
    pub fn skip_recorded(&mut self, steps: &[Entry]) {
        self.complete(steps, &mut Frames::default());
    }

    fn message_id(&self, turn: u32) -> String {
        match self.attempts.get(&turn) {
            None | Some(0) => format!("{}-{turn}", self.run),
            Some(attempt) => format!("{}-{turn}-{attempt}", self.run),
        }
    }

    /// A live event without a number.
    pub fn on_live(&mut self, kind: &EventKind, frames: &mut Frames) {
        match kind {
            EventKind::TextDelta { turn, text } if !text.is_empty() => {
                // A delta of another node may come after the end of its text.
                let is_new = self.shown_texts.insert(*turn);
                if is_new {
                    self.close_text(frames);
                    let id = self.message_id(*turn);
                    frames.push(&events::text_start(&id));
                    self.open = Some(OpenText {
                        turn: *turn,
                        id,
                        text: String::new(),
                    });
                }
                if let Some(open) = self.open.as_mut().filter(|open| open.turn == *turn) {
                    open.text.push_str(text);
                    frames.push(&events::text_content(&open.id, text));
                }
            }
            EventKind::TextWithdrawn { turn, .. } => {
                self.close_text(frames);
                // The snapshot at the end removes the message.
                *self.attempts.entry(*turn).or_default() += 1;
                self.shown_texts.remove(turn);
            }
            _ => {}
        }
    }

    pub fn on_event(&mut self, kind: &EventKind, frames: &mut Frames) {
        match kind {
            // Its text is closed by what follows: the record has the rest of it if deltas of another node are missing.
            EventKind::TurnCompleted {
                turn, tool_calls, ..
            } => {
                let ids = tool_calls.iter().map(|call| call.id.as_str());
                self.name_calls(*turn, ids);
            }
            // What an event has only the beginning of comes from the record.
            EventKind::ToolStarted {
                turn,
                tool_call_id,
                tool,
                arguments,
                truncated: false,
            } => {
                let id = self.calls.get(tool_call_id).cloned();
                let Some(id) = id.filter(|id| !self.shown_calls.contains(id)) else {
                    return;
                };
                self.close_text(frames);
                let message = self.message_id(*turn);
                let text = serde_json::from_str::<String>(arguments.get()).ok();
                let text = text.as_deref().unwrap_or_else(|| arguments.get());
                let events = events::tool_call(&id, tool, &message, text);
                events.iter().for_each(|event| frames.push(event));
                self.shown_calls.insert(id);
            }
            EventKind::ToolCompleted {
                tool_call_id,
                result,
                truncated: false,
                ..
            } => {
                if let Some(id) = self.calls.get(tool_call_id)
                    && self.shown_calls.contains(id)
                    && self.shown_results.insert(id.clone())
                {
                    frames.push(&events::tool_result(&result_id(id), id, result));
                }
            }
            _ => {}
        }
    }

    fn name_calls<'a>(&mut self, turn: u32, ids: impl Iterator<Item = &'a str>) {
        for (position, id) in (0..).zip(ids) {
            let call = CallRef {
                run: self.run,
                turn,
                position,
            };
            self.calls.insert(id.to_owned(), call.to_id());
        }
    }

    pub fn close_text(&mut self, frames: &mut Frames) {
        if let Some(open) = self.open.take() {
            frames.push(&events::text_end(&open.id));
        }
    }

    /// Shows the rest of the text that is streaming, and closes it.
    fn complete_text(&mut self, steps: &[Entry], frames: &mut Frames) {
        if let Some(open) = &self.open {
            let rest = steps.iter().find_map(|step| match step {
                Entry::Replied { turn, message, .. } if *turn == open.turn => {
                    message.content.strip_prefix(open.text.as_str())
                }
                _ => None,
            });
            if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
                frames.push(&events::text_content(&open.id, rest));
            }
        }
        self.close_text(frames);
    }

    /// Shows what of the record was not shown.
    pub fn complete(&mut self, steps: &[Entry], frames: &mut Frames) {
        self.complete_text(steps, frames);
        for step in steps {
            match step {
                Entry::Replied { turn, message, .. } => {
                    let ids = message.tool_calls.iter().map(|call| call.id.as_str());
                    self.name_calls(*turn, ids);
                    let id = self.message_id(*turn);
                    if !message.content.is_empty() && self.shown_texts.insert(*turn) {
                        frames.push(&events::text_start(&id));
                        frames.push(&events::text_content(&id, &message.content));
                        frames.push(&events::text_end(&id));
                    }
                    for call in &message.tool_calls {
                        let given = self.calls.get(&call.id).cloned().unwrap_or_default();
                        if self.shown_calls.insert(given.clone()) {
                            let json = call.sent_arguments();
                            let events = events::tool_call(&given, &call.name, &id, json);
                            events.iter().for_each(|event| frames.push(event));
                        }
                    }
                }
                Entry::CallCompleted { result, .. } => {
                    let given = self.calls.get(&result.call_id).cloned();
                    if let Some(id) = given
                        && self.shown_results.insert(id.clone())
                    {
                        let message = result_id(&id);
                        frames.push(&events::tool_result(&message, &id, &result.content));
                    }
                }
                _ => {}
            }
        }
    }

    /// The calls without a result: the client executes them.
    pub fn pending_calls(&self, steps: &[Entry]) -> Vec<String> {
        let replies = steps.iter().filter_map(|step| match step {
            Entry::Replied { message, .. } => Some(&message.tool_calls),
            _ => None,
        });
        let ids = replies
            .flatten()
            .filter_map(|call| self.calls.get(&call.id));
        let open = ids.filter(|id| !self.shown_results.contains(*id));
        open.cloned().collect()
    }

    /// The messages of the client, in which those that it has of the run are as recorded, and then the others of the run. All
    /// that the client sent keep their ids and places, but texts that were withdrawn are gone.
    pub fn snapshot(&self, sent: Vec<Value>, steps: &[Entry]) -> Vec<Value> {
        let mut own = self.recorded_messages(steps);
        let prefix = self.run.to_string();
        let mut messages = Vec::with_capacity(sent.len() + own.len());
        for message in sent {
            let id = message["id"].as_str().unwrap_or_default();
            match own.iter().position(|it| is_same_message(it, &message)) {
                Some(at) => {
                    let mut recorded = own.remove(at);
                    if !id.is_empty() {
                        recorded["id"] = id.into();
                    }
                    messages.push(recorded);
                }
                None if id.starts_with(&prefix) => {}
                None => messages.push(message),
            }
        }
        messages.append(&mut own);
        messages
    }

    fn recorded_messages(&self, steps: &[Entry]) -> Vec<Value> {
        let mut messages = Vec::new();
        for step in steps {
            match step {
                Entry::Replied { turn, message, .. } => {
                    let mut reply = json!({ "id": self.message_id(*turn), "role": "assistant" });
                    if !message.content.is_empty() {
                        reply["content"] = json!(message.content);
                    }
                    let calls = message.tool_calls.iter().map(|call| {
                        let function =
                            json!({ "name": call.name, "arguments": call.sent_arguments() });
                        json!({
                            "id": self.calls.get(&call.id),
                            "type": "function",
                            "function": function,
                        })
                    });
                    let calls: Vec<Value> = calls.collect();
                    if !calls.is_empty() {
                        reply["toolCalls"] = json!(calls);
                    }
                    messages.push(reply);
                }
                Entry::CallCompleted { result, .. } => {
                    if let Some(id) = self.calls.get(&result.call_id) {
                        messages.push(json!({
                            "id": result_id(id),
                            "role": "tool",
                            "toolCallId": id,
                            "content": result.content,
                        }));
                    }
                }
                _ => {}
            }
        }
        messages
    }
}

/// Whether a message that the client has is this one of the run: by its id, or by the call that it makes or answers.
fn is_same_message(recorded: &Value, sent: &Value) -> bool {
    let is_same = |pointer: &str| {
        let value = recorded.pointer(pointer);
        value.is_some() && value == sent.pointer(pointer)
    };
    recorded["role"] == sent["role"]
        && ["/id", "/toolCallId", "/toolCalls/0/id"]
            .into_iter()
            .any(is_same)
}

fn result_id(call: &str) -> String {
    format!("{call}-result")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::Transcript;
    use crate::domain::event::EventKind;
    use crate::domain::message::AssistantMessage;
    use crate::domain::run::RunId;
    use crate::record::entry::{Entry, ReplyReport};
    use crate::web::clients::ag_ui::events::Frames;

    #[test]
    fn a_text_whose_last_deltas_are_missing_is_completed_from_the_record() {
        let mut transcript = Transcript::new(RunId::new());
        let mut shown = Frames::default();
        let delta = |text: &str| EventKind::TextDelta {
            turn: 1,
            text: text.to_owned(),
        };
        transcript.on_live(&delta("one "), &mut shown);
        let message = AssistantMessage {
            content: "one two".to_owned(),
            ..AssistantMessage::default()
        };
        let reply = Entry::Replied {
            turn: 1,
            message,
            report: ReplyReport::default(),
        };
        transcript.complete(&[reply], &mut shown);
        // It comes from another node, after the end of the run.
        transcript.on_live(&delta("two"), &mut shown);
        let shown = shown.0.lines().filter_map(|it| it.strip_prefix("data: "));
        let shown: Vec<Value> = shown
            .map(|it| serde_json::from_str(it).expect("JSON"))
            .collect();
        let texts: String = shown
            .iter()
            .filter_map(|event| event["delta"].as_str())
            .collect();
        assert_eq!(texts, "one two");
        let kinds: Vec<_> = shown.iter().map(|event| &event["type"]).collect();
        let content = "TEXT_MESSAGE_CONTENT";
        let expected: [Value; 4] =
            ["TEXT_MESSAGE_START", content, content, "TEXT_MESSAGE_END"].map(Value::from);
        assert_eq!(kinds, expected.iter().collect::<Vec<_>>());
    }
}
