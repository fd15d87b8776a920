//! A response as Server-Sent Events, from its beginning or from where a client has stopped reading. Texts come from the run's
//! live deltas. What is recorded comes from the record, which also adds what the deltas have left out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::Instant;

use crate::domain::run::Run;
use crate::engine::delete_at_end::RunUse;
use crate::engine::record::journal::{StreamEvent, Subscription};
use crate::engine::state::live_text::PartialReply;
use crate::web::clients::openai::responses::frames::Frames;
use crate::web::clients::openai::responses::numbers::{self, Cursor};
use crate::web::clients::openai::responses::object;
use crate::web::clients::openai::responses::record::ResponseRecord;
use crate::web::clients::openai::responses::reference::ResponseRef;
use crate::web::clients::openai::responses::replies::Replies;
use crate::web::clients::stop;
use crate::web::error::Problem;
use crate::web::state::AppState;

/// The longest time without a frame.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

pub struct ResponseStream {
    state: AppState,
    /// As it was when the stream began.
    record: ResponseRecord,
    subscription: Option<Subscription>,
    /// Resolves when the run has stopped; `None` once it has.
    stopped: Option<BoxFuture<'static, Result<Arc<Run>, Problem>>>,
    /// Whether texts are sent as a whole: the model may correct JSON that does not fit its schema.
    is_whole: bool,
    /// `None` if the run is kept.
    run_use: Option<RunUse>,
    frames: Frames,
    /// What is recorded has to be sent before the live deltas; with the reply that was being written at the subscription.
    catch_up: Option<Option<PartialReply>>,
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
    heartbeat_at: Instant,
}

/// The live events of the run.
pub enum LiveEvents {
    /// The subscription began before the run's first event.
    FromStart(Subscription),
    /// The subscription, if the run is at work, began before the record was read; with the text that was published before.
    Joined(Option<(Subscription, Option<PartialReply>)>),
}

/// `text.delta` and `text.withdrawn`.
#[derive(Deserialize)]
struct TextEvent {
    turn: u32,
    #[serde(default)]
    text: String,
}

impl ResponseStream {
    /// The events of a response after `cursor`, or all of them. `run_use` ends with it.
    pub async fn new(
        state: AppState,
        record: ResponseRecord,
        live: LiveEvents,
        cursor: Option<Cursor>,
        run_use: Option<RunUse>,
    ) -> Self {
        let (subscription, catch_up) = match live {
            LiveEvents::FromStart(subscription) => (Some(subscription), None),
            LiveEvents::Joined(joined) => {
                let (subscription, reply) = joined.unzip();
                (subscription, Some(reply.flatten()))
            }
        };
        let is_whole = state.runner.has_json_format(record.run.id).await;
        let (run, seen_turn) = (Arc::clone(&record.run), record.seen_turn());
        let has_ended = record.has_ended();
        let stop_state = state.clone();
        let stopped = async move {
            // The run may be at a later response.
            match has_ended {
                true => Ok(run),
                false => stop::wait_for_stop(&stop_state, run, seen_turn).await,
            }
        };
        let mut stream = Self {
            frames: Frames::new(record.run.id, cursor),
            state,
            record,
            subscription,
            stopped: Some(Box::pin(stopped)),
            is_whole,
            run_use,
            catch_up,
            replies: Replies::default(),
            closed_turns: Vec::new(),
            muted_turn: None,
            needs_record: false,
            last_reply: 0,
            has_lagged: false,
            heartbeat_at: Instant::now() + KEEP_ALIVE_INTERVAL,
        };
        stream.begin();
        stream
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

    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Option<String> {
        while self.frames.is_empty() {
            self.stopped.as_ref()?;
            if let Err(problem) = self.read_more().await {
                self.stopped = None;
                self.frames.push_error(&problem);
            }
        }
        self.heartbeat_at = Instant::now() + KEEP_ALIVE_INTERVAL;
        Some(self.frames.take())
    }

    /// Adds frames for what happens next.
    async fn read_more(&mut self) -> Result<(), Problem> {
        if let Some(reply) = self.catch_up.take() {
            return self.catch_up(reply).await;
        }
        if std::mem::take(&mut self.needs_record) {
            let is_shown = !self.has_lagged && self.muted_turn.is_none();
            return match self.push_recorded().await {
                // The store fails: what was shown is most likely the whole text.
                Err(_) if is_shown => {
                    self.end_recorded_text();
                    Ok(())
                }
                done => done,
            };
        }
        let Some(stopped) = &mut self.stopped else {
            return Ok(());
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
                Err(RecvError::Lagged(_)) => self.on_lag(),
                Err(RecvError::Closed) => self.subscription = None,
            },
            run = stopped => {
                self.stopped = None;
                self.drain();
                self.finish(run?).await?;
            }
            () = tokio::time::sleep_until(self.heartbeat_at) => {
                self.frames.push_keep_alive();
            }
        }
        Ok(())
    }

