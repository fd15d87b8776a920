//! Performs what other nodes request of runs that this node drives. A node may die after it has performed a request and before
//! it has answered: then the next owner of the tree performs the request again, and finds what the record has of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::domain::run::{RunId, now};
use crate::engine::approval::decision::{self, DecideError};
use crate::engine::context::Engine;
use crate::engine::control::add_message::{self, AddMessageError, MessageRequest};
use crate::engine::control::cancel;
use crate::engine::control::client_results::{self, ClientResultsError};
use crate::engine::control::hold::{self, HoldError};
use crate::engine::control::run_change::RunChange;
use crate::engine::history::run_log;
use crate::engine::state::input_answer::InputAnswer;
use crate::store::new_request::RequestId;
use crate::store::node_messages::{NodeMessage, ReceivedMessages};
use crate::store::run_requests::{NO_ANSWER, OpenRequest};
use crate::store::{IdempotencyClaim, IdempotencyKey, StoreError};

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long this node polls after it was seen last that there is another one, which may have left requests.
const ALONE_TIMEOUT: Duration = Duration::from_secs(60);
const TRIM_INTERVAL: Duration = Duration::from_secs(300);
/// How long a message of a request is recognized.
const CLAIM_TIME: SignedDuration = SignedDuration::from_hours(1);

/// Requests of one kind to one tree wait for each other.
type Lane = (RunId, String);

