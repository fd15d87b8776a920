//! What of a run the client has seen: events while it streams, and from the record what these have left out.

use std::collections::{HashMap, HashSet, VecDeque};

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::domain::event::StoredEvent;
use crate::domain::run::RunId;
use crate::store::Step;
use crate::web::clients::ag_ui::events;
use crate::web::clients::call_id::CallRef;

/// The transcript of the root run.
pub struct Transcript {
    run: RunId,
    /// The ids that calls are given out with, by their ids in the run.
    pub calls: HashMap<String, String>,
    /// How often the text of a turn was begun. Each time it is another message.
    attempts: HashMap<u32, u32>,
    /// The message whose text is streaming.
    open: Option<(u32, String)>,
    shown_texts: HashSet<u32>,
    shown_calls: HashSet<String>,
    shown_results: HashSet<String>,
}

#[derive(Deserialize)]
struct TextDelta {
    turn: u32,
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
struct TurnCompleted {
    turn: u32,
    tool_calls: Vec<NamedCall>,
}

#[derive(Deserialize)]
struct NamedCall {
    id: String,
}

#[derive(Deserialize)]
struct ToolEvent {
    turn: u32,
    tool_call_id: String,
    tool: String,
    #[serde(default)]
    arguments: Option<Box<RawValue>>,
    #[serde(default)]
    result: String,
    #[serde(default)]
    truncated: bool,
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
    pub fn skip_recorded(&mut self, steps: &[Step]) {
        self.complete(steps, &mut VecDeque::new());
    }

    fn message_id(&self, turn: u32) -> String {
        match self.attempts.get(&turn) {
            None | Some(0) => format!("{}-{turn}", self.run),
            Some(attempt) => format!("{}-{turn}-{attempt}", self.run),
        }
    }

    /// A live event without a number.
    pub fn on_delta(&mut self, name: &str, data: &str, queue: &mut VecDeque<Value>) {
        let Ok(delta) = serde_json::from_str::<TextDelta>(data) else {
            return;
        };
        match name {
            "text.delta" if !delta.text.is_empty() => {
                if self
                    .open
                    .as_ref()
                    .is_none_or(|(turn, _)| *turn != delta.turn)
                {
                    self.close_text(queue);
                    let id = self.message_id(delta.turn);
                    queue.push_back(events::text_start(&id));
                    self.open = Some((delta.turn, id));
                    self.shown_texts.insert(delta.turn);
                }
                if let Some((_, id)) = &self.open {
                    queue.push_back(events::text_content(id, &delta.text));
                }
            }
            "text.withdrawn" => {
                self.close_text(queue);
                // The snapshot at the end removes the message.
                *self.attempts.entry(delta.turn).or_default() += 1;
                self.shown_texts.remove(&delta.turn);
            }
            _ => {}
        }
    }

    pub fn on_event(&mut self, event: &StoredEvent, queue: &mut VecDeque<Value>) {
        match event.name.as_str() {
            "turn.completed" => {
                self.close_text(queue);
                if let Ok(turn) = serde_json::from_str::<TurnCompleted>(&event.data) {
                    let ids = turn.tool_calls.iter().map(|call| call.id.as_str());
                    self.name_calls(turn.turn, ids);
                }
            }
            "tool.started" | "tool.completed" => {
                if let Ok(tool) = serde_json::from_str::<ToolEvent>(&event.data) {
                    self.on_tool(&tool, queue);
                }
            }
            _ => {}
        }
    }

    fn on_tool(&mut self, tool: &ToolEvent, queue: &mut VecDeque<Value>) {
        let Some(id) = self.calls.get(&tool.tool_call_id).cloned() else {
            return;
        };
        // What the event has only the beginning of comes from the record.
        match &tool.arguments {
            Some(arguments) if !tool.truncated && !self.shown_calls.contains(&id) => {
                let message = self.message_id(tool.turn);
                queue.extend(events::tool_call(
                    &id,
                    &tool.tool,
                    &message,
                    arguments.get(),
                ));
                self.shown_calls.insert(id);
            }
            None if !tool.truncated
                && self.shown_calls.contains(&id)
                && self.shown_results.insert(id.clone()) =>
            {
                queue.push_back(events::tool_result(&result_id(&id), &id, &tool.result));
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

    pub fn close_text(&mut self, queue: &mut VecDeque<Value>) {
        if let Some((_, id)) = self.open.take() {
            queue.push_back(events::text_end(&id));
        }
    }

    /// Shows what of the record was not shown.
    pub fn complete(&mut self, steps: &[Step], queue: &mut VecDeque<Value>) {
        self.close_text(queue);
        for step in steps {
            match step {
                Step::Reply { turn, message } => {
                    let ids = message.tool_calls.iter().map(|call| call.id.as_str());
                    self.name_calls(*turn, ids);
                    let id = self.message_id(*turn);
                    if !message.content.is_empty() && self.shown_texts.insert(*turn) {
                        queue.push_back(events::text_start(&id));
                        queue.push_back(events::text_content(&id, &message.content));
                        queue.push_back(events::text_end(&id));
                    }
                    for call in &message.tool_calls {
                        let given = self.calls.get(&call.id).cloned().unwrap_or_default();
                        if self.shown_calls.insert(given.clone()) {
                            let json = call.arguments.get();
                            queue.extend(events::tool_call(&given, &call.name, &id, json));
                        }
                    }
                }
                Step::Result { result, .. } => {
                    let given = self.calls.get(&result.call_id).cloned();
                    if let Some(id) = given
                        && self.shown_results.insert(id.clone())
                    {
                        let message = result_id(&id);
                        queue.push_back(events::tool_result(&message, &id, &result.content));
                    }
                }
                _ => {}
            }
        }
    }

    /// The calls without a result: the client executes them.
    pub fn pending_calls(&self, steps: &[Step]) -> Vec<String> {
        let replies = steps.iter().filter_map(|step| match step {
            Step::Reply { message, .. } => Some(&message.tool_calls),
            _ => None,
        });
        let ids = replies
            .flatten()
            .filter_map(|call| self.calls.get(&call.id));
        let open = ids.filter(|id| !self.shown_results.contains(*id));
        open.cloned().collect()
    }

    /// The messages of the client, and those of the run in place of what it has of them.
    pub fn snapshot(&self, client_messages: &[Value], steps: &[Step]) -> Vec<Value> {
        let given: HashSet<&String> = self.calls.values().collect();
        let prefix = self.run.to_string();
        let is_of_run = |message: &Value| {
            let id = message["id"].as_str().unwrap_or_default();
            let call = message["toolCallId"].as_str().map(str::to_owned);
            id.starts_with(&prefix) || call.is_some_and(|call| given.contains(&call))
        };
        let others = client_messages.iter().filter(|message| !is_of_run(message));
        let mut messages: Vec<Value> = others.cloned().collect();
        for step in steps {
            match step {
                Step::Reply { turn, message } => {
                    let mut reply = json!({ "id": self.message_id(*turn), "role": "assistant" });
                    if !message.content.is_empty() {
                        reply["content"] = json!(message.content);
                    }
                    let calls = message.tool_calls.iter().map(|call| {
                        let function =
                            json!({ "name": call.name, "arguments": call.arguments.get() });
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
                Step::Result { result, .. } => {
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

fn result_id(call: &str) -> String {
    format!("{call}-result")
}
