//! A response as Server-Sent Events, from its beginning or from where a client has stopped reading. Texts come from the run's
//! live deltas. What is recorded comes from the record, which also adds what the deltas have left out.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::domain::event::{EventKind, LiveEvent, StoredEvent};
use crate::engine::delete_at_end::RunUse;
use crate::engine::state::broadcaster::Subscription;
use crate::engine::state::live_text::PartialReply;
use crate::web::clients::openai::KEEP_ALIVE;
use crate::web::clients::openai::responses::frames::Frames;
use crate::web::clients::openai::responses::numbers::{self, Cursor};
use crate::web::clients::openai::responses::object;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::openai::responses::reference::ResponseRef;
use crate::web::clients::openai::responses::replies::Replies;
use crate::web::clients::stop;
use crate::web::error::Problem;
use crate::web::response::stream_driver::{Projection, Read, StreamDriver};
use crate::web::state::AppState;

pub struct ResponseStream {
    /// As it was when the stream began.
    record: ResponseRecord,
    /// As it is at its end, before that is sent.
    ended: Option<Box<ResponseRecord>>,
    is_ending: bool,
    /// Whether texts are sent as a whole: the model may correct JSON that does not fit its schema.
    is_whole: bool,
    /// Whether texts may be lost between nodes.
    may_lose_texts: bool,
    /// `None` if the run is kept.
    run_use: Option<RunUse>,
    frames: Frames,
    replies: Replies,
    /// Turns whose text is sent.
    closed_turns: Vec<u32>,
    /// The turn whose deltas are incomplete: its text comes from the record.
    muted_turn: Option<u32>,
    /// Whether the record has a text that the deltas lack.
    needs_record: bool,
    /// The last turn of which a reply was seen.
    last_reply: u32,
    /// Whether deltas and events were lost since the record was read.
    has_lagged: bool,
    is_over: bool,
}

/// The live events of the run.
pub enum LiveEvents {
    /// The subscription began before the run's first event.
    FromStart(Subscription),
    /// The subscription, if the run is at work, began before the record was read; with the text that was published before.
    Joined(Option<(Subscription, Option<PartialReply>)>),
}

/// The record of a response, and which of its replies are known.
pub struct RecordRead {
    reference: ResponseRef,
    /// `None` to read it.
    ended: Option<Box<ResponseRecord>>,
    replies: Replies,
    closed_turns: Vec<u32>,
    /// Ends with the read.
    run_use: Option<RunUse>,
}

impl Read for RecordRead {
    /// `None` if the run is deleted.
    type Found = Result<Option<(Box<ResponseRecord>, Replies)>, Problem>;

    async fn perform(mut self, state: &AppState) -> Self::Found {
        let ResponseRef { run, number } = self.reference;
        let record = match self.ended {
            Some(record) => record,
            None => {
                let Some(run) = state.runner.store().run(run).await? else {
                    return Ok(None);
                };
                match ResponseRecord::load(state, Arc::new(run), number).await? {
                    Some(record) => Box::new(record),
                    None => return Ok(None),
                }
            }
        };
        let has_event = |turn: u32| self.replies.event(turn).is_some();
        let mut turns = record.texts.iter().map(|(turn, _)| *turn);
        let is_known = turns.all(|turn| self.closed_turns.contains(&turn) || has_event(turn))
            && record.end_turn().is_none_or(has_event);
        if !is_known {
            self.replies = Replies::read(state, &record.run).await?;
        }
        record.finish(self.run_use).await;
        Ok(Some((record, self.replies)))
    }
}

impl ResponseStream {
    /// The events of a response after `cursor`, or all of them. `run_use` ends with it.
    pub async fn drive(
        state: &AppState,
        record: ResponseRecord,
        live: LiveEvents,
        cursor: Option<Cursor>,
        run_use: Option<RunUse>,
    ) -> StreamDriver<Self> {
        let is_whole = state.runner.has_json_format(record.run.id).await;
        let (run, seen_turn) = (Arc::clone(&record.run), record.seen_turn());
        let (reference, has_ended) = (record.reference, record.has_ended());
        let end_state = state.clone();
        let end = async move {
            // The run may be at a later response.
            let run = match has_ended {
                true => run,
                false => stop::wait_for_stop(&end_state, run, seen_turn).await?,
            };
            let record = ResponseRecord::load(&end_state, run, reference.number).await?;
            // Another request may have deleted the run.
            record.ok_or_else(|| ResponseRef::not_found(&reference.to_string()))
        };
        let mut stream = Self {
            frames: Frames::new(record.run.id, cursor),
            record,
            ended: None,
            is_ending: false,
            is_whole,
            may_lose_texts: state.runner.may_lose_texts(),
            run_use,
            replies: Replies::default(),
            closed_turns: Vec::new(),
            muted_turn: None,
            needs_record: false,
            last_reply: 0,
            has_lagged: false,
            is_over: false,
        };
        stream.begin();
        let subscription = match live {
            LiveEvents::FromStart(subscription) => Some(subscription),
            LiveEvents::Joined(joined) => {
                let (subscription, reply) = joined.unzip();
                match Replies::read(state, &stream.record.run).await {
                    Ok(replies) => stream.catch_up(replies, reply.flatten()),
                    Err(error) => stream.push_error(&error.into()),
                }
                subscription
            }
        };
        StreamDriver::new(state, stream, subscription, end)
    }

