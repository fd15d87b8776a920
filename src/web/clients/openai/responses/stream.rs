//! A response as Server-Sent Events. The texts come from the run's live deltas. The end comes from the record, which
//! adds what the deltas have left out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;
use tracing::warn;

use crate::domain::run::Run;
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::web::clients::openai::responses::object;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::stop::{self, ClientCall};
use crate::web::error::Problem;
use crate::web::state::AppState;

/// A comment, which clients ignore. Proxies close idle connections.
const KEEP_ALIVE: &str = ": keep-alive\n\n";
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const DONE: &str = "data: [DONE]\n\n";
/// Between the numbers of two committed events.
const NUMBERS_PER_EVENT: u64 = 1 << 20;

pub struct ResponseStream {
    state: AppState,
    /// As it was when the stream began.
    record: ResponseRecord,
    subscription: Option<Subscription>,
    /// Resolves when the run has stopped; `None` once it has.
    stopped: Option<BoxFuture<'static, Arc<Run>>>,
    /// Whether texts are sent as a whole: the model may correct JSON that does not fit its schema.
    is_whole: bool,
    is_stored: bool,
    /// Frames that are not sent yet.
    frames: VecDeque<String>,
    numbers: Numbers,
    /// The items that were begun.
    item_count: usize,
    open: Option<OpenItem>,
    /// Turns whose text is sent.
    closed_turns: Vec<u32>,
    heartbeat_at: Instant,
}

/// A message whose text is being sent.
struct OpenItem {
    turn: u32,
    id: String,
    index: usize,
    text: String,
}

/// The numbers of events: after that of the last committed event of the run.
#[derive(Debug, Default)]
struct Numbers {
    last_event: u64,
    next: u64,
}

impl Numbers {
    fn committed(&mut self, event: u64) {
        if event > self.last_event {
            (self.last_event, self.next) = (event, 0);
        }
    }

    fn next(&mut self) -> u64 {
        let number = self.last_event * NUMBERS_PER_EVENT + self.next;
        self.next += 1;
        number
    }
}

/// `text.delta` and `text.withdrawn`.
#[derive(Deserialize)]
struct TextEvent {
    turn: u32,
    #[serde(default)]
    text: String,
}

impl ResponseStream {
    pub fn new(
        state: AppState,
        record: ResponseRecord,
        subscription: Option<Subscription>,
        is_whole: bool,
        is_stored: bool,
    ) -> Self {
        let (run, seen_turn) = (Arc::clone(&record.run), record.seen_turn());
        let stop_state = state.clone();
        let stopped = async move { stop::wait_for_stop(&stop_state, run, seen_turn).await };
        let mut begun = object::response(&record);
        begun["status"] = "in_progress".into();
        begun["output"] = json!([]);
        begun["usage"] = Value::Null;
        begun["completed_at"] = Value::Null;
        begun["incomplete_details"] = Value::Null;
        begun["error"] = Value::Null;
        let mut stream = Self {
            state,
            numbers: Numbers {
                last_event: record.run.last_event,
                next: 0,
            },
            record,
            subscription,
            stopped: Some(Box::pin(stopped)),
            is_whole,
            is_stored,
            frames: VecDeque::new(),
            item_count: 0,
            open: None,
            closed_turns: Vec::new(),
            heartbeat_at: Instant::now() + KEEP_ALIVE_INTERVAL,
        };
        stream.push("response.created", json!({"response": begun}));
        stream.push("response.in_progress", json!({"response": begun}));
        stream
    }

    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Option<String> {
        while self.frames.is_empty() {
            self.stopped.as_ref()?;
            self.read_more().await;
        }
        self.heartbeat_at = Instant::now() + KEEP_ALIVE_INTERVAL;
        Some(self.frames.drain(..).collect())
    }

