//! The contract for scores of runs. A score is committed with its event, and with what it adds to the sums
//! of the day.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::domain::run::{Run, RunId};
use crate::domain::score::{RunScores, ScoreNumber, ScoreValue};
use crate::domain::variant::Variant;
use crate::domain::webhook::Webhook;
use crate::record::stored::StoredEntries;
use crate::store::NewDelivery;
use crate::store::changes::Changes;
use crate::store::encoding::integers::signed;
use crate::store::encoding::run_values;
use crate::store::engine::Engine;
use crate::store::late_events::{
    LOCK, delivery_values, entry_values, insert_late_delivery, insert_late_entry, set_last_event,
};
use crate::store::reader::ReadMode;
use crate::store::sql::row::{Column, Row, StoreResult};
use crate::store::sql::value::{NamedValue, free_text, params, values};
use crate::store::usage::OTHER;

/// Scores of one run.
pub const MAX_RUN_SCORES: u32 = 1_000;
/// How often a score is replaced: each time adds an event to the record, and a feedback link needs no key.
pub const MAX_REPLACEMENTS: u32 = 1_000;
/// Different agents, versions, labels and names under which the scores of one key are summed; later ones count as [`OTHER`].
const MAX_SERIES: u32 = 10_000;

pub trait ScoreRecords: Send + Sync + 'static {
    /// Adds a score, or replaces that of the same author and name.
    fn add_score(&self, score: NewScore) -> BoxFuture<'_, StoreResult<ScoreChange>>;

    /// Ends a scoring without a score, and adds these entries; false if it had ended before.
    fn end_scoring(
        &self,
        scoring: Scoring,
        root: RunId,
        entries: Option<StoredEntries>,
    ) -> BoxFuture<'_, StoreResult<bool>>;

    /// What scorers have still to do, at most `limit`, after this one.
    fn scorings(
        &self,
        after: Option<Scoring>,
        limit: usize,
    ) -> BoxFuture<'_, StoreResult<Vec<Scoring>>>;

    /// Removes a score, from the sums too; false if there is none.
    fn delete_score(&self, key: ScoreKey) -> BoxFuture<'_, StoreResult<bool>>;

    /// The scores of a run, by name, then by author.
    fn scores(&self, run: RunId) -> BoxFuture<'_, StoreResult<Vec<Score>>>;

    /// The webhooks that a root run was accepted with.
    fn webhooks(&self, root: RunId) -> BoxFuture<'_, StoreResult<Vec<Arc<Webhook>>>>;
}

/// A run has one score of each name and author.
#[derive(Clone, Debug)]
pub struct ScoreKey {
    pub run: RunId,
    pub name: String,
    /// `None` without keys.
    pub author: Option<String>,
}

/// A run that a scorer of its agent has still to score.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scoring {
    pub run: RunId,
    /// The name of the scorer.
    pub scorer: String,
}

#[derive(Clone, Debug)]
pub struct NewScore {
    pub key: ScoreKey,
    /// The name of the scorer, whose scoring ends with it; without one nothing is added. `None` of other scores.
    pub scorer: Option<String>,
    pub root: RunId,
    pub value: ScoreValue,
    pub comment: Option<String>,
    pub turn: Option<u32>,
    pub at: Timestamp,
    /// What it is summed under; `None` if it is not counted.
    pub series: Option<ScoreSeries>,
    /// The entry of a new score, and of one that replaces another.
    pub entries: [StoredEntries; 2],
    pub deliveries: Vec<NewDelivery>,
}

/// What scores are summed under.
#[derive(Clone, Debug)]
pub struct ScoreSeries {
    owner: String,
    agent: String,
    version: String,
    /// Of a root run of an agent with a rollout.
    variant: String,
    /// As in the rows of runs.
    labels: String,
    name: String,
}

impl ScoreSeries {
    pub fn new(run: &Run, root: &Run, name: &str) -> Self {
        Self {
            owner: run.owner.clone().unwrap_or_default(),
            agent: run.agent.clone(),
            version: run.agent_version.clone(),
            variant: run.variant.map_or("", Variant::as_str).to_owned(),
            labels: run_values::labels_value(&root.labels).unwrap_or_default(),
            name: name.to_owned(),
        }
    }

    /// Where those above the limit are summed.
    fn other(&self) -> Self {
        Self {
            version: String::new(),
            variant: String::new(),
            labels: String::new(),
            name: OTHER.to_owned(),
            ..self.clone()
        }
    }

