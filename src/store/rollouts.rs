//! What is known of the rollouts of agents: one row for each candidate that an agent had. Also counts the runs of versions.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::domain::rollout::Loss;
use crate::domain::run::RunId;
use crate::domain::score::Moments;
use crate::domain::variant::Variant;
use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::encoding::clock_skew::first_id;
use crate::store::engine::Engine;
use crate::store::late_events::{
    LateEvent, LateReport, insert_late_delivery, insert_late_entry, is_ended, set_last_event,
};
use crate::store::reader::ReadMode;
use crate::store::run_rows;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{NamedValue, free_text, params, values};

/// Versions of one agent that a list has, and candidates of one that are read; the newest.
pub const MAX_VERSIONS: u32 = 200;
const MAX_CANDIDATES: u32 = 100;

pub trait RolloutRecords: Send + Sync + 'static {
    /// Those of an agent, the newest first.
    fn rollouts(&self, agent: String) -> BoxFuture<'_, StoreResult<Vec<RolloutRecord>>>;

    /// Returns whether it changed anything.
    fn change_rollout(
        &self,
        id: RolloutId,
        change: RolloutChange,
    ) -> BoxFuture<'_, StoreResult<bool>>;

    /// How the root runs of an agent ended that were rolled out since then.
    fn variant_runs(
        &self,
        agent: String,
        since: Timestamp,
    ) -> BoxFuture<'_, StoreResult<Vec<VariantRuns>>>;

    /// The newest root run of the candidate whose tree has ended.
    fn newest_candidate(&self, id: RolloutId) -> BoxFuture<'_, StoreResult<Option<RunId>>>;

    /// What the last root run of a session got.
    fn session_variant(
        &self,
        owner: Option<String>,
        session: String,
    ) -> BoxFuture<'_, StoreResult<Option<SessionVariant>>>;

    /// The versions of an agent that runs of this key, or of all, had: the one of the last run first.
    fn agent_versions(
        &self,
        agent: String,
        owner: Option<String>,
    ) -> BoxFuture<'_, StoreResult<Vec<VersionRuns>>>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutId {
    pub agent: String,
    /// The version of the candidate.
    pub candidate: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RolloutRecord {
    pub candidate: String,
    /// Runs and scores count from here.
    pub started_at: Timestamp,
    pub baseline: Baseline,
    pub percent: Option<SetPercent>,
    pub stopped: Option<(Timestamp, Loss)>,
    pub promotion: Option<Promotion>,
}

/// A share that replaces that of the file, as long as the file has the one that it had then. In thousandths of a percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetPercent {
    pub percent: u32,
    pub of_file: u32,
}

/// The candidate has become the current version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    pub at: Timestamp,
    /// The version that was current.
    pub from: String,
    /// The version and the text of the file that has the candidate's settings.
    pub version: String,
    pub text: String,
    /// From when on a node's file may be newer than the promotion: it has been written, or changed.
    pub fixed_at: Option<Timestamp>,
}

/// The sums of scores when a rollout started: of each version as a variant, by the name of the score.
pub type Baseline = BTreeMap<String, BTreeMap<String, Moments>>;

#[derive(Clone, Debug)]
pub enum RolloutChange {
    /// It exists. Nothing changes if it is known.
    Start {
        at: Timestamp,
        baseline: Baseline,
    },
    /// It starts anew.
    Restart {
        at: Timestamp,
        baseline: Baseline,
    },
    SetPercent(SetPercent),
    /// The candidate is taken off, with an event of a run of it and its deliveries. Happens once.
    Stop {
        at: Timestamp,
        loss: Loss,
        report: LateReport,
    },
    Promote(Promotion),
    /// See [`Promotion::fixed_at`]. The first time stays.
    Fix {
        at: Timestamp,
    },
}

#[derive(Clone, Debug)]
pub struct VariantRuns {
    pub version: String,
    pub variant: Variant,
    pub completed: u64,
    pub failed: u64,
}