    /// Adds frames for what happens next.
    async fn read_more(&mut self) {
        let Some(stopped) = &mut self.stopped else {
            return;
        };
        let received = async {
            match &mut self.subscription {
                Some(subscription) => subscription.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = received => match event {
                Ok(event) => self.on_event(&event),
                // The record has the text that is lost here.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => self.subscription = None,
            },
            run = stopped => {
                self.stopped = None;
                self.drain();
                self.finish(run).await;
            }
            () = tokio::time::sleep_until(self.heartbeat_at) => {
                self.frames.push_back(KEEP_ALIVE.to_owned());
            }
        }
    }

    /// Reads the deltas that were published before the run stopped.
    fn drain(&mut self) {
        while let Some(subscription) = &mut self.subscription {
            match subscription.try_recv() {
                Ok(event) => self.on_event(&event),
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    fn on_event(&mut self, event: &StreamEvent) {
        let (name, data) = match event {
            StreamEvent::Stored(event) => return self.numbers.committed(event.seq),
            StreamEvent::Ephemeral { run_id, name, data } if *run_id == self.record.run.id => {
                (*name, data)
            }
            StreamEvent::Ephemeral { .. } => return,
        };
        let Ok(event) = serde_json::from_str::<TextEvent>(data) else {
            return;
        };
        match name {
            "text.delta" if !self.is_whole => {
                self.begin_text(event.turn);
                self.push_text(&event.text);
            }
            // The text that replaces it is another item.
            "text.withdrawn" => self.end_text("incomplete"),
            _ => {}
        }
    }

    /// Begins the message of a turn, unless it is the open one.
    fn begin_text(&mut self, turn: u32) {
        if self.open.as_ref().is_some_and(|open| open.turn == turn) {
            return;
        }
        self.end_text("completed");
        let index = self.item_count;
        self.item_count += 1;
        let mut id = object::message_id(&self.record, turn);
        if self.closed_turns.contains(&turn) {
            id.push_str(&format!("_{index}"));
        }
        let item = object::message(&id, "", "in_progress");
        self.push(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
        );
        self.push(
            "response.content_part.added",
            json!({"item_id": id, "output_index": index, "content_index": 0, "part": object::text_part("")}),
        );
        self.open = Some(OpenItem {
            turn,
            id,
            index,
            text: String::new(),
        });
    }

    fn push_text(&mut self, text: &str) {
        let Some(open) = self.open.as_mut().filter(|_| !text.is_empty()) else {
            return;
        };
        open.text.push_str(text);
        let data = json!({
            "item_id": open.id, "output_index": open.index, "content_index": 0, "delta": text, "logprobs": [],
        });
        self.push("response.output_text.delta", data);
    }

    fn end_text(&mut self, status: &str) {
        let Some(OpenItem {
            turn,
            id,
            index,
            text,
        }) = self.open.take()
        else {
            return;
        };
        let place = || json!({"item_id": id, "output_index": index, "content_index": 0});
        let mut done = place();
        done["text"] = text.as_str().into();
        done["logprobs"] = json!([]);
        self.push("response.output_text.done", done);
        let mut part = place();
        part["part"] = object::text_part(&text);
        self.push("response.content_part.done", part);
        let item = object::message(&id, &text, status);
        self.push(
            "response.output_item.done",
            json!({"output_index": index, "item": item}),
        );
        self.closed_turns.push(turn);
    }

    /// Sends the end of the response.
    async fn finish(&mut self, run: Arc<Run>) {
        let number = self.record.reference.number;
        let loaded = ResponseRecord::load(&self.state, run, number).await;
        let loaded = loaded.and_then(|record| {
            record.ok_or_else(|| Problem::internal("a response without its record"))
        });
        match loaded {
            Ok(record) => {
                self.push_end(&record);
                let deleted = record.delete_unless(&self.state, self.is_stored).await;
                if let Err(problem) = deleted {
                    let run = record.run.id;
                    warn!(run.id = %run, "Cannot delete {run}: {}", problem.detail());
                }
            }
            Err(problem) => self.push_error(&problem),
        }
        self.frames.push_back(DONE.to_owned());
    }

    fn push_end(&mut self, record: &ResponseRecord) {
        for (turn, text) in &record.texts {
            let is_open = self.open.as_ref().is_some_and(|open| open.turn == *turn);
            if self.closed_turns.contains(turn) && !is_open {
                continue;
            }
            self.begin_text(*turn);
            let sent = self
                .open
                .as_ref()
                .map(|open| open.text.clone())
                .unwrap_or_default();
            if let Some(rest) = text.strip_prefix(sent.as_str()) {
                self.push_text(rest);
            }
            self.end_text("completed");
        }
        self.end_text("incomplete");
        for call in &record.calls {
            self.push_call(call);
        }
        let response = object::response(record);
        let name = match response["status"].as_str() {
            Some("completed") => "response.completed",
            Some("incomplete") => "response.incomplete",
            _ => "response.failed",
        };
        self.push(name, json!({"response": response}));
    }

    fn push_call(&mut self, call: &ClientCall) {
        let index = self.item_count;
        self.item_count += 1;
        let added = object::function_call(call, "in_progress");
        let id = object::function_call_id(&call.id);
        self.push(
            "response.output_item.added",
            json!({"output_index": index, "item": added}),
        );
        let arguments = call.call.arguments.get();
        self.push(
            "response.function_call_arguments.delta",
            json!({"item_id": id, "output_index": index, "delta": arguments}),
        );
        self.push(
            "response.function_call_arguments.done",
            json!({"item_id": id, "output_index": index, "name": call.call.name, "arguments": arguments}),
        );
        let done = object::function_call(call, "completed");
        self.push(
            "response.output_item.done",
            json!({"output_index": index, "item": done}),
        );
    }

    fn push_error(&mut self, problem: &Problem) {
        let error = json!({"code": problem.code(), "message": problem.detail(), "param": null});
        self.push("error", error);
    }

    fn push(&mut self, name: &str, mut data: Value) {
        data["type"] = name.into();
        data["sequence_number"] = self.numbers.next().into();
        self.frames
            .push_back(format!("event: {name}\ndata: {data}\n\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::Numbers;

    #[test]
    fn numbers_follow_the_committed_events() {
        let mut numbers = Numbers::default();
        assert_eq!((numbers.next(), numbers.next()), (0, 1));
        numbers.committed(2);
        assert_eq!((numbers.next(), numbers.next()), (2 << 20, (2 << 20) + 1));
        numbers.committed(1);
        assert_eq!(numbers.next(), (2 << 20) + 2);
    }
}
