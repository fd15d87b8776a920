//! A person's word on a tool call: the call asks and waits, a request of the API answers. Both the question and the
//! answer stand in the record before anybody acts on them, so that a killed daemon neither asks twice nor forgets. Knows
//! no HTTP.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::oneshot;

use crate::domain::event::{Decision, EventKind};
use crate::domain::message::{ToolCall, beginning, shorten};
use crate::domain::run::{Run, RunId, Status, now};
use crate::engine::endings;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::engine::record;
use crate::engine::remains::{self, Begun, Decided};
use crate::engine::turn_error::TurnError;
use crate::engine::waiting::{self, Call};
use crate::store::{Change, StoreError};

/// Most bytes of arguments that an event shows; the whole stands in the run's messages.
const MOST_ARGUMENTS: usize = 16 << 10;

/// The calls of this process that wait for a person's word.
#[derive(Default)]
pub struct Desk {
    asking: Mutex<Asking>,
    /// Held while a word is written for a call that an earlier process asked about and that nobody waits at yet, and
    /// while such a call looks for it: one of the two comes first. Rare, and over a read and a write of the store.
    early: tokio::sync::Mutex<()>,
}

/// Who waits, by run and call; none for a call whose word is on its way.
type Asking = HashMap<(RunId, String), Option<oneshot::Sender<Word>>>;

/// A word, and who wants to know that it is committed.
struct Word {
    decided: Decided,
    told: oneshot::Sender<Result<(), StoreError>>,
}