    /// Reads the deltas that were published before the run stopped.
    fn drain(&mut self) {
        while let Some(subscription) = &mut self.subscription {
            match subscription.try_recv() {
                Ok(event) => self.on_event(&event),
                Err(TryRecvError::Lagged(_)) => self.on_lag(),
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    fn on_event(&mut self, event: &StreamEvent) {
        let (name, data) = match event {
            StreamEvent::Stored(event) => {
                self.frames.numbers.committed(event.seq);
                if event.run_id == self.record.run.id
                    && let Some(turn) = self.replies.add(event)
                {
                    self.on_reply(turn, event.seq);
                }
                return;
            }
            StreamEvent::Ephemeral { run_id, name, data } if *run_id == self.record.run.id => {
                (*name, data)
            }
            StreamEvent::Ephemeral { .. } => return,
        };
        let Ok(event) = serde_json::from_str::<TextEvent>(data) else {
            return;
        };
        let is_muted = self.has_lagged || self.muted_turn == Some(event.turn);
        if is_muted || self.closed_turns.contains(&event.turn) {
            return;
        }
        match name {
            "text.delta" if !self.is_whole => {
                self.frames.begin_text(event.turn);
                self.push_text(&event.text);
            }
            // The text that replaces it is another item.
            "text.withdrawn" => {
                let last_event = self.frames.numbers.last_event();
                self.frames.end_text("incomplete", last_event);
            }
            _ => {}
        }
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
        if self.muted_turn == Some(turn) || self.state.runner.may_lose_texts() {
            self.needs_record = true;
        } else if self.frames.is_open(turn) {
            self.frames.end_text("completed", event);
            self.closed_turns.push(turn);
        }
    }

    fn on_lag(&mut self) {
        self.has_lagged = true;
        self.needs_record = true;
    }

    /// Sends what is recorded, and what a client that reconnects lacks of the reply that is being written.
    async fn catch_up(&mut self, reply: Option<PartialReply>) -> Result<(), Problem> {
        self.replies = Replies::read(&self.state, &self.record.run).await?;
        if self.is_whole || self.record.has_ended() {
            return Ok(());
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
            return Ok(());
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
            return Ok(());
        };
        open.text.push_str(known);
        if !position.has_part {
            let last_event = self.frames.numbers.last_event();
            self.frames
                .push_part_added(last_event, numbers::LIVE_PART_ADDED);
        }
        self.push_text(rest);
        Ok(())
    }

    /// Sends the texts of replies that are recorded and were not sent.
    async fn push_recorded(&mut self) -> Result<(), Problem> {
        let run = self.record.run.id;
        let Some(run) = self.state.runner.store().run(run).await? else {
            return Ok(());
        };
        let number = self.record.reference.number;
        let record = ResponseRecord::load(&self.state, Arc::new(run), number).await?;
        let Some(record) = record else {
            return Ok(());
        };
        // The deltas of later replies are still to come.
        let mut last_turn = self.last_reply;
        if std::mem::take(&mut self.has_lagged) {
            last_turn = record.last_turn();
            self.muted_turn = Some(last_turn + 1);
        }
        match self.is_whole {
            true => Ok(()),
            false => self.push_texts(&record, last_turn).await,
        }
    }

    async fn push_texts(&mut self, record: &ResponseRecord, last_turn: u32) -> Result<(), Problem> {
        let is_known = |(turn, _): &(u32, String)| {
            self.closed_turns.contains(turn) || self.replies.event(*turn).is_some()
        };
        if !record.texts.iter().all(is_known) {
            self.replies = Replies::read(&self.state, &record.run).await?;
        }
        for (turn, text) in &record.texts {
            if *turn <= last_turn {
                self.push_reply(*turn, text);
            }
        }
        // The record has no text of a blank reply.
        self.end_recorded_text();
        Ok(())
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

    /// Sends the end of the response. Sends nothing if the daemon is stopping: the client reconnects.
    async fn finish(&mut self, run: Arc<Run>) -> Result<(), Problem> {
        let reference = self.record.reference;
        let record = ResponseRecord::load(&self.state, run, reference.number).await?;
        // Another request may have deleted the run.
        let record = record.ok_or_else(|| ResponseRef::not_found(&reference.to_string()))?;
        if !record.has_ended() {
            return Ok(());
        }
        if self.frames.cursor.is_none_or(|cursor| !cursor.is_final()) {
            self.push_end(&record).await?;
        }
        self.frames.push_end_of_stream();
        record.finish(self.run_use.take()).await;
        Ok(())
    }

    async fn push_end(&mut self, record: &ResponseRecord) -> Result<(), Problem> {
        self.push_texts(record, u32::MAX).await?;
        let last_event = self.last_event(record).await?;
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
        Ok(())
    }

    /// The number of the event that ends the response. The run may be at a later response.
    async fn last_event(&mut self, record: &ResponseRecord) -> Result<u64, Problem> {
        let Some(turn) = record.end_turn() else {
            return Ok(record.last_event());
        };
        if self.replies.event(turn).is_none() {
            self.replies = Replies::read(&self.state, &record.run).await?;
        }
        Ok(self.replies.event(turn).unwrap_or(record.last_event()))
    }
}