    fn id(&self) -> Uuid {
        let Self {
            owner,
            agent,
            version,
            variant,
            labels,
            name,
        } = self;
        let mut hash = Sha256::new();
        for text in [owner, agent, version, variant, labels, name] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hash.finalize()[..16]);
        Uuid::from_bytes(id)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreChange {
    Added,
    Replaced,
    /// The run has [`MAX_RUN_SCORES`] others, or the score was replaced [`MAX_REPLACEMENTS`] times.
    TooMany,
    /// The run does not exist, or its tree has not ended.
    NotScorable,
}

#[derive(Clone, Debug)]
pub struct Score {
    pub name: String,
    pub author: Option<String>,
    pub value: ScoreValue,
    pub comment: Option<String>,
    pub turn: Option<u32>,
    pub at: Timestamp,
    /// How often it was replaced.
    pub replacements: u32,
}

/// Whether the run of a score exists, nothing is written to its tree any more, and its scoring has not ended.
macro_rules! is_scorable {
    () => {
        "EXISTS (SELECT 1 FROM runs r JOIN runs o ON o.id = r.root WHERE r.id = :run AND r.finished_at IS NOT NULL \
         AND o.finished_at IS NOT NULL {|AND NOT EXISTS (SELECT 1 FROM trees t WHERE t.root = r.root) }\
         AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)) AND (:scorer::text IS NULL \
         OR EXISTS (SELECT 1 FROM scorings g WHERE g.run = :run AND g.scorer = :scorer))"
    };
}

macro_rules! of_score {
    () => {
        "s.run = :run AND s.name = :name AND s.author = :author"
    };
}

/// Adds a score to the sums, or takes it out of them. A number in billionths is summed in parts of six digits, so that no sum of
/// products overflows: the number is `a * 10^12 + b * 10^6 + c`.
macro_rules! sum {
    ($sign:literal, $condition:expr) => {
        concat!(
            "INSERT INTO score_sums (day, series, label, n, sum_2, sum_1, sum_0, square_4, square_3, square_2, square_1, square_0) \
             SELECT p.day, p.series, p.label, ", $sign, ", ", $sign, " * a, ", $sign, " * b, ", $sign, " * c, ",
            $sign, " * a * a, ", $sign, " * 2 * a * b, ", $sign, " * (2 * a * c + b * b), ", $sign, " * 2 * b * c, ", $sign, " * c * c \
             FROM (SELECT s.day, s.series, coalesce(s.label, '') AS label, coalesce(s.value, 0) / 1000000000000 AS a, \
             coalesce(s.value, 0) / 1000000 % 1000000 AS b, coalesce(s.value, 0) % 1000000 AS c \
             FROM scores s WHERE ", of_score!(), " AND s.series IS NOT NULL) p WHERE ", $condition,
            " ON CONFLICT (day, series, label) DO UPDATE SET n = score_sums.n + excluded.n, \
             sum_2 = score_sums.sum_2 + excluded.sum_2, sum_1 = score_sums.sum_1 + excluded.sum_1, \
             sum_0 = score_sums.sum_0 + excluded.sum_0, square_4 = score_sums.square_4 + excluded.square_4, \
             square_3 = score_sums.square_3 + excluded.square_3, square_2 = score_sums.square_2 + excluded.square_2, \
             square_1 = score_sums.square_1 + excluded.square_1, square_0 = score_sums.square_0 + excluded.square_0"
        )
    };
}

const ADD_TO_SUMS: &str = sum!("1", is_scorable!());
/// Unless the sums were removed meanwhile.
const TAKE_FROM_SUMS: &str = sum!(
    "-1",
    concat!(
        is_scorable!(),
        " AND EXISTS (SELECT 1 FROM score_sums t WHERE t.day = p.day AND t.series = p.series AND t.label = p.label)"
    )
);
const INSERT_SERIES: &str = "INSERT INTO score_series (id, owner, agent, version, variant, labels, name) \
     SELECT :series, :owner, :agent, :version, :variant, :labels, :name WHERE NOT EXISTS (SELECT 1 FROM score_series k WHERE k.id = :series) \
     AND (SELECT count(*) FROM score_series k WHERE k.owner = :owner) < :max ON CONFLICT (id) DO NOTHING";
const INSERT_OTHER_SERIES: &str = "INSERT INTO score_series (id, owner, agent, version, variant, labels, name) \
     SELECT :other, :owner, :agent, :version, :variant, :labels, :name WHERE NOT EXISTS (SELECT 1 FROM score_series k WHERE k.id = :series) \
     ON CONFLICT (id) DO NOTHING";
const UPSERT: &str = concat!(
    "INSERT INTO scores (run, name, author, value, label, comment, turn, at, revision, day, series) \
     SELECT :run, :name, :author, :value, :label, :comment, :turn, :at, 0, o.created_at / 86400000, \
     coalesce((SELECT k.id FROM score_series k WHERE k.id = :series), :other) FROM runs o WHERE o.id = :root AND ",
    is_scorable!(),
    " AND ((SELECT count(*) FROM scores s WHERE s.run = :run) < :max OR EXISTS (SELECT 1 FROM scores s WHERE ",
    of_score!(),
    ")) ON CONFLICT (run, name, author) DO UPDATE SET value = excluded.value, label = excluded.label, comment = excluded.comment, \
     turn = excluded.turn, at = excluded.at, revision = scores.revision + 1, series = excluded.series"
);
macro_rules! insert_entry {
    ($revision:literal) => {
        insert_late_entry!(
            "FROM scores s WHERE ",
            of_score!(),
            " AND s.revision ",
            $revision,
            " AND ",
            is_scorable!()
        )
    };
}
const INSERT_ENTRY: &str = insert_entry!("= 0");
const INSERT_REPLACING_ENTRY: &str = insert_entry!("> 0");
const SET_LAST_EVENT: &str = set_last_event!(is_scorable!());
const INSERT_DELIVERY: &str = insert_late_delivery!(is_scorable!());
const END_SCORING: &str = "DELETE FROM scorings WHERE run = :run AND scorer = :scorer";
const SCORINGS: &str = "SELECT run, scorer FROM scorings WHERE (run, scorer) > (:run, :scorer) ORDER BY run, scorer LIMIT :limit";
/// The entry of a scoring that failed.
const INSERT_FAILURE: &str = insert_late_entry!(
    "FROM scorings s WHERE s.run = :run AND s.scorer = :scorer AND ",
    is_scorable!()
);
const DELETE: &str = "DELETE FROM scores WHERE run = :run AND name = :name AND author = :author";
const LIST: &str = "SELECT name, author, value, label, comment, turn, at, revision FROM scores WHERE run = :run ORDER BY name, author";
const WEBHOOKS: &str = "SELECT webhook FROM runs WHERE id = :root";
impl<E: Engine> ScoreRecords for E {
    fn add_score(&self, score: NewScore) -> BoxFuture<'_, StoreResult<ScoreChange>> {
        let added = self.commit(add(score));
        Box::pin(async move {
            let rows = added.await?;
            let is_changed = |from_last: usize| {
                rows.len()
                    .checked_sub(from_last)
                    .is_some_and(|at| rows[at] > 0)
            };
            Ok(match () {
                () if is_changed(4) => ScoreChange::Added,
                () if is_changed(3) => ScoreChange::Replaced,
                () if is_changed(2) => ScoreChange::TooMany,
                () => ScoreChange::NotScorable,
            })
        })
    }