#[derive(Clone, Debug)]
pub struct SessionVariant {
    pub agent: String,
    pub version: String,
    pub variant: Option<Variant>,
    pub created_at: Timestamp,
}

#[derive(Clone, Debug)]
pub struct VersionRuns {
    pub version: String,
    pub runs: u64,
    pub failed: u64,
    pub first: Timestamp,
    pub last: Timestamp,
}

const LIST: &str = "SELECT candidate, started_at, baseline, percent, file_percent, stopped_at, loss, promoted_at, promoted_from, \
     promoted_version, promoted_text, fixed_at FROM rollouts WHERE agent = :agent ORDER BY started_at DESC, candidate LIMIT :limit";
const START: &str = "INSERT INTO rollouts (agent, candidate, started_at, baseline) VALUES (:agent, :candidate, :at, :baseline) \
     ON CONFLICT (agent, candidate) DO NOTHING";
const RESTART: &str = "INSERT INTO rollouts (agent, candidate, started_at, baseline) VALUES (:agent, :candidate, :at, :baseline) \
     ON CONFLICT (agent, candidate) DO UPDATE SET started_at = excluded.started_at, baseline = excluded.baseline, \
     stopped_at = NULL, loss = NULL, promoted_at = NULL, promoted_from = NULL, promoted_version = NULL, promoted_text = NULL, \
     fixed_at = NULL";
const SET_PERCENT: &str = "UPDATE rollouts SET percent = :percent, file_percent = :of_file WHERE agent = :agent AND candidate = :candidate";
const PROMOTE: &str = "UPDATE rollouts SET promoted_at = :at, promoted_from = :from, promoted_version = :version, promoted_text = :text, \
     fixed_at = :fixed_at WHERE agent = :agent AND candidate = :candidate";
const FIX: &str = "UPDATE rollouts SET fixed_at = :at WHERE agent = :agent AND candidate = :candidate AND promoted_at IS NOT NULL \
     AND fixed_at IS NULL";

/// Whether the candidate is not taken off yet.
macro_rules! is_stoppable {
    () => {
        concat!(
            "EXISTS (SELECT 1 FROM rollouts o WHERE o.agent = :agent AND o.candidate = :candidate AND o.stopped_at IS NULL) AND ",
            is_ended!()
        )
    };
}

const STOPPED: LateEvent = LateEvent {
    insert_entry: insert_late_entry!("WHERE ", is_stoppable!()),
    set_last_event: set_last_event!(is_stoppable!()),
    insert_delivery: insert_late_delivery!(is_stoppable!()),
};
const STOP: &str = concat!(
    "UPDATE rollouts SET stopped_at = :at, loss = :loss WHERE agent = :agent AND candidate = :candidate AND ",
    is_stoppable!()
);

const RUNS: &str = "SELECT agent_version, variant, status, count(*) AS n FROM runs WHERE agent = :agent AND variant IS NOT NULL \
     AND id >= :since AND status IN ('completed', 'failed') GROUP BY agent_version, variant, status";
const NEWEST: &str = "SELECT r.id FROM runs r WHERE r.agent = :agent AND r.agent_version = :candidate AND r.variant = 'candidate' \
     AND r.status IN ('completed', 'failed') AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.id) \
     {|AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.id) }ORDER BY r.id DESC LIMIT 1";
const OF_SESSION: &str = "SELECT agent, agent_version, variant, created_at FROM runs WHERE session = :session \
     AND owner {IS|IS NOT DISTINCT FROM} :owner{|::text} ORDER BY id DESC LIMIT 1";
