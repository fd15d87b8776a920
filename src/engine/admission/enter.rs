//! Where a new run gets into: its session, and the queue of all nodes that share the database.

use std::time::Duration;

use crate::domain::content::Content;
use crate::domain::message::Message;
use crate::domain::run::RunId;
use crate::engine::admission::placement::Placement;
use crate::engine::context::Engine;
use crate::engine::history;
use crate::engine::request::{RunRequest, StartError};
use crate::engine::state::cluster_permits::{EnteringRun, QueuedTree};
use crate::engine::state::queued_bytes::HeldBytes;
use crate::engine::state::sessions::{OnBusy, SessionGuard};
use crate::fair::admission::{Admission, QueueFull};
use crate::store::StoreError;
use crate::store::cluster::Cluster;

/// How often a run tries to be the next one of its session.
const MAX_ATTEMPTS: u32 = 40;
/// The longest pause before its second attempt; before later ones it is longer.
const RETRY_PAUSE: Duration = Duration::from_millis(2);

/// A run's place in its session.
pub struct EnteredSession {
    /// The run's id, which is greater than those before it in the session.
    pub id: RunId,
    /// `None` without a session, and if several nodes share the database: then the order is theirs.
    pub guard: Option<SessionGuard>,
    /// The unfinished runs before it, if several nodes share the database.
    pub predecessors: Vec<RunId>,
}

impl EnteredSession {
    pub fn new(id: RunId, guard: Option<SessionGuard>) -> Self {
        Self {
            id,
            guard,
            predecessors: Vec::new(),
        }
    }
}

/// Starts a run. If it is too late to be the next one of its session, because another one was committed meanwhile, it enters the
/// session again.
pub async fn start_in_order<T, F: Future<Output = Result<T, StartError>>>(
    engine: &Engine,
    request: RunRequest,
    start: impl Fn(RunRequest) -> F,
) -> Result<T, StartError> {
    if request.session.is_some() && engine.journal.store().cluster().is_some() {
        for attempt in 1..MAX_ATTEMPTS {
            match start(request.clone()).await {
                Err(StartError::Store(StoreError::SessionChanged)) => {}
                started => return started,
            }
            let pause = fastrand::u32(0..=attempt) * RETRY_PAUSE;
            tokio::time::sleep(pause).await;
        }
    }
    start(request).await
}

/// Enters a session whose runs several nodes accept.
pub async fn enter_shared_session(
    cluster: &dyn Cluster,
    request: &RunRequest,
    name: &str,
) -> Result<EnteredSession, StartError> {
    let open = cluster.open_session(request.owner.clone(), name.to_owned());
    let open = open.await?;
    if let Some(first) = open.unfinished.first()
        && request.on_busy == OnBusy::Reject
    {
        return Err(StartError::SessionBusy {
            session: name.to_owned(),
            run: *first,
        });
    }
    if let Some(last) = open.last_run {
        last.advance_newest();
    }
    Ok(EnteredSession {
        predecessors: open.unfinished,
        ..EnteredSession::new(RunId::new(), None)
    })
}

/// Those unfinished runs of a shared session that the new one knows of, if it may be accepted beside no others.
pub fn known_runs(on_busy: OnBusy, predecessors: &[RunId]) -> Option<Vec<RunId>> {
    match on_busy {
        OnBusy::Queue => None,
        OnBusy::Reject => Some(Vec::new()),
        OnBusy::CancelPrevious => Some(predecessors.to_vec()),
    }
}

/// The run's place in the queue of this node. A run of another node needs none.
pub fn enter_own_queue(
    engine: &Engine,
    (owner, agent): (Option<&str>, &str),
    session_guard: Option<&SessionGuard>,
    placement: &Placement,
) -> Result<Admission, StartError> {
    let queue = &engine.queue;
    if !placement.is_here {
        return Ok(queue.enter_accepted_deferred(owner, agent));
    }
    let entered = match session_guard.is_some_and(SessionGuard::is_waiting) {
        true => queue.enter_deferred(owner, agent),
        false => queue.enter(owner, agent),
    };
    entered.map_err(StartError::QueueFull)
}

/// How often a queued run has its texts in memory: in its record, and for its first request.
const COPIES: usize = 2;

/// Counts what the run keeps in memory while it is queued; `None` if it starts at once.
pub fn hold_bytes(
    engine: &Engine,
    (admission, entry): (&Admission, Option<&QueuedTree>),
    message: &Content,
    earlier: &[Message],
) -> Result<Option<HeldBytes>, StartError> {
    let has_permits = entry.is_none_or(|entry| entry.has_permit);
    if has_permits && matches!(admission, Admission::Permit(_)) {
        return Ok(None);
    }
    let earlier: usize = earlier.iter().map(history::message_bytes).sum();
    let bytes = (message.text_bytes() + earlier).saturating_mul(COPIES);
    match engine.queued_bytes.try_hold(bytes) {
        Some(held) => Ok(Some(held)),
        None => {
            let (running, queued) = engine.queue.load();
            Err(StartError::QueueFull(QueueFull { running, queued }))
        }
    }
}

/// The run's place in the queue of all nodes; `None` if only one process uses the store.
pub async fn enter_queue(
    engine: &Engine,
    request: &RunRequest,
    agent: &str,
    is_behind: bool,
) -> Result<Option<QueuedTree>, StartError> {
    let Some(cluster) = engine.journal.store().cluster() else {
        return Ok(None);
    };
    let run = EnteringRun {
        owner: request.owner.clone(),
        agent: agent.to_owned(),
        has_session: request.session.is_some(),
        is_behind,
    };
    let entered = engine.cluster_permits.enter(cluster, run).await?;
    entered.map(Some).map_err(StartError::QueueFull)
}
