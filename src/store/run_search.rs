//! Searches runs by what no index contains: their texts, errors, costs and the means of their scores. The rest of the filter finds candidates, whose rows are
//! compared for a limited time.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::domain::run::{Run, RunId, Status};
use crate::domain::search_text::SearchText;
use crate::store::encoding::integers::signed;
use crate::store::engine::Engine;
use crate::store::reader::{ReadMode, Reader};
use crate::store::run_lists::{self, WITHIN_BYTES};
use crate::store::run_rows::{self, ComparedRow};
use crate::store::runs::{Matches, PAGE_BYTES, RunFilter, RunPage};
use crate::store::sql::dialect::Texts;
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::params;

/// How long a search takes for a first page, and for one with a cursor, of which a client may request many.
const FIRST_PAGE_TIME: Duration = Duration::from_millis(200);
const NEXT_PAGE_TIME: Duration = Duration::from_millis(600);
/// Bytes of texts that are compared for a page.
const MAX_COMPARED_BYTES: usize = 64 << 20;
/// How long one read takes. Then other searches, and other reads, have their turn.
const READ_TIME: Duration = Duration::from_millis(40);
/// Candidates that are found at once, at first and at most.
const MIN_CANDIDATES: usize = 64;
const MAX_CANDIDATES: usize = 1_000;

static ROW: LazyLock<Texts> = LazyLock::new(|| run_rows::select_compared("r.id = :id"));
static ROWS: LazyLock<Texts> =
    LazyLock::new(|| run_rows::select_compared(&format!("{WITHIN_BYTES} ORDER BY r.id DESC")));

/// A page of runs, newest first.
pub async fn list<E: Engine>(engine: &E, mut filter: RunFilter) -> StoreResult<RunPage> {
    let is_failure = |status| status == Status::Failed;
    if filter.error_code.is_some() && !filter.status.is_none_or(is_failure) {
        return Ok(RunPage::default());
    }
    if let Some(id) = filter.text.as_ref().and_then(SearchText::whole_id) {
        return one(engine, filter, id).await;
    }
    let time = match filter.before {
        None => FIRST_PAGE_TIME,
        Some(_) => NEXT_PAGE_TIME,
    };
    let end = Instant::now() + time;
    let mut page = RunPage::default();
    let mut compared_bytes = 0;
    while filter.limit > 0 {
        let part = search(engine, filter.clone()).await?;
        compared_bytes += part.compared_bytes;
        filter.limit -= part.page.runs.len();
        filter.before = part.page.next;
        page.runs.extend(part.page.runs);
        page.next = part.page.next;
        let bytes = page.runs.iter().map(Run::text_bytes).sum::<usize>();
        if page.next.is_none()
            || Instant::now() >= end
            || compared_bytes >= MAX_COMPARED_BYTES
            || bytes >= PAGE_BYTES
        {
            break;
        }
    }
    Ok(page)
}

/// The run with this id, if it matches the filter.
async fn one<E: Engine>(engine: &E, mut filter: RunFilter, id: RunId) -> StoreResult<RunPage> {
    if filter.limit == 0 || filter.before.is_some_and(|before| before <= id) {
        return Ok(RunPage::default());
    }
    // The first candidate is this run, or there is none.
    filter.before =
        id.0.as_u128()
            .checked_add(1)
            .map(|next| RunId(Uuid::from_u128(next)));
    filter.limit = 1;
    filter.include_children = true;
    let mut page = search(engine, filter).await?.page;
    page.runs.retain(|run| run.id == id);
    page.next = None;
    Ok(page)
}

/// A page, and the size of the texts that were compared for it.
struct SearchedPart {
    page: RunPage,
    compared_bytes: usize,
}

async fn search<E: Engine>(engine: &E, filter: RunFilter) -> StoreResult<SearchedPart> {
    engine
        .read_list(ReadMode::Long, move |db| {
            Box::pin(async move { read(db, &filter).await })
        })
        .await
}

