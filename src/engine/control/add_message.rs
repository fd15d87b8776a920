//! Adds a message to an unfinished run. It is committed first; the run's next request includes it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::domain::content::Content;
use crate::domain::run::{RunId, Status};
use crate::engine::context::Engine;
use crate::engine::history::run_log::RecordedMessages;
use crate::engine::state::active_run::ActiveRun;
use crate::engine::state::inbox::{self, Messages};
use crate::record::entry::Entry;
use crate::store::{Change, IdempotencyClaim, NewMessage, StoreError};

/// How often the number of a message is corrected by the record.
const MAX_RENUMBERINGS: usize = 3;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MessageRequest {
    pub content: Content,
    /// The name of the sending key; `None` without keys.
    pub by: Option<String>,
    pub claim: Option<IdempotencyClaim>,
}

/// Why a message was not accepted.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddMessageError {
    #[error("there is no run {0}")]
    RunNotFound(RunId),
    #[error("{run} is {}: it reads no more messages", .status.as_str())]
    RunEnded { run: RunId, status: Status },
    #[error(
        "{0} has not read its last messages yet, and more would be too many: at most {max} may wait",
        max = inbox::MAX_UNREAD
    )]
    TooManyUnread(RunId),
    #[error("the daemon is stopping; look at the run and try again")]
    Draining,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Commits a message and returns its number. Does not depend on whether the run is driven at the moment.
pub async fn add_message(
    engine: &Engine,
    id: RunId,
    request: &MessageRequest,
) -> Result<u32, AddMessageError> {
    loop {
        let ending_run = {
            let _gate = engine.suspension.resume_lock.read().await;
            match engine.active_runs.get(id) {
                Some(run) => match add_to_active(engine, &run, request).await? {
                    Some(number) => return Ok(number),
                    None => run,
                },
                None => match add_to_inactive(engine, id, request).await? {
                    Some(number) => return Ok(number),
                    None => continue,
                },
            }
        };
        return Err(match ending_run.wait_for_end().await {
            Some(run) => AddMessageError::RunEnded {
                run: id,
                status: run.status,
            },
            None if ending_run.is_suspended() => StoreError::Suspended.into(),
            None => AddMessageError::Draining,
        });
    }
}

/// Returns `None` if the run is ending.
async fn add_to_active(
    engine: &Engine,
    run: &Arc<ActiveRun>,
    request: &MessageRequest,
) -> Result<Option<u32>, AddMessageError> {
    let id = run.scope.run;
    let mut messages = run.inbox.lock().await;
    if messages.is_closed() {
        return Ok(None);
    }
    let bytes = inbox::content_bytes(&request.content);
    let may_add = |messages: &Messages| messages.has_capacity(bytes);
    let committed = commit_next(engine, run, &mut messages, request, may_add, |_| Vec::new());
    match committed.await {
        Ok(Some(number)) => {
            // It may wait for one.
            run.tree.root_permit.changed.notify_waiters();
            Ok(Some(number))
        }
        Ok(None) => Err(AddMessageError::TooManyUnread(id)),
        Err(StoreError::AlreadyTerminal(_)) => Err(ended(engine, id).await?),
        Err(error) => {
            let may_be_recorded = match &error {
                StoreError::AlreadyClaimed(claimed) => {
                    claimed.number >= Some(messages.next_number())
                }
                error => error.may_be_recorded(),
            };
            // The commit, or that of an earlier request with the same key, may have succeeded although its answer was lost.
            if may_be_recorded {
                messages.set_incomplete();
            }
            Err(error.into())
        }
    }
}

/// Commits the next message of a run and adds it to those that are unread; `None` if it may not be added to these. `with` returns
/// the entries that are committed before it, by its number.
pub async fn commit_next(
    engine: &Engine,
    run: &ActiveRun,
    messages: &mut Messages,
    request: &MessageRequest,
    may_add: impl Fn(&Messages) -> bool,
    with: impl Fn(u32) -> Vec<Entry>,
) -> Result<Option<u32>, StoreError> {
    let id = run.scope.run;
    for _ in 0..MAX_RENUMBERINGS {
        if !may_add(messages) {
            return Ok(None);
        }
        let number = messages.next_number();
        let (change, entry) = entry(number, request);
        let mut entries = with(number);
        entries.push(entry);
        let committed = engine.journal.append_request(run, change, entries);
        match committed.await {
            Ok(_) => {
                messages.push(request.content.clone());
                return Ok(Some(number));
            }
            Err(StoreError::MessagesChanged(_)) => {}
            Err(error) => return Err(error),
        }
        let recorded = RecordedMessages::read(engine, id).await?;
        messages.restore(&recorded.contents, recorded.read);
    }
    Err(StoreError::MessagesChanged(id))
}

/// Returns `None` if the run is driven now.
async fn add_to_inactive(
    engine: &Engine,
    id: RunId,
    request: &MessageRequest,
) -> Result<Option<u32>, AddMessageError> {
    let _guard = engine.inactive_inbox_lock.lock().await;
    if engine.active_runs.get(id).is_some() {
        return Ok(None);
    }
    let run = engine.journal.store().run(id).await?;
    let run = run.ok_or(AddMessageError::RunNotFound(id))?;
    if run.status.is_terminal() || run.status == Status::Cancelling {
        let status = run.status;
        return Err(AddMessageError::RunEnded { run: id, status });
    }
    let recorded = RecordedMessages::read(engine, id).await?;
    let bytes = inbox::content_bytes(&request.content);
    if !inbox::has_capacity(recorded.unread().iter(), bytes) {
        return Err(AddMessageError::TooManyUnread(id));
    }
    let number = recorded.count() + 1;
    let (change, entry) = entry(number, request);
    let journal = &engine.journal;
    match journal.append_inactive(&run, change, entry).await {
        Ok(_) => Ok(Some(number)),
        Err(StoreError::MessagesChanged(_)) => Ok(None),
        Err(StoreError::AlreadyTerminal(_)) => Err(ended(engine, id).await?),
        Err(error) => Err(error.into()),
    }
}

async fn ended(engine: &Engine, id: RunId) -> Result<AddMessageError, StoreError> {
    let run = engine.journal.store().run(id).await?;
    Ok(match run {
        Some(run) => AddMessageError::RunEnded {
            run: id,
            status: run.status,
        },
        None => AddMessageError::RunNotFound(id),
    })
}

fn entry(number: u32, request: &MessageRequest) -> (Change, Entry) {
    let entry = Entry::MessageAdded {
        number,
        content: request.content.clone(),
        by: request.by.clone(),
    };
    let claim = request.claim.clone();
    let change = Change::AddMessage(Box::new(NewMessage { number, claim }));
    (change, entry)
}
