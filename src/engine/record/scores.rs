//! Writes scores of runs whose trees have ended.

use std::borrow::Cow;

use jiff::Timestamp;

use crate::domain::event::EventKind;
use crate::domain::run::{Run, now};
use crate::domain::score::ScoreValue;
use crate::engine::record::webhook_events;
use crate::record::entry::{Entry, RecordedEntry};
use crate::record::event::Origin;
use crate::record::stored::{self, StoredEntries};
use crate::store::StoreError;
use crate::store::run_store::RunStore;
use crate::store::scores::{
    MAX_REPLACEMENTS, NewScore, Score, ScoreChange, ScoreKey, ScoreSeries, Scoring,
};

#[derive(Clone, Debug)]
pub struct ScoreRequest {
    pub name: String,
    pub value: ScoreValue,
    pub comment: Option<String>,
    pub turn: Option<u32>,
    /// `None` without keys.
    pub author: Option<String>,
    /// The scorer whose scoring ends with it.
    pub scorer: Option<String>,
}

/// Commits a score with its event, and the deliveries to the webhooks of a root.
pub async fn add(
    store: &dyn RunStore,
    run: &Run,
    request: ScoreRequest,
) -> Result<ScoreChange, StoreError> {
    let root = match run.parent_id {
        None => Cow::Borrowed(run),
        Some(_) => match store.run(run.root_id).await? {
            Some(root) => Cow::Owned(root),
            None => return Ok(ScoreChange::NotScorable),
        },
    };
    let is_same = |it: &Score| it.name == request.name && it.author == request.author;
    let earlier = store.scores(run.id).await?;
    let earlier = earlier.iter().find(|it| is_same(it));
    if earlier.is_some_and(|it| it.replacements >= MAX_REPLACEMENTS) {
        return Ok(ScoreChange::TooMany);
    }
    let at = now();
    let event = |replaced| EventKind::ScoreAdded {
        name: request.name.clone(),
        value: request.value.clone(),
        author: request.author.clone(),
        comment: request.comment.clone(),
        turn: request.turn,
        replaced,
    };
    let entries = |replaced| encode(at, event(replaced));
    let is_counted = !root.is_marked();
    let mut deliveries = Vec::new();
    if run.parent_id.is_none() && is_counted {
        let webhooks = store.webhooks(run.id).await?;
        let event = Origin::from(run).event(at, event(false));
        let usage = (&run.usage, &run.tree);
        deliveries = webhook_events::deliveries(&webhooks, &[event], run.status, usage);
    }
    let score = NewScore {
        root: root.id,
        scorer: request.scorer,
        at,
        series: is_counted.then(|| ScoreSeries::new(run, &root, &request.name)),
        entries: [entries(false)?, entries(true)?],
        deliveries,
        key: ScoreKey {
            run: run.id,
            name: request.name.clone(),
            author: request.author.clone(),
        },
        value: request.value.clone(),
        comment: request.comment.clone(),
        turn: request.turn,
    };
    store.add_score(score).await
}

/// Ends the scoring of a root run by a scorer that could not score it.
pub async fn fail(
    store: &dyn RunStore,
    scoring: Scoring,
    message: String,
) -> Result<bool, StoreError> {
    let event = EventKind::ScoreFailed {
        name: scoring.scorer.clone(),
        message,
    };
    let (root, entries) = (scoring.run, encode(now(), event)?);
    store.end_scoring(scoring, root, Some(entries)).await
}

/// The record of an event that a run gets after its end.
pub fn encode(time: Timestamp, event: EventKind) -> Result<StoredEntries, StoreError> {
    let entry = RecordedEntry {
        time,
        is_copied: false,
        entry: Entry::Event(event),
    };
    let stored = stored::encode(&[entry]).ok().flatten();
    stored.ok_or_else(|| StoreError::Backend("a score could not be written".to_owned()))
}