/// Those that have ended are found by an index.
const VERSIONS: &str = "SELECT v.agent_version, count(*) AS n, count(CASE WHEN v.status = 'failed' THEN 1 END) AS failed, \
     min(v.created_at) AS first_at, max(v.created_at) AS last_at FROM \
     (SELECT id, root, owner, agent_version, status, created_at FROM runs WHERE agent = :agent AND finished_at IS NOT NULL \
     UNION ALL SELECT id, root, owner, agent_version, status, created_at FROM runs WHERE finished_at IS NULL AND agent = :agent) v \
     WHERE (:owner::text IS NULL OR v.owner = :owner) AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = v.root) \
     GROUP BY v.agent_version ORDER BY last_at DESC, v.agent_version LIMIT :limit";

impl<E: Engine> RolloutRecords for E {
    fn rollouts(&self, agent: String) -> BoxFuture<'_, StoreResult<Vec<RolloutRecord>>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":agent": &agent, ":limit": MAX_CANDIDATES};
                db.query(LIST, params, record).await
            })
        })
    }

    fn change_rollout(
        &self,
        id: RolloutId,
        change: RolloutChange,
    ) -> BoxFuture<'_, StoreResult<bool>> {
        Box::pin(async move {
            let changes = changes(id, change)?;
            let last = changes.statements.len() - 1;
            self.changes_row(changes, last).await
        })
    }

    fn variant_runs(
        &self,
        agent: String,
        since: Timestamp,
    ) -> BoxFuture<'_, StoreResult<Vec<VariantRuns>>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move {
                let params = params! {":agent": &agent, ":since": first_id(since)};
                let counts = db.query(RUNS, params, count).await?;
                Ok(counts.into_iter().flatten().collect())
            })
        })
    }

    fn newest_candidate(&self, id: RolloutId) -> BoxFuture<'_, StoreResult<Option<RunId>>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":agent": &id.agent, ":candidate": &id.candidate};
                db.first(NEWEST, params, |row: &Row<'_>| row.get("id"))
                    .await
            })
        })
    }

    fn session_variant(
        &self,
        owner: Option<String>,
        session: String,
    ) -> BoxFuture<'_, StoreResult<Option<SessionVariant>>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params = params! {":owner": owner.as_ref(), ":session": free_text(&session)};
                db.first(OF_SESSION, params, session_variant).await
            })
        })
    }

    fn agent_versions(
        &self,
        agent: String,
        owner: Option<String>,
    ) -> BoxFuture<'_, StoreResult<Vec<VersionRuns>>> {
        self.read(ReadMode::Long, move |db| {
            Box::pin(async move {
                let params = params! {
                    ":agent": &agent, ":owner": owner.as_ref(), ":limit": MAX_VERSIONS,
                };
                db.query(VERSIONS, params, version).await
            })
        })
    }
}

fn changes(id: RolloutId, change: RolloutChange) -> StoreResult<Changes> {
    let of_rollout = values! {":agent": id.agent, ":candidate": id.candidate};
    let with = |more: Vec<NamedValue<'static>>| -> Vec<NamedValue<'static>> {
        of_rollout.iter().cloned().chain(more).collect()
    };
    let start = |at: Timestamp, baseline: &Baseline| -> StoreResult<Vec<NamedValue<'static>>> {
        let baseline = to_json(&StoredBaseline::from(baseline))?;
        let values = values! {":at": at.as_millisecond(), ":baseline": free_text(baseline)};
        Ok(with(values.into()))
    };
    let one = |sql, values| Changes::default().and_vec(sql, values);
    Ok(match change {
        RolloutChange::Start { at, baseline } => one(START, start(at, &baseline)?),
        RolloutChange::Restart { at, baseline } => one(RESTART, start(at, &baseline)?),
        RolloutChange::SetPercent(SetPercent { percent, of_file }) => {
            let values = values! {":percent": percent, ":of_file": of_file};
            one(SET_PERCENT, with(values.into()))
        }
        RolloutChange::Promote(promotion) => {
            let values = values! {
                ":at": promotion.at.as_millisecond(), ":from": promotion.from, ":version": promotion.version,
                ":text": free_text(promotion.text), ":fixed_at": promotion.fixed_at.map(|at| at.as_millisecond()),
            };
            one(PROMOTE, with(values.into()))
        }
        RolloutChange::Fix { at } => one(FIX, with(values! {":at": at.as_millisecond()}.into())),
        RolloutChange::Stop { at, loss, report } => {
            let stop = values! {
                ":run": report.run, ":at": at.as_millisecond(), ":loss": free_text(to_json(&loss)?),
            };
            let changes = STOPPED.changes(report, with(Vec::new()));
            changes.and_vec(STOP, with(stop.into()))
        }
    })
}