/// Why a word was not taken.
#[derive(Debug, thiserror::Error)]
pub enum DecideError {
    /// There is no such run.
    #[error("there is no run {0}")]
    NoSuchRun(RunId),
    /// Nobody waits for a word on this call.
    #[error("nothing waits for a decision on the tool call \"{call}\" of {run}: {why}")]
    NothingWaits {
        /// The run.
        run: RunId,
        /// The call, shortened.
        call: String,
        /// What is so.
        why: String,
    },
    /// The daemon is about to stop.
    #[error("the daemon is stopping; look at the run and try again")]
    Draining,
    /// The record could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Waits for the word on a call: nothing where it may be performed, else what its model is told. `begun` has what an
/// earlier process asked and was told.
pub async fn word(
    engine: &Engine,
    live: &LiveRun,
    begun: &Begun,
    turn: u32,
    call: &ToolCall,
) -> Result<Result<(), String>, StoreError> {
    let asked_at = begun.requested.get(&call.id).copied();
    let mut decided = begun.decided.get(&call.id).cloned();
    let mut place = None;
    if decided.is_none() {
        let _turn = match asked_at {
            Some(_) => Some(engine.desk.early.lock().await),
            None => None,
        };
        if asked_at.is_some() {
            // Somebody may have answered since this run's record was read.
            let scope = &live.scope;
            let begun = remains::calls(engine, scope.root, scope.run).await?;
            decided = begun.decided.get(&call.id).cloned();
        }
        if decided.is_none() {
            place = Some(Place::take(&engine.desk, live.scope.run, &call.id));
        }
    }
    let name = shorten(&call.name, 200);
    let decided = match (decided, place) {
        (Some(decided), _) => {
            waiting::resume(engine, live).await?;
            decided
        }
        (None, None) => return Err(StoreError::Closed),
        (None, Some(place)) => {
            let limit = live.agent.approve_timeout;
            let deadline = limit.map(|limit| after(asked_at.unwrap_or_else(now), limit));
            let event = asked_at
                .is_none()
                .then(|| request(turn, call, &name, deadline));
            waiting::rest(engine, live, Call::Asks, event).await?;
            let heard = hear(engine, live, place, &call.id, deadline).await?;
            waiting::go(engine, live, Call::Asks).await?;
            match heard {
                Ok(decided) => decided,
                Err(error) => return Ok(Err(endings::broken_off(live, &error))),
            }
        }
    };
    let seconds = || live.agent.approve_timeout.map_or(0, |it| it.as_secs());
    Ok(match (decided.decision, decided.reason) {
        (Decision::Approved, _) => Ok(()),
        (Decision::Denied, Some(reason)) => Err(format!("The call of {name} was denied: {reason}")),
        (Decision::Denied, None) => Err(format!("The call of {name} was denied")),
        (Decision::TimedOut, _) => Err(format!(
            "The call of {name} was not approved: no decision within {}s",
            seconds()
        )),
    })
}

/// Waits for the word, or the end of the wait, and commits it.
async fn hear(
    engine: &Engine,
    live: &LiveRun,
    mut place: Place<'_>,
    call: &str,
    deadline: Option<Timestamp>,
) -> Result<Result<Decided, TurnError>, StoreError> {
    let in_time = async {
        match deadline {
            Some(deadline) => {
                let limit = live.agent.approve_timeout.map_or(0, |it| it.as_secs());
                let left = record::time_left(now().duration_until(deadline), limit);
                tokio::time::sleep(left).await;
            }
            None => std::future::pending().await,
        }
    };
    let heard = async {
        tokio::select! {
            biased;
            word = &mut place.word => word.ok(),
            () = in_time => None,
        }
    };
    let word = match waiting::until(live, heard).await {
        Ok(word) => word,
        Err(error) => return Ok(Err(error)),
    };
    let (decided, told) = match word {
        Some(word) => (word.decided, Some(word.told)),
        None => (Decided::timed_out(), None),
    };
    let event = decided.event(call);
    let committed = engine
        .journal
        .record(live, Change::Nothing, Vec::new(), vec![event])
        .await
        .map(drop);
    if let Some(told) = told {
        // A client that went away has decided all the same.
        let _ = told.send(committed.clone());
    }
    committed?;
    Ok(Ok(decided))
}

/// Takes a person's word, and returns once it is committed. A call that an earlier process asked about is decided even
/// before its run has come to it again.
pub async fn decide(
    engine: &Arc<Engine>,
    id: RunId,
    call: &str,
    decided: Decided,
) -> Result<(), DecideError> {
    loop {
        match engine.desk.hand(id, call, &decided) {
            Handed::ToCall(committed) => match committed.await {
                Ok(committed) => return Ok(committed?),
                // It was let go of: nobody can say whether the word was written.
                Err(_) if engine.draining.is_cancelled() => return Err(DecideError::Draining),
                // Its time, or the run's, was over before it heard.
                Err(_) => {}
            },
            Handed::TooLate => return Err(nothing(id, call, "it is being decided")),
            Handed::ToNobody => {}
        }
        // In a task of its own: a client that goes away leaves no word half written.
        let (answer, answered) = oneshot::channel();
        let (at_work, call, decided) = (Arc::clone(engine), call.to_owned(), decided.clone());
        engine.tasks.spawn(async move {
            let _ = answer.send(decide_early(&at_work, id, &call, decided).await);
        });
        if answered.await.unwrap_or(Err(StoreError::Closed.into()))? {
            return Ok(());
        }
    }
}

/// Writes the word where nobody waits for it yet; false where somebody does now.
async fn decide_early(
    engine: &Engine,
    id: RunId,
    call: &str,
    decided: Decided,
) -> Result<bool, DecideError> {
    let _turn = engine.desk.early.lock().await;
    let _gate = engine.suspension.gate.read().await;
    if engine.desk.lock().contains_key(&(id, call.to_owned())) {
        return Ok(false);
    }
    let run = engine.journal.store().run(id).await?;
    let run: Run = run.ok_or(DecideError::NoSuchRun(id))?;
    if !matches!(run.status, Status::Waiting | Status::Running) {
        let why = format!("the run is {}", run.status.as_str());
        return Err(nothing(id, call, &why));
    }
    let begun = remains::calls(engine, run.root_id, id).await?;
    if !begun.requested.contains_key(call) {
        return Err(nothing(id, call, "it did not ask for one"));
    }
    if begun.decided.contains_key(call) {
        return Err(nothing(id, call, "it is decided"));
    }
    let live = engine.live.get(id);
    if live.as_ref().is_some_and(|live| live.is_suspended()) {
        return Err(StoreError::Suspended.into());
    }
    // A call of this process that waits no more has given up, and its result says why.
    let is_over = live.as_ref().is_some_and(|live| {
        let is_ours = !live.tree.is_revived && !engine.draining.is_cancelled();
        is_ours || live.stop.is_cancelled()
    });
    if is_over || begun.completed.contains(call) {
        return Err(nothing(id, call, "it waits no more"));
    }
    let event = decided.event(call);
    match live {
        Some(live) => {
            let journal = &engine.journal;
            let told = journal.record_request(&live, Change::Nothing, event);
            told.await?;
        }
        None => {
            let journal = &engine.journal;
            let told = journal.record_undriven(&run, Change::Nothing, event);
            told.await?;
        }
    }
    Ok(true)
}

fn nothing(run: RunId, call: &str, why: &str) -> DecideError {
    DecideError::NothingWaits {
        run,
        call: shorten(call, 80),
        why: why.to_owned(),
    }
}

/// What came of a word.
enum Handed {
    /// The call has it, and says when it is committed.
    ToCall(oneshot::Receiver<Result<(), StoreError>>),
    /// Another word came first.
    TooLate,
    /// No call of this process waits for it.
    ToNobody,
}

impl Desk {
    fn hand(&self, run: RunId, call: &str, decided: &Decided) -> Handed {
        let mut asking = self.lock();
        let Some(place) = asking.get_mut(&(run, call.to_owned())) else {
            return Handed::ToNobody;
        };
        let Some(place) = place.take() else {
            return Handed::TooLate;
        };
        let (told, committed) = oneshot::channel();
        let decided = decided.clone();
        // Where the call has just given up, the other end tells at once.
        let _ = place.send(Word { decided, told });
        Handed::ToCall(committed)
    }