/// Compares candidates until there are enough matches, or the time is over.
async fn read(db: &Reader, filter: &RunFilter) -> StoreResult<SearchedPart> {
    let end = Instant::now() + READ_TIME;
    let mut candidates = filter.clone();
    candidates.limit = MIN_CANDIDATES;
    if filter.error_code.is_some() {
        candidates.status = Some(Status::Failed);
    }
    let mut matches = Matches::default();
    let mut compared_bytes = 0;
    'search: loop {
        let found = run_lists::find(db, &candidates).await?;
        matches.next = found.next;
        let mut remaining = &found.ids[..];
        while !remaining.is_empty() {
            let compared = compare(db, filter, remaining).await?;
            let Some(last) = compared.last().map(|row| row.id) else {
                // They were deleted.
                break;
            };
            remaining = &remaining[remaining.partition_point(|id| *id >= last)..];
            let continues_at = |id| (found.ids.last() != Some(&id)).then_some(id).or(found.next);
            for row in compared {
                compared_bytes += row.bytes;
                if !row.is_match {
                    continue;
                }
                matches.ids.push(row.id);
                if matches.ids.len() == filter.limit {
                    matches.next = continues_at(row.id);
                    break 'search;
                }
            }
            if Instant::now() >= end {
                matches.next = continues_at(last);
                break 'search;
            }
        }
        if matches.next.is_none() || Instant::now() >= end {
            break;
        }
        candidates.before = matches.next;
        candidates.limit = (candidates.limit * 4).min(MAX_CANDIDATES);
    }
    let mut page = run_lists::load(db, filter, matches).await?;
    // The cost of a run that has not ended is known now.
    page.runs
        .retain(|run| filter.includes_cost(run.tree.usage.cost));
    Ok(SearchedPart {
        page,
        compared_bytes,
    })
}

/// A candidate that was compared.
struct Comparison {
    id: RunId,
    is_match: bool,
    /// Of its texts.
    bytes: usize,
}

/// Compares the first of these runs, until their texts have [`PAGE_BYTES`]. Deleted ones are left out.
async fn compare(db: &Reader, filter: &RunFilter, ids: &[RunId]) -> StoreResult<Vec<Comparison>> {
    let (reads_texts, reads_scores) = (filter.text.is_some(), !filter.scores.is_empty());
    let left_out = |id| Comparison {
        id,
        is_match: false,
        bytes: 0,
    };
    let read = |row: &Row<'_>| {
        let id = row.get("id")?;
        match run_rows::compared_row(row) {
            Ok(row) => Ok(matched(filter, &row)),
            Err(error) if db.leaves_out(&error) => Ok(left_out(id)),
            Err(error) => Err(error),
        }
    };
    match db {
        // One by one: SQLite may be unable to read one of them.
        Reader::Sqlite(_) => {
            let params =
                params! {":id": ids[0], ":reads_texts": reads_texts, ":reads_scores": reads_scores};
            match db.first(ROW.of(db.dialect()), params, read).await {
                Ok(row) => Ok(vec![row.unwrap_or_else(|| left_out(ids[0]))]),
                Err(error) if db.leaves_out(&error) => Ok(vec![left_out(ids[0])]),
                Err(error) => Err(error),
            }
        }
        Reader::Postgres(_) => {
            let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
            let params = params! {
                ":ids": ids, ":bytes": signed(PAGE_BYTES as u64), ":reads_texts": reads_texts, ":reads_scores": reads_scores,
            };
            db.query(ROWS.of(db.dialect()), params, read).await
        }
    }
}

fn matched(filter: &RunFilter, row: &ComparedRow<'_>) -> Comparison {
    let has_text = |text: &SearchText| {
        text.is_part_of(row.id) || row.texts.iter().any(|bytes| text.is_in(bytes))
    };
    let error_code = row.error.as_ref().map(|error| error.code);
    let has_code = filter.error_code.is_none() || error_code == filter.error_code;
    let has_variant = filter.variant.is_none() || row.variant == filter.variant;
    let may_cost = |cost| filter.includes_cost(cost);
    Comparison {
        id: row.id,
        is_match: has_code
            && has_variant
            && filter.scores.iter().all(|it| it.includes(&row.scores))
            && row.final_cost.is_none_or(may_cost)
            && filter.text.as_ref().is_none_or(has_text),
        bytes: row.texts.iter().map(|text| text.len()).sum(),
    }
}