    fn begin(&mut self) {
        let is_new = |place| {
            self.frames
                .cursor
                .is_none_or(|cursor| !cursor.has_first(place))
        };
        if !is_new(numbers::IN_PROGRESS) {
            return;
        }
        let mut begun = object::response(&self.record);
        begun["status"] = "in_progress".into();
        begun["output"] = json!([]);
        for field in ["usage", "completed_at", "incomplete_details", "error"] {
            begun[field] = Value::Null;
        }
        let (event, data) = (numbers::FIRST_EVENT, json!({"response": begun}));
        if is_new(numbers::CREATED) {
            self.frames
                .push("response.created", event, numbers::CREATED, data.clone());
        }
        self.frames
            .push("response.in_progress", event, numbers::IN_PROGRESS, data);
    }

    fn push_error(&mut self, problem: &Problem) {
        self.is_over = true;
        self.frames.push_error(problem);
    }

    fn push_text(&mut self, text: &str) {
        if !self.frames.push_text(text) {
            self.muted_turn = self.frames.open.as_ref().map(|open| open.turn);
        }
    }

    /// The reply of a turn is recorded.
    fn on_reply(&mut self, turn: u32, event: u64) {
        if self.is_whole || self.closed_turns.contains(&turn) {
            return;
        }
        self.last_reply = turn;
        if self.muted_turn == Some(turn) || self.may_lose_texts {
            self.needs_record = true;
        } else if self.frames.is_open(turn) {
            self.frames.end_text("completed", event);
            self.closed_turns.push(turn);
        }
    }

    /// Sends what is recorded, and what a client that reconnects lacks of the reply that was being written at the subscription.
    fn catch_up(&mut self, replies: Replies, reply: Option<PartialReply>) {
        self.replies = replies;
        if self.is_whole || self.record.has_ended() {
            return;
        }
        for (turn, text) in std::mem::take(&mut self.record.texts) {
            self.push_reply(turn, &text);
        }
        let last_turn = self.record.last_turn();
        let turn = last_turn + 1;
        let previous = self.replies.event(last_turn).unwrap_or_default();
        self.frames.numbers.committed(previous);
        self.frames.numbers.committed(self.record.last_event());
        let reply = reply.filter(|reply| reply.turn == turn);
        let position = self
            .frames
            .cursor
            .and_then(|cursor| cursor.live_position(previous));
        let Some(position) = position else {
            if let Some(reply) = reply.filter(|reply| !reply.text.is_empty()) {
                self.frames.begin_text(turn);
                self.push_text(&reply.text);
            }
            return;
        };
        self.frames.open_item(turn);
        let is_same = self
            .frames
            .cursor
            .is_some_and(|it| it.event >= self.replies.resumed);
        let reply = reply.filter(|reply| is_same && !reply.is_replacement);
        let texts = reply
            .as_ref()
            .and_then(|reply| reply.text.split_at_checked(position.bytes));
        let (Some((known, rest)), Some(open)) = (texts, &mut self.frames.open) else {
            // The text that the client has a part of is not in memory.
            self.muted_turn = Some(turn);
            return;
        };
        open.text.push_str(known);
        if !position.has_part {
            let last_event = self.frames.numbers.last_event();
            self.frames
                .push_part_added(last_event, numbers::LIVE_PART_ADDED);
        }
        self.push_text(rest);
    }

    /// Sends the texts of replies that are recorded and were not sent.
    fn push_recorded(&mut self, record: &ResponseRecord) {
        // The deltas of later replies are still to come.
        let mut last_turn = self.last_reply;
        if std::mem::take(&mut self.has_lagged) {
            last_turn = record.last_turn();
            self.muted_turn = Some(last_turn + 1);
        }
        if !self.is_whole {
            self.push_texts(record, last_turn);
        }
    }

    fn push_texts(&mut self, record: &ResponseRecord, last_turn: u32) {
        for (turn, text) in &record.texts {
            if *turn <= last_turn {
                self.push_reply(*turn, text);
            }
        }
        // The record has no text of a blank reply.
        self.end_recorded_text();
    }

    /// Ends the open text as it is, if its reply is recorded.
    fn end_recorded_text(&mut self) {
        if let Some(open) = &self.frames.open
            && let Some(event) = self.replies.event(open.turn)
        {
            self.closed_turns.push(open.turn);
            self.frames.end_text("completed", event);
        }
    }