    fn lock(&self) -> MutexGuard<'_, Asking> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call's place at the desk, left when it is dropped.
struct Place<'d> {
    desk: &'d Desk,
    key: (RunId, String),
    word: oneshot::Receiver<Word>,
}

impl<'d> Place<'d> {
    fn take(desk: &'d Desk, run: RunId, call: &str) -> Self {
        let (sender, word) = oneshot::channel();
        let key = (run, call.to_owned());
        desk.lock().insert(key.clone(), Some(sender));
        Self { desk, key, word }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.desk.lock().remove(&self.key);
    }
}

fn request(turn: u32, call: &ToolCall, name: &str, deadline: Option<Timestamp>) -> EventKind {
    let whole = call.arguments.get();
    let truncated = whole.len() > MOST_ARGUMENTS;
    let cut = || {
        serde_json::value::to_raw_value(beginning(whole, MOST_ARGUMENTS))
            .map(Arc::from)
            .ok()
    };
    let arguments = truncated.then(cut).flatten();
    EventKind::ApprovalRequested {
        turn,
        tool_call_id: call.id.clone(),
        tool: name.to_owned(),
        arguments: arguments.unwrap_or_else(|| Arc::clone(&call.arguments)),
        truncated,
        deadline,
    }
}

fn after(at: Timestamp, time: Duration) -> Timestamp {
    let time = SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
    at.checked_add(time).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::request;
    use crate::domain::message::ToolCall;

    #[test]
    fn a_request_shows_arguments_and_cuts_what_is_too_long() {
        let shown = |arguments: serde_json::Value| {
            let raw = serde_json::value::to_raw_value(&arguments).expect("JSON");
            let call = ToolCall {
                id: "c".to_owned(),
                provider_id: String::new(),
                name: "write_file".to_owned(),
                arguments: raw.into(),
            };
            let event = request(1, &call, "write_file", None);
            serde_json::to_value(event).expect("JSON")
        };
        let small = shown(json!({"path": "a"}));
        assert_eq!(small["arguments"], json!({"path": "a"}));
        assert_eq!(small.get("truncated"), None);
        let large = shown(json!({"content": "ä".repeat(20_000)}));
        let text = large["arguments"].as_str().expect("text");
        assert!(text.starts_with("{\"content\":\"ä") && text.len() <= super::MOST_ARGUMENTS);
        assert_eq!(large["truncated"], true);
    }
}