    fn end_scoring(
        &self,
        scoring: Scoring,
        root: RunId,
        entries: Option<StoredEntries>,
    ) -> BoxFuture<'_, StoreResult<bool>> {
        let of_scoring = values! {":run": scoring.run, ":scorer": scoring.scorer};
        let mut changes = Changes::one(LOCK, values! {":root": root}).of_tree(root);
        if let Some(entries) = entries {
            let mut entry = of_scoring.to_vec();
            entry.extend(entry_values(root, entries));
            let mut last = of_scoring.to_vec();
            last.extend(values! {":root": root});
            changes = changes
                .and_vec(INSERT_FAILURE, entry)
                .and_vec(SET_LAST_EVENT, last);
        }
        let changes = changes.and(END_SCORING, of_scoring);
        let last = changes.statements.len() - 1;
        self.changes_row(changes, last)
    }

    fn scorings(
        &self,
        after: Option<Scoring>,
        limit: usize,
    ) -> BoxFuture<'_, StoreResult<Vec<Scoring>>> {
        let (run, scorer) = after.map_or((Uuid::nil(), String::new()), |it| (it.run.0, it.scorer));
        let scoring = |row: &Row<'_>| {
            Ok(Scoring {
                run: row.get("run")?,
                scorer: row.get("scorer")?,
            })
        };
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let params =
                    params! {":run": run, ":scorer": scorer, ":limit": signed(limit as u64)};
                db.query(SCORINGS, params, scoring).await
            })
        })
    }

    fn delete_score(&self, key: ScoreKey) -> BoxFuture<'_, StoreResult<bool>> {
        let of_score = key_values(&key, None);
        let changes = Changes::one(TAKE_FROM_SUMS, of_score.clone()).and(DELETE, of_score);
        self.changes_row(changes, 1)
    }

    fn scores(&self, run: RunId) -> BoxFuture<'_, StoreResult<Vec<Score>>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { db.query(LIST, params! {":run": run}, score).await })
        })
    }

    fn webhooks(&self, root: RunId) -> BoxFuture<'_, StoreResult<Vec<Arc<Webhook>>>> {
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move {
                let webhooks = |row: &Row<'_>| row.json("webhook");
                let found = db
                    .first(WEBHOOKS, params! {":root": root}, webhooks)
                    .await?;
                Ok(found.flatten().unwrap_or_default())
            })
        })
    }
}

