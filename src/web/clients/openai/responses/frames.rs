//! The frames of a response's stream that are not sent yet, with the item that is being written.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::domain::run::RunId;
use crate::web::clients::openai::DONE;
use crate::web::clients::openai::responses::numbers::{self, Cursor, Numbers};
use crate::web::clients::openai::responses::object;
use crate::web::clients::stop::ClientCall;
use crate::web::error::Problem;

pub struct Frames {
    run: RunId,
    pub frames: String,
    pub numbers: Numbers,
    /// Where the client continues to read.
    pub cursor: Option<Cursor>,
    /// The items that were begun.
    item_count: usize,
    pub open: Option<OpenItem>,
    /// The turn whose text was withdrawn last: the item that replaces it has another id.
    withdrawn_turn: Option<u32>,
}

/// A message whose text is being sent.
pub struct OpenItem {
    pub turn: u32,
    id: String,
    index: usize,
    pub text: String,
}

impl Frames {
    pub fn new(run: RunId, cursor: Option<Cursor>) -> Self {
        Self {
            run,
            frames: String::new(),
            numbers: Numbers::new(cursor),
            cursor,
            item_count: 0,
            open: None,
            withdrawn_turn: None,
        }
    }

    pub fn push_end_of_stream(&mut self) {
        self.frames.push_str(DONE);
    }

    pub fn is_open(&self, turn: u32) -> bool {
        self.open.as_ref().is_some_and(|open| open.turn == turn)
    }

    pub fn set_text(&mut self, text: &str) {
        if let Some(open) = &mut self.open {
            text.clone_into(&mut open.text);
        }
    }

    /// Begins the message of a turn, unless it is the open one.
    pub fn begin_text(&mut self, turn: u32) {
        if self.is_open(turn) {
            return;
        }
        let last_event = self.numbers.last_event();
        self.end_text("completed", last_event);
        self.open_item(turn);
        self.push_added(last_event, numbers::LIVE_ADDED);
        self.push_part_added(last_event, numbers::LIVE_PART_ADDED);
    }

    pub fn open_item(&mut self, turn: u32) {
        let index = self.item_count;
        self.item_count += 1;
        let mut id = object::message_id(self.run, turn);
        if self.withdrawn_turn == Some(turn) {
            id.push_str(&format!("_{index}"));
        }
        self.open = Some(OpenItem {
            turn,
            id,
            index,
            text: String::new(),
        });
    }

    pub fn push_added(&mut self, event: u64, place: u64) {
        if let Some(open) = &self.open {
            let item = object::message(&open.id, "", "in_progress");
            let data = json!({"output_index": open.index, "item": item});
            self.push("response.output_item.added", event, place, data);
        }
    }

    pub fn push_part_added(&mut self, event: u64, place: u64) {
        if let Some(open) = &self.open {
            let mut data = open.place();
            data["part"] = object::text_part("");
            self.push("response.content_part.added", event, place, data);
        }
    }

    /// Returns whether the text is short enough to be sent in pieces.
    pub fn push_text(&mut self, text: &str) -> bool {
        self.push_text_after(text, self.numbers.last_event())
    }

    /// As [`Self::push_text`], after an event.
    pub fn push_text_after(&mut self, text: &str, event: u64) -> bool {
        let Some(open) = self.open.as_mut().filter(|_| !text.is_empty()) else {
            return true;
        };
        if open.text.len() + text.len() > numbers::MAX_LIVE_TEXT {
            return false;
        }
        open.text.push_str(text);
        let place = numbers::live_text(open.text.len());
        self.push_delta(text, event, place);
        true
    }

    pub fn push_delta(&mut self, text: &str, event: u64, place: u64) {
        if let Some(open) = &self.open {
            let mut data = open.place();
            data["delta"] = text.into();
            data["logprobs"] = json!([]);
            self.push("response.output_text.delta", event, place, data);
        }
    }

    /// Ends the open message after an event.
    pub fn end_text(&mut self, status: &str, event: u64) {
        if let Some(open) = &self.open
            && status == "incomplete"
        {
            self.withdrawn_turn = Some(open.turn);
        }
        self.push_done(status, event, numbers::TEXT_DONE);
        self.open = None;
    }

    /// The frames that end the open message, from the one at `first`.
    pub fn push_done(&mut self, status: &str, event: u64, first: u64) {
        let Some(open) = &self.open else {
            return;
        };
        let mut text_done = open.place();
        text_done["text"] = open.text.as_str().into();
        text_done["logprobs"] = json!([]);
        let mut part_done = open.place();
        part_done["part"] = object::text_part(&open.text);
        let item = object::message(&open.id, &open.text, status);
        let item_done = json!({"output_index": open.index, "item": item});
        for (name, place, data) in [
            ("response.output_text.done", numbers::TEXT_DONE, text_done),
            ("response.content_part.done", numbers::PART_DONE, part_done),
            ("response.output_item.done", numbers::DONE, item_done),
        ] {
            if place >= first {
                self.push(name, event, place, data);
            }
        }
    }

    pub fn push_call(&mut self, at: usize, call: &ClientCall, event: u64) {
        let index = self.item_count;
        self.item_count += 1;
        let id = object::function_call_id(&call.id);
        let arguments = call.call.sent_arguments();
        let added = object::function_call(call, "in_progress");
        let done = object::function_call(call, "completed");
        let frames = [
            (
                "response.output_item.added",
                json!({"output_index": index, "item": added}),
            ),
            (
                "response.function_call_arguments.delta",
                json!({"item_id": id, "output_index": index, "delta": arguments}),
            ),
            (
                "response.function_call_arguments.done",
                json!({"item_id": id, "output_index": index, "name": call.call.name, "arguments": arguments}),
            ),
            (
                "response.output_item.done",
                json!({"output_index": index, "item": done}),
            ),
        ];
        for (frame, (name, data)) in (0..).zip(frames) {
            let is_delta = frame == 1;
            if self
                .cursor
                .is_none_or(|it| !is_delta && !it.has_call_frame(at, frame))
            {
                self.push(name, event, numbers::call_frame(at, frame), data);
            }
        }
    }

    /// A client that reconnects with its number has not lost its place.
    pub fn push_error(&mut self, problem: &Problem) {
        let error = json!({"code": problem.code(), "message": problem.detail(), "param": null});
        let number = self.numbers.last();
        self.push_numbered("error", number, error);
        self.push_end_of_stream();
    }

    /// Adds an event with the number for a place after an event of the run.
    pub fn push(&mut self, name: &str, event: u64, place: u64, data: Value) {
        let number = self.numbers.after(event, place);
        self.push_numbered(name, number, data);
    }

    fn push_numbered(&mut self, name: &str, number: u64, mut data: Value) {
        data["type"] = name.into();
        data["sequence_number"] = number.into();
        let _ = write!(self.frames, "event: {name}\ndata: {data}\n\n");
    }
}

impl OpenItem {
    fn place(&self) -> Value {
        json!({"item_id": self.id, "output_index": self.index, "content_index": 0})
    }
}
