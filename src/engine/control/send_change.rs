//! Lets the node that drives a run change it: the request is committed, and its answer awaited.

use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::domain::run::{Run, RunId};
use crate::engine::context::Engine;
use crate::engine::control::perform_change;
use crate::engine::control::run_change::RunChange;
use crate::store::StoreError;
use crate::store::cluster::{Cluster, TreeOwner};
use crate::store::new_request::{NewRequest, RequestId};
use crate::store::node_messages::{NodeMessage, ReceivedMessages};
use crate::store::run_requests::{OpenRequest, RequestState};

/// How long a request waits until a node takes it: longer than the takeover of a dead node's trees.
const TAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// The same while this node drains: the drain waits for the answer. Others take what it leaves to them within a second.
const DRAIN_TAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an attempt to add a request is repeated while it may be recorded, although the store has not confirmed it.
const ADD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it is tried to have a request not performed: no commit comes later.
const VOID_TIMEOUT: Duration = Duration::from_secs(120);
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// How long it waits for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(45);

/// Sends a change to the node that drives the run, and returns what it has answered. `None` if no other node drives the run:
/// then this one makes the change.
pub async fn send<T: DeserializeOwned, E: DeserializeOwned + From<StoreError>>(
    engine: &Arc<Engine>,
    run: RunId,
    change: impl FnOnce() -> RunChange,
) -> Option<Result<T, E>> {
    match try_send(engine, run, change).await {
        Ok(answer) => answer,
        Err(error) => Some(Err(error.into())),
    }
}

async fn try_send<A: DeserializeOwned>(
    engine: &Arc<Engine>,
    run: RunId,
    change: impl FnOnce() -> RunChange,
) -> Result<Option<A>, StoreError> {
    let Some(cluster) = engine.journal.store().cluster() else {
        return Ok(None);
    };
    let Some((run_record, owner)) = find_elsewhere(engine, cluster, run).await? else {
        return Ok(None);
    };
    let root = run_record.root_id;
    let sent = engine.sent_requests.begin(run_record.owner);
    let _sent = sent.ok_or(StoreError::TooManyRequests(run))?;
    let change = change();
    let request = NewRequest {
        id: RequestId::new(),
        run,
        root,
        kind: change.kind(),
        content: change.encode()?,
    };
    let open = OpenRequest {
        id: request.id,
        run,
        root,
        asker: cluster.node(),
        kind: request.kind.to_owned(),
        is_taken: false,
    };
    let messages = cluster.messages();
    let mut attempts = 0;
    let sent = async {
        attempts = add(cluster, request).await?;
        if let TreeOwner::Node(owner) = owner {
            cluster.send(Some(owner), NodeMessage::Requests);
        }
        let answer = await_answer(engine, cluster, open.clone(), messages).await?;
        if attempts == 1 {
            // Otherwise it is removed with other old ones, when no earlier attempt can add it any more.
            let _ = cluster.delete_request(open.id).await;
        }
        Ok(answer)
    };
    let answer = sent.await;
    let answer = answer.inspect_err(|error| {
        if attempts != 1 || !matches!(error, StoreError::NotTaken(_)) {
            spawn_void(engine, open.clone());
        }
    })?;
    serde_json::from_slice(&answer).map(Some).map_err(|error| {
        StoreError::Backend(format!(
            "the answer of the node that drives {run} cannot be read: {error}"
        ))
    })
}

/// Commits the request, and returns how many attempts it took: earlier ones may be committed later.
async fn add(cluster: &dyn Cluster, request: NewRequest) -> Result<u32, StoreError> {
    let start = Instant::now();
    let mut attempts = 1;
    loop {
        match cluster.add_request(request.clone()).await {
            Err(error) if error.may_be_recorded() && start.elapsed() < ADD_TIMEOUT => {}
            added => return added.map(|()| attempts),
        }
        attempts += 1;
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Has no node perform a request whose client gets an error: it may send another one before this one would be performed.
fn spawn_void(engine: &Arc<Engine>, request: OpenRequest) {
    let (own, shutdown) = (Arc::clone(engine), engine.shutdown.clone());
    let void = async move {
        while let Some(cluster) = own.journal.store().cluster()
            && cluster.void_request(request.clone()).await.is_err()
        {
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    };
    engine.tasks.spawn(async move {
        tokio::select! {
            () = void => {}
            () = tokio::time::sleep(VOID_TIMEOUT) => {}
            () = shutdown.cancelled() => {}
        }
    });
}

/// An unfinished run that this node does not drive, and who owns the tree.
async fn find_elsewhere(
    engine: &Engine,
    cluster: &dyn Cluster,
    id: RunId,
) -> Result<Option<(Run, TreeOwner)>, StoreError> {
    if engine.active_runs.get(id).is_some() {
        return Ok(None);
    }
    let run = engine.journal.store().run(id).await?;
    let Some(run) = run.filter(|run| !run.status.is_terminal()) else {
        return Ok(None);
    };
    Ok(match cluster.tree_owner(run.root_id).await? {
        TreeOwner::ThisNode | TreeOwner::Ended => None,
        owner @ (TreeOwner::Node(_) | TreeOwner::Nobody) => Some((run, owner)),
    })
}

async fn await_answer(
    engine: &Arc<Engine>,
    cluster: &dyn Cluster,
    mut request: OpenRequest,
    mut messages: ReceivedMessages,
) -> Result<Vec<u8>, StoreError> {
    let start = Instant::now();
    loop {
        let is_late = start.elapsed() >= ANSWER_TIMEOUT;
        match try_answer(engine, cluster, &mut request, start).await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) if is_late => return Err(StoreError::Unanswered(request.run)),
            Err(error @ StoreError::NotTaken(_)) => return Err(error),
            Err(error) if is_late => return Err(error),
            Ok(None) | Err(_) => {}
        }
        let id = request.id.0;
        let is_answer = |it: &NodeMessage| matches!(it, NodeMessage::Answered(it) if *it == id);
        let answered = perform_change::wait_for_message(&mut messages, is_answer);
        let _ = tokio::time::timeout(engine.sent_requests.poll_interval(), answered).await;
    }
}

/// The answer if there is one. Withdraws the request if no node has taken it in time.
async fn try_answer(
    engine: &Arc<Engine>,
    cluster: &dyn Cluster,
    request: &mut OpenRequest,
    start: Instant,
) -> Result<Option<Vec<u8>>, StoreError> {
    match cluster.request_state(request.id).await? {
        RequestState::Answered(answer) => return Ok(Some(answer)),
        RequestState::Gone => return Err(StoreError::Unanswered(request.run)),
        RequestState::Open { is_taken } => request.is_taken = is_taken,
    }
    if cluster.tree_owner(request.root).await? == TreeOwner::Ended {
        // No owner performs it any more. If one has, the record says so.
        let Some(content) = cluster.take_request(request.id).await? else {
            return Ok(None);
        };
        let change =
            RunChange::decode(content).map_err(|error| StoreError::Backend(error.to_string()))?;
        return Ok(perform_change::perform(engine, request, change).await);
    }
    let timeout = match engine.draining.is_cancelled() {
        true => DRAIN_TAKE_TIMEOUT,
        false => TAKE_TIMEOUT,
    };
    let is_over = start.elapsed() >= timeout;
    if is_over && !request.is_taken && cluster.withdraw_request(request.id).await? {
        return Err(StoreError::NotTaken(request.run));
    }
    Ok(None)
}