    /// Sends what is not sent of a recorded reply.
    fn push_reply(&mut self, turn: u32, text: &str) {
        if self.closed_turns.contains(&turn) {
            return;
        }
        self.closed_turns.push(turn);
        let last_event = self.frames.numbers.last_event();
        let event = self.replies.event(turn).unwrap_or(last_event);
        if self.frames.is_open(turn) {
            return self.complete_open_item(turn, text, event);
        }
        self.frames.end_text("completed", last_event);
        let first = self.frames.cursor.map_or(numbers::ADDED, |cursor| {
            cursor.next_frame(self.replies.before(turn), event)
        });
        self.frames.open_item(turn);
        if first <= numbers::ADDED {
            self.frames.push_added(event, numbers::ADDED);
        }
        if first <= numbers::PART_ADDED {
            self.frames.push_part_added(event, numbers::PART_ADDED);
        }
        if self.frames.cursor.is_none() {
            self.frames.push_delta(text, event, numbers::WHOLE_TEXT);
        }
        self.frames.set_text(text);
        self.frames.push_done("completed", event, first);
        self.frames.open = None;
    }

    fn complete_open_item(&mut self, turn: u32, text: &str, event: u64) {
        let is_muted = self.muted_turn == Some(turn);
        if is_muted {
            self.muted_turn = None;
        } else if let Some(open) = &self.frames.open
            && let Some(rest) = text.strip_prefix(open.text.as_str())
        {
            // Before the frames that end the item, and after those that were sent.
            self.frames.push_text_after(rest, event.saturating_sub(1));
        }
        self.frames.set_text(text);
        self.frames.end_text("completed", event);
    }

    fn push_end(&mut self, record: &ResponseRecord) {
        self.push_texts(record, u32::MAX);
        // The run may be at a later response.
        let end = record.end_turn().and_then(|turn| self.replies.event(turn));
        let last_event = end.unwrap_or(record.last_event());
        self.frames.end_text("incomplete", last_event);
        for (at, call) in record.calls.iter().enumerate() {
            self.frames.push_call(at, call, last_event);
        }
        let response = object::response(record);
        let name = match response["status"].as_str() {
            Some("completed") => "response.completed",
            Some("incomplete") => "response.incomplete",
            _ => "response.failed",
        };
        let data = json!({"response": response});
        self.frames.push(name, last_event, numbers::FINAL, data);
    }
}

impl Projection for ResponseStream {
    const COMMENT: &'static str = KEEP_ALIVE;
    type End = Result<ResponseRecord, Problem>;
    type Read = RecordRead;

    fn frames(&mut self) -> &mut String {
        &mut self.frames.frames
    }

    fn on_event(&mut self, event: &StoredEvent) -> serde_json::Result<()> {
        self.frames.numbers.committed(event.seq);
        if event.run_id == self.record.run.id
            && let Some(turn) = self.replies.add(event.seq, &event.read()?.kind)
        {
            self.on_reply(turn, event.seq);
        }
        Ok(())
    }

    fn on_live(&mut self, LiveEvent { event, .. }: &LiveEvent) {
        let (EventKind::TextDelta { turn, .. } | EventKind::TextWithdrawn { turn, .. }) =
            &event.kind
        else {
            return;
        };
        let is_muted = self.has_lagged || self.muted_turn == Some(*turn);
        let is_own = event.run_id == self.record.run.id;
        if !is_own || is_muted || self.closed_turns.contains(turn) {
            return;
        }
        match &event.kind {
            EventKind::TextDelta { text, .. } if !self.is_whole => {
                self.frames.begin_text(*turn);
                self.push_text(text);
            }
            // The text that replaces it is another item.
            EventKind::TextWithdrawn { .. } => {
                let last_event = self.frames.numbers.last_event();
                self.frames.end_text("incomplete", last_event);
            }
            _ => {}
        }
    }

    fn on_lag(&mut self, _: &mut Subscription) {
        self.has_lagged = true;
        self.needs_record = true;
    }

    /// Sends nothing if the daemon is stopping: the client reconnects.
    fn on_end(&mut self, end: Result<ResponseRecord, Problem>) {
        match end {
            Ok(record) if record.has_ended() => {
                self.is_ending = true;
                self.ended = Some(Box::new(record));
            }
            Ok(_) => self.is_over = true,
            Err(problem) => self.push_error(&problem),
        }
    }

    fn next_read(&mut self) -> Option<RecordRead> {
        let ended = self.ended.take();
        if ended.is_none() && !std::mem::take(&mut self.needs_record) {
            return None;
        }
        Some(RecordRead {
            reference: self.record.reference,
            run_use: ended.as_ref().and_then(|_| self.run_use.take()),
            ended,
            replies: self.replies.clone(),
            closed_turns: self.closed_turns.clone(),
        })
    }

    fn on_found(&mut self, found: <RecordRead as Read>::Found) {
        let is_shown = !self.has_lagged && self.muted_turn.is_none();
        match found {
            Ok(Some((record, replies))) if self.is_ending => {
                self.replies = replies;
                if self.frames.cursor.is_none_or(|cursor| !cursor.is_final()) {
                    self.push_end(&record);
                }
                self.frames.push_end_of_stream();
                self.is_over = true;
            }
            Ok(Some((record, replies))) => {
                self.replies = replies;
                self.push_recorded(&record);
            }
            Ok(None) => {}
            // The store fails: what was shown is most likely the whole text.
            Err(_) if is_shown && !self.is_ending => self.end_recorded_text(),
            Err(problem) => self.push_error(&problem),
        }
    }

    fn is_over(&self) -> bool {
        self.is_over
    }
}
