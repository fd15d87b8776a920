//! An event that is added to the record of a tree that has ended, and its deliveries to webhooks.

use crate::domain::run::RunId;
use crate::record::stored::StoredEntries;
use crate::ssrf;
use crate::store::NewDelivery;
use crate::store::changes::Changes;
use crate::store::sql::value::{NamedValue, free_text, values};

/// Who adds an event to a tree locks its root first, so that each gets another number.
pub const LOCK: &str = "UPDATE runs SET last_event = last_event WHERE id = :root";

/// Adds an entry of the run; what follows is the rest of the statement, which says whether.
macro_rules! insert_late_entry {
    ($($rest:expr),+) => {
        concat!(
            "INSERT INTO entries (root, last_seq, run, count, entries, texts) \
             SELECT :root, coalesce((SELECT max(e.last_seq) FROM entries e WHERE e.root = :root), 0) + 1, :run, 1, :entries, :texts ",
            $($rest),+
        )
    };
}
pub(crate) use insert_late_entry;

macro_rules! set_last_event {
    ($condition:expr) => {
        concat!(
            "UPDATE runs SET last_event = coalesce((SELECT max(e.last_seq) FROM entries e WHERE e.root = :root), 0) WHERE id = :run AND ",
            $condition
        )
    };
}
pub(crate) use set_last_event;

macro_rules! insert_late_delivery {
    ($condition:expr) => {
        concat!(
            "INSERT INTO deliveries (id, run, event, host, url, secret_env, body, status, created_at, since, tries, next_at, attempts, owner) \
             SELECT :delivery, r.id, :event, :host, :url, :secret_env, :body, 'pending', :now, :now, 0, ",
            $crate::store::sql::clock::clock!(),
            ", {'[]'|'{}'}, coalesce(r.owner, '') FROM runs r WHERE r.id = :run AND ",
            $condition
        )
    };
}
pub(crate) use insert_late_delivery;

/// The statements that add an event to a tree, under one condition whose values are `key`.
pub struct LateEvent {
    pub insert_entry: &'static str,
    pub set_last_event: &'static str,
    pub insert_delivery: &'static str,
}

/// An event of a root run that has ended, and its deliveries.
#[derive(Clone, Debug)]
pub struct LateReport {
    pub run: RunId,
    pub entries: StoredEntries,
    pub deliveries: Vec<NewDelivery>,
}

impl LateEvent {
    pub fn changes(&self, report: LateReport, key: Vec<NamedValue<'static>>) -> Changes {
        let LateReport {
            run,
            entries,
            deliveries,
        } = report;
        let with = |more: Vec<NamedValue<'static>>| {
            let run = values! {":run": run};
            key.iter().cloned().chain(run).chain(more).collect()
        };
        let mut changes = Changes::default()
            .of_tree(run)
            .and(LOCK, values! {":root": run})
            .and_vec(self.insert_entry, with(entry_values(run, entries).into()))
            .and_vec(self.set_last_event, with(values! {":root": run}.into()));
        if !deliveries.is_empty() {
            changes = changes.with_deliveries();
        }
        for delivery in deliveries {
            changes = changes.and_vec(self.insert_delivery, with(delivery_values(delivery).into()));
        }
        changes
    }
}

/// Whether nothing is written to the tree of the root run any more, and it is not being deleted.
macro_rules! is_ended {
    () => {
        "EXISTS (SELECT 1 FROM runs r WHERE r.id = :run AND r.finished_at IS NOT NULL \
         {|AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.root) }\
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root))"
    };
}
pub(crate) use is_ended;

pub fn entry_values(root: RunId, entry: StoredEntries) -> [NamedValue<'static>; 3] {
    values! {
        ":root": root,
        ":entries": free_text(entry.entries),
        ":texts": entry.texts.map(free_text),
    }
}

pub fn delivery_values(delivery: NewDelivery) -> [NamedValue<'static>; 7] {
    values! {
        ":delivery": delivery.id.0,
        ":event": delivery.event,
        ":host": ssrf::host_of(&delivery.webhook.url),
        ":url": free_text(delivery.webhook.url.clone()),
        ":secret_env": delivery.webhook.secret_env.clone(),
        ":body": free_text(delivery.body),
        ":now": delivery.created_at.as_millisecond(),
    }
}
