//! The statements of new runs: with their definition, labels and idempotency key.

use std::collections::BTreeSet;
use std::sync::Arc;

use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::domain::run::{Run, RunId, now};
use crate::store::encoding::clock_skew::{self, ClockSkew};
use crate::store::encoding::definition_cache::{self, DefinitionCache, Hash};
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::postgres::connection::Query;
use crate::store::postgres::run_changes::{self, Ownership};
use crate::store::postgres::statements::Sql;
use crate::store::postgres::task_plan::insert_request;
use crate::store::sql::value::{free_text, values};
use crate::store::write_queue::job::Task;
use crate::store::{Change, IdempotencyClaim, NewRun};

/// What the writer remembers from one new run to the next, so that most of them write neither a definition nor a skew.
#[derive(Default)]
pub struct RunInserts {
    definition_cache: DefinitionCache,
    clock_skew: Option<ClockSkew>,
}

impl RunInserts {
    /// Forgets everything after a rollback, or if definitions may have been removed.
    pub fn reset(&mut self) {
        self.definition_cache.clear();
        self.clock_skew = None;
    }

    /// The statements of a new run, its row first.
    pub fn insert<'a>(
        &mut self,
        write: &'a EncodedWrite,
        new_run: &'a NewRun,
        owner: Ownership,
        queries: &mut Vec<Query<'a>>,
    ) {
        let run = &*new_run.run;
        let definition = &new_run.resume_state.definition;
        let (hash, stored) = self.store_definition(definition, run.id);
        queries.push(run_changes::new_run(write, new_run, hash, owner));
        queries.extend(stored);
        if let Some(pinned_agents) = &new_run.pinned_agents {
            queries.extend(self.store_definition(pinned_agents, run.id).1);
        }
        if let Some((owner, name)) = entered_session(run) {
            let session = values! {":owner": owner, ":session": name, ":root": run.id};
            queries.push(Query::required(Sql::EnterSession, session.to_vec()));
            if let Some(known) = &new_run.entry.known_runs {
                let known: Vec<Uuid> = known.iter().map(|run| run.0).collect();
                let session = session.into_iter().chain(values! {":known": known});
                queries.push(Query::required(Sql::RequireKnownRuns, session.collect()));
            }
        }
        let requests = new_run.entry.requests.iter();
        let node = NodeId(owner.node);
        queries.extend(requests.map(|request| insert_request(node, request)));
        if let Some(claim) = &new_run.claim {
            insert_claim(claim, run.id, None, queries);
        }
        if let Some(source) = run.fork.as_ref().and_then(|fork| fork.from) {
            // A copy of a run that was deleted, if only in part, may have gaps.
            let source = values! {":id": source.run}.into();
            queries.push(Query::required(Sql::HasRoot, source));
        }
        let labels = run.labels.iter().map(|(key, value)| {
            let label =
                values! {":key": free_text(key), ":value": free_text(value), ":run": run.id};
            Query::new(Sql::InsertLabel, label.into())
        });
        queries.extend(labels);
        queries.extend(self.raise_clock_skew(run));
    }

    /// Stores the skew of the run's id if it is the largest so far.
    fn raise_clock_skew(&mut self, run: &Run) -> Option<Query<'static>> {
        let created_ms = run.created_at.as_millisecond();
        let known = self.clock_skew.unwrap_or(ClockSkew { lead: 0, lag: 0 });
        let skew = known.including(clock_skew::created_ms(run.id), created_ms);
        if self.clock_skew == Some(skew) {
            return None;
        }
        self.clock_skew = Some(skew);
        let values = values! {":lead": skew.lead, ":lag": skew.lag};
        Some(Query::new(Sql::RaiseClockSkew, values.into()))
    }

    /// The hash of a definition, or of another text that runs share, and what makes the table say that this run uses it.
    pub fn store_definition<'a>(
        &mut self,
        text: &'a Arc<str>,
        run: RunId,
    ) -> (Hash, Option<Query<'a>>) {
        let accepted_ms = clock_skew::created_ms(run);
        if let Some(hash) = self.definition_cache.get(text, accepted_ms) {
            return (hash, None);
        }
        let hash = definition_cache::hash(text);
        self.definition_cache.insert(text, hash, accepted_ms);
        let values = values! {
            ":hash": hash,
            ":body": free_text(&**text),
            ":used_until": DefinitionCache::used_until(accepted_ms),
            ":run": run,
        };
        (hash, Some(Query::new(Sql::UpsertDefinition, values.into())))
    }
}

/// Locks the sessions that these tasks enter or delete.
pub fn lock_sessions<'a>(tasks: &[&'a Task]) -> Option<Query<'a>> {
    let entered = tasks.iter().filter_map(|task| match task {
        Task::Write(write) => match &write.change {
            Change::Create(new_run) => entered_session(&new_run.run),
            _ => None,
        },
        Task::ForgetSession(owner, name) => {
            Some((owner.as_deref().unwrap_or_default(), name.as_bytes()))
        }
        _ => None,
    });
    let sessions: BTreeSet<(&str, &[u8])> = entered.collect();
    if sessions.is_empty() {
        return None;
    }
    let (owners, names): (Vec<_>, Vec<_>) = sessions.into_iter().unzip();
    let values = values! {":owners": owners, ":names": names};
    Some(Query::new(Sql::LockSessions, values.into()))
}

/// Its owner and name.
fn entered_session(run: &Run) -> Option<(&str, &[u8])> {
    let session = run.session.as_ref().filter(|_| run.parent_id.is_none())?;
    Some((run.owner.as_deref().unwrap_or_default(), session.as_bytes()))
}

/// `message` is what the request of the key gave the run; `None` if it started it. Nothing is committed if an earlier request
/// had the key.
pub fn insert_claim<'a>(
    claim: &'a IdempotencyClaim,
    run: RunId,
    message: Option<u32>,
    queries: &mut Vec<Query<'a>>,
) {
    let now = now().as_millisecond();
    queries.push(Query::new(
        Sql::DeleteExpiredClaims,
        values! {":now": now}.into(),
    ));
    let key = &claim.key;
    let values = values! {
        ":credential": &key.credential,
        ":route": &key.route,
        ":key": free_text(&key.key),
        ":run": run,
        ":body": &claim.body_hash,
        ":expires": claim.expires_at.as_millisecond(),
        ":message": message,
        ":now": now,
    };
    queries.push(Query::required(Sql::UpsertClaim, values.into()));
}