/// Performs requests until `stop` is cancelled, and finishes those that have begun.
pub async fn serve(engine: Arc<Engine>, stop: CancellationToken) {
    let Some(cluster) = engine.journal.store().cluster() else {
        return;
    };
    let mut performing = JoinSet::new();
    let mut lanes: HashMap<Id, Lane> = HashMap::new();
    let mut polls = tokio::time::interval(POLL_INTERVAL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut messages = cluster.messages();
    let mut trims = tokio::time::interval(TRIM_INTERVAL);
    let mut last_beside_others = Instant::now();
    loop {
        tokio::select! {
            _ = polls.tick() => {
                if !cluster.is_alone() {
                    last_beside_others = Instant::now();
                } else if last_beside_others.elapsed() > ALONE_TIMEOUT {
                    continue;
                }
            }
            () = wait_for_message(&mut messages, |it| matches!(it, NodeMessage::Requests)) => {}
            Some(performed) = performing.join_next_with_id() => {
                let (id, is_done) = match performed {
                    Ok(performed) => performed,
                    Err(error) => (error.id(), false),
                };
                lanes.remove(&id);
                if !is_done {
                    // The next poll finds it again.
                    continue;
                }
            }
            _ = trims.tick() => {
                if let Err(error) = cluster.trim_requests().await {
                    debug!(error = %error, "Old requests of nodes could not be removed: {error}");
                }
                continue;
            }
            () = stop.cancelled() => break,
        }
        let open = match cluster.open_requests().await {
            Ok(open) => open,
            Err(error) => {
                debug!(error = %error, "Requests of other nodes could not be read: {error}");
                continue;
            }
        };
        for request in open {
            let lane = (request.root, request.kind.clone());
            if !lanes.values().any(|busy| *busy == lane) {
                let task = performing.spawn(take(Arc::clone(&engine), request));
                lanes.insert(task.id(), lane);
            }
        }
    }
    while performing.join_next().await.is_some() {}
}

/// Returns once such a message of another node has arrived, or may have been missed.
pub async fn wait_for_message(
    messages: &mut ReceivedMessages,
    is_it: impl Fn(&NodeMessage) -> bool,
) {
    loop {
        match messages.recv().await {
            Ok(message) if !is_it(&message) => {}
            Ok(_) | Err(RecvError::Lagged(_)) => return,
            // The store is closed: nothing arrives any more.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// Takes, performs and answers a request. Returns false if it is to be tried again.
async fn take(engine: Arc<Engine>, request: OpenRequest) -> bool {
    match try_take(&engine, &request).await {
        Ok(is_done) => is_done,
        Err(error) => {
            let OpenRequest { run, kind, .. } = &request;
            warn!(run.id = %run, run.root = %request.root, error = %error, "A request ({kind}) of another node to {run} failed, trying again: {error}");
            false
        }
    }
}

async fn try_take(engine: &Arc<Engine>, request: &OpenRequest) -> Result<bool, StoreError> {
    let Some(cluster) = engine.journal.store().cluster() else {
        return Ok(false);
    };
    let Some(content) = cluster.take_request(request.id).await? else {
        return Ok(true);
    };
    let answer = match RunChange::decode(content) {
        Ok(change) => perform(engine, request, change).await,
        Err(error) => {
            warn!(run.id = %request.run, run.root = %request.root, error = %error, "A request of another node to {} cannot be read: {error}", request.run);
            // So that the other node does not wait longer.
            Some(NO_ANSWER.to_vec())
        }
    };
    match answer {
        Some(answer) => {
            let is_answered = cluster.answer_request(request.id, answer).await?;
            cluster.send(Some(request.asker), NodeMessage::Answered(request.id.0));
            Ok(is_answered)
        }
        None => Ok(false),
    }
}

/// Performs a request to a run of a tree that this node owns or that has ended, and returns its answer: a `Result` as JSON.
/// `None` if this node cannot tell what became of it, which the next owner of the tree can.
pub async fn perform(
    engine: &Arc<Engine>,
    request: &OpenRequest,
    change: RunChange,
) -> Option<Vec<u8>> {
    let run = request.run;
    match change {
        RunChange::Cancel { reason } => answer(&cancel::cancel(engine, run, &reason).await),
        RunChange::Decide {
            call,
            decision,
            arguments,
        } => {
            let decision = InputAnswer {
                arguments,
                ..decision
            };
            answer(&decide(engine, request, &call, decision).await)
        }
        RunChange::AddMessage(message) => answer(&add_message(engine, request, message).await),
        RunChange::SetHeld { is_held, by } => {
            let changed = hold::set_held(engine, run, is_held, by).await;
            answer(&changed.map(|is_changed| is_changed || request.is_taken))
        }
        RunChange::AddClientResults(given) => {
            // Its caller looks for the results in the record if the run does not wait for them.
            answer(&client_results::deliver(engine, run, &given).await)
        }
    }
}

async fn decide(
    engine: &Arc<Engine>,
    request: &OpenRequest,
    call: &str,
    decision: InputAnswer,
) -> Result<(), DecideError> {
    match decision::decide(engine, request.run, call, decision.clone()).await {
        Err(DecideError::NotPending { .. })
            if request.is_taken && is_decided(engine, request, call, &decision).await? =>
        {
            Ok(())
        }
        decided => decided,
    }
}

/// Whether the record has this decision on the call.
async fn is_decided(
    engine: &Engine,
    request: &OpenRequest,
    call: &str,
    decision: &InputAnswer,
) -> Result<bool, StoreError> {
    let recorded_calls = run_log::load_calls(engine, request.run).await?;
    let Some(recorded) = recorded_calls.decisions.get(call) else {
        return Ok(false);
    };
    let changed = recorded_calls.changed_arguments.get(call);
    let arguments = recorded.arguments.as_ref().or(changed);
    Ok(recorded.decision == decision.decision
        && recorded.reason == decision.reason
        && recorded.by == decision.by
        && arguments.map(|it| it.get()) == decision.arguments.as_deref().map(RawValue::get))
}

/// Adds the message of a request once: it is recorded with an idempotency key.
async fn add_message(
    engine: &Engine,
    request: &OpenRequest,
    mut message: MessageRequest,
) -> Result<u32, AddMessageError> {
    let claim = message.claim.get_or_insert_with(|| claim(request.id));
    if request.is_taken {
        let claimed = engine.journal.store().claimed_run(claim.key.clone());
        if let Some(claimed) = claimed.await?
            && claimed.run == request.run
            && claimed.body_hash == claim.body_hash
            && let Some(number) = claimed.number
        {
            return Ok(number);
        }
    }
    add_message::add_message(engine, request.run, &message).await
}

fn claim(request: RequestId) -> IdempotencyClaim {
    let expires_at = now().checked_add(CLAIM_TIME);
    IdempotencyClaim {
        key: IdempotencyKey {
            credential: String::new(),
            // No route of a client has such a name.
            route: "request of a node".to_owned(),
            key: request.0.to_string(),
        },
        body_hash: [0; 32],
        expires_at: expires_at.unwrap_or(jiff::Timestamp::MAX),
    }
}

fn answer<T: Serialize, E: ChangeError>(result: &Result<T, E>) -> Option<Vec<u8>> {
    match result {
        Err(error) if error.is_unfinished() => None,
        result => serde_json::to_vec(result).ok(),
    }
}

trait ChangeError: Serialize {
    /// Whether another node has the tree now, or will have it soon: it can perform the change.
    fn is_unfinished(&self) -> bool;
}

impl ChangeError for StoreError {
    fn is_unfinished(&self) -> bool {
        matches!(self, Self::Fenced | Self::Closed)
    }
}

impl ChangeError for DecideError {
    fn is_unfinished(&self) -> bool {
        match self {
            Self::Draining => true,
            Self::Store(error) => error.is_unfinished(),
            _ => false,
        }
    }
}

impl ChangeError for AddMessageError {
    fn is_unfinished(&self) -> bool {
        match self {
            Self::Draining => true,
            Self::Store(error) => error.is_unfinished(),
            _ => false,
        }
    }
}

impl ChangeError for HoldError {
    fn is_unfinished(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_unfinished())
    }
}

impl ChangeError for ClientResultsError {
    fn is_unfinished(&self) -> bool {
        match self {
            Self::Draining => true,
            Self::Store(error) => error.is_unfinished(),
            _ => false,
        }
    }
}