fn key_values(key: &ScoreKey, scorer: Option<&String>) -> [NamedValue<'static>; 4] {
    values! {
        ":scorer": scorer.cloned(),
        ":run": key.run,
        ":name": key.name.clone(),
        ":author": key.author.clone().unwrap_or_default(),
    }
}

/// The statements before the last one show what became of it: they add the entry of a new score, or of one that replaces another, and
/// set the last event of a run that can have scores.
fn add(score: NewScore) -> Changes {
    let root = score.root;
    let key = key_values(&score.key, score.scorer.as_ref());
    let mut changes = Changes::one(LOCK, values! {":root": root})
        .of_tree(root)
        .and(TAKE_FROM_SUMS, key.clone());
    let ids = score.series.as_ref().map(|it| (it.id(), it.other().id()));
    if let Some(series) = score.series {
        let other = series.other();
        changes = changes
            .and(INSERT_SERIES, series_values(series, ids))
            .and(INSERT_OTHER_SERIES, series_values(other, ids));
    }
    let (number, label) = match score.value {
        ScoreValue::Number(number) => (Some(number.steps), None),
        ScoreValue::Label(label) => (None, Some(label)),
    };
    let mut upsert = key.to_vec();
    upsert.extend(values! {
        ":root": root,
        ":value": number,
        ":label": label,
        ":comment": score.comment.map(free_text),
        ":turn": score.turn,
        ":at": score.at.as_millisecond(),
        ":series": ids.map(|(series, _)| series),
        ":other": ids.map(|(_, other)| other),
        ":max": MAX_RUN_SCORES,
    });
    changes = changes
        .and_vec(UPSERT, upsert)
        .and(ADD_TO_SUMS, key.clone());
    let has_deliveries = !score.deliveries.is_empty();
    for delivery in score.deliveries {
        let mut values = key.to_vec();
        values.extend(delivery_values(delivery));
        changes = changes.and_vec(INSERT_DELIVERY, values);
    }
    let entry = |entry: StoredEntries| {
        let mut values = key.to_vec();
        values.extend(entry_values(root, entry));
        values
    };
    let mut last = key.to_vec();
    last.extend(values! {":root": root});
    let [new, replacing] = score.entries;
    let changes = changes
        .and_vec(INSERT_ENTRY, entry(new))
        .and_vec(INSERT_REPLACING_ENTRY, entry(replacing))
        .and_vec(SET_LAST_EVENT, last)
        .and(END_SCORING, key);
    match has_deliveries {
        true => changes.with_deliveries(),
        false => changes,
    }
}

fn series_values(series: ScoreSeries, ids: Option<(Uuid, Uuid)>) -> [NamedValue<'static>; 9] {
    values! {
        ":series": ids.map(|(series, _)| series),
        ":other": ids.map(|(_, other)| other),
        ":owner": series.owner,
        ":agent": series.agent,
        ":version": series.version,
        ":variant": series.variant,
        ":labels": series.labels,
        ":name": series.name,
        ":max": MAX_SERIES,
    }
}

fn score(row: &Row<'_>) -> StoreResult<Score> {
    let author: String = row.get("author")?;
    Ok(Score {
        name: row.get("name")?,
        author: Some(author).filter(|author| !author.is_empty()),
        value: value(row.get("value")?, row.get("label")?),
        comment: row.get("comment")?,
        turn: row.get("turn")?,
        at: row.get("at")?,
        replacements: row.get("revision")?,
    })
}

fn value(steps: Option<i64>, label: Option<String>) -> ScoreValue {
    match label {
        Some(label) => ScoreValue::Label(label),
        None => ScoreValue::Number(ScoreNumber {
            steps: steps.unwrap_or_default(),
        }),
    }
}

/// The scores of a run `r` as JSON, for [`run_scores`].
macro_rules! scores_of_run {
    () => {
        "(SELECT {nullif(json_group_array(json_array(s.name, s.value, s.label)), '[]')\
         |json_agg(json_build_array(s.name, s.value, s.label))::text} FROM scores s WHERE s.run = r.id)"
    };
}
pub(crate) use scores_of_run;

/// The name, the number and the label of a score.
type ScoreJson = (String, Option<i64>, Option<String>);

pub fn run_scores(row: &Row<'_>, column: impl Into<Column>) -> StoreResult<RunScores> {
    let scores: Option<Vec<ScoreJson>> = row.json(column)?;
    let mut found = RunScores::new();
    for (name, steps, label) in scores.unwrap_or_default() {
        found.entry(name).or_default().add(value(steps, label));
    }
    Ok(found)
}