fn to_json(value: &impl Serialize) -> StoreResult<String> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Backend(format!("a rollout cannot be written: {error}")))
}

/// JSON has no integers of this size: the sums are texts.
#[derive(Serialize, Deserialize)]
struct StoredBaseline(BTreeMap<String, BTreeMap<String, (u64, String, String)>>);

impl From<&Baseline> for StoredBaseline {
    fn from(baseline: &Baseline) -> Self {
        let moments = |(name, it): (&String, &Moments)| {
            let sums = (it.n, it.sum.to_string(), it.squares.to_string());
            (name.clone(), sums)
        };
        let stored = baseline
            .iter()
            .map(|(version, names)| (version.clone(), names.iter().map(moments).collect()));
        Self(stored.collect())
    }
}

impl From<StoredBaseline> for Baseline {
    fn from(StoredBaseline(stored): StoredBaseline) -> Self {
        let moments = |(name, (n, sum, squares)): (String, (u64, String, String))| {
            let moments = Moments {
                n,
                sum: sum.parse().unwrap_or_default(),
                squares: squares.parse().unwrap_or_default(),
            };
            (name, moments)
        };
        let read = stored
            .into_iter()
            .map(|(version, names)| (version, names.into_iter().map(moments).collect()));
        read.collect()
    }
}

fn record(row: &Row<'_>) -> StoreResult<RolloutRecord> {
    let baseline: Option<StoredBaseline> = row.json("baseline")?;
    let stopped_at: Option<Timestamp> = row.get("stopped_at")?;
    let promoted_at: Option<Timestamp> = row.get("promoted_at")?;
    let percent: Option<u32> = row.get("percent")?;
    let of_file: Option<u32> = row.get("file_percent")?;
    let percent = percent.zip(of_file);
    Ok(RolloutRecord {
        candidate: row.get("candidate")?,
        started_at: row.get("started_at")?,
        baseline: baseline.map_or_else(Baseline::default, Baseline::from),
        percent: percent.map(|(percent, of_file)| SetPercent { percent, of_file }),
        stopped: stopped_at.zip(row.json("loss")?),
        promotion: match promoted_at {
            None => None,
            Some(at) => Some(Promotion {
                at,
                from: row.get("promoted_from")?,
                version: row.get("promoted_version")?,
                text: row.get("promoted_text")?,
                fixed_at: row.get("fixed_at")?,
            }),
        },
    })
}

fn count(row: &Row<'_>) -> StoreResult<Option<VariantRuns>> {
    let (status, n): (&str, u64) = (row.get("status")?, row.get("n")?);
    let is_failed = status == "failed";
    let version = row.get("agent_version")?;
    let variant = run_rows::variant(row, "variant")?;
    Ok(variant.map(|variant| VariantRuns {
        version,
        variant,
        completed: if is_failed { 0 } else { n },
        failed: if is_failed { n } else { 0 },
    }))
}

fn session_variant(row: &Row<'_>) -> StoreResult<SessionVariant> {
    Ok(SessionVariant {
        agent: row.get("agent")?,
        version: row.get("agent_version")?,
        variant: run_rows::variant(row, "variant")?,
        created_at: row.get("created_at")?,
    })
}

fn version(row: &Row<'_>) -> StoreResult<VersionRuns> {
    Ok(VersionRuns {
        version: row.get("agent_version")?,
        runs: row.get("n")?,
        failed: row.get("failed")?,
        first: row.get("first_at")?,
        last: row.get("last_at")?,
    })
}
