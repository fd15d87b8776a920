//! Finds the runs that match a filter, newest first, with bounded work. The candidates are the entries of one index that
//! contains all matches; the rows of the candidates are compared with the whole filter.

use futures_util::future::try_join_all;
use uuid::Uuid;

use crate::domain::run::{RunId, Status};
use crate::store::encoding::clock_skew::{ClockSkew, CreatedRange};
use crate::store::encoding::integers::signed;
use crate::store::reader::Reader;
use crate::store::runs::{Matches, RunFilter};
use crate::store::sql::row::{Row, StoreResult};
use crate::store::sql::value::{Value, free_text};

/// Candidates of one search. Beyond it the page ends early, with a cursor.
const MAX_CANDIDATES: usize = 4_096;
/// Candidates that one statement reads, at least and at most.
const MIN_BATCH: usize = 64;
const MAX_BATCH: usize = 1_024;

/// Whether a run `r` matches the filter. Deleted ones do not.
const MATCHES: &str = "(:agent::text IS NULL OR r.agent = :agent) AND (:owner::text IS NULL OR r.owner = :owner) \
     AND (:status::text IS NULL OR r.status = :status) AND (:session::bytea IS NULL OR r.session = :session) \
     AND (:children::boolean OR NOT r.child) \
     AND (:since::bigint IS NULL OR r.created_at >= :since) AND (:until::bigint IS NULL OR r.created_at < :until) \
     AND NOT EXISTS (SELECT 1 FROM unnest(:keys::bytea[], :values::bytea[]) AS wanted (key, value) WHERE NOT EXISTS \
     (SELECT 1 FROM labels l WHERE l.key = wanted.key AND l.value = wanted.value AND l.run = r.id)) \
     AND NOT EXISTS (SELECT 1 FROM deletions d WHERE d.root = r.root)";

pub async fn search(db: &Reader, filter: &RunFilter) -> StoreResult<Matches> {
    let Some(search) = Search::new(db, filter).await? else {
        return Ok(Matches::default());
    };
    match filter.root {
        Some(_) => search.tree(db).await,
        None => search.lists(db, &lists(filter)).await,
    }
}

struct Search<'f> {
    filter: &'f RunFilter,
    times: CreatedRange,
    newest: Uuid,
    oldest: Uuid,
}

impl<'f> Search<'f> {
    /// `None` if no id can match.
    async fn new(db: &Reader, filter: &'f RunFilter) -> StoreResult<Option<Self>> {
        let skew = match (filter.since, filter.until) {
            (None, None) => ClockSkew { lead: 0, lag: 0 },
            _ => clock_skew(db).await?,
        };
        let times = CreatedRange::new(filter.since, filter.until, skew);
        let before = filter.before.map_or(u128::MAX, |id| id.0.as_u128());
        let before = before.min(times.end_id().unwrap_or(u128::MAX));
        let Some(newest) = before.checked_sub(1) else {
            return Ok(None);
        };
        let oldest = times.oldest_id().unwrap_or(0);
        if oldest > newest {
            return Ok(None);
        }
        Ok(Some(Self {
            filter,
            times,
            newest: Uuid::from_u128(newest),
            oldest: Uuid::from_u128(oldest),
        }))
    }

    /// Executes a statement that reads ids up to `newest`, at most `limit`.
    async fn query<T: Send>(
        &self,
        db: &Reader,
        sql: &str,
        (newest, limit): (Uuid, usize),
        read: impl FnMut(&Row<'_>) -> StoreResult<T> + Send,
    ) -> StoreResult<Vec<T>> {
        let filter = self.filter;
        let blobs = |texts: Vec<&'f str>| texts.into_iter().map(str::as_bytes).collect::<Vec<_>>();
        let (keys, values) = filter
            .labels
            .iter()
            .map(|(key, value)| (&**key, &**value))
            .unzip();
        let params: Vec<(&'static str, Value<'_>)> = vec![
            (":newest", newest.into()),
            (":oldest", self.oldest.into()),
            (":limit", signed(limit as u64).into()),
            (":agent", filter.agent.as_ref().into()),
            (":owner", filter.owner.as_ref().into()),
            (
                ":status",
                filter.status.map(|status| status.as_str()).into(),
            ),
            (":session", filter.session.as_deref().map(free_text).into()),
            (
                ":children",
                (filter.include_children || filter.root.is_some()).into(),
            ),
            (":since", self.times.since.into()),
            (":until", self.times.until.into()),
            (":keys", blobs(keys).into()),
            (":values", blobs(values).into()),
            (":scored", filter.scored_names().collect::<Vec<_>>().into()),
            (":root", filter.root.into()),
        ];
        db.query(sql, &params, read).await
    }

    /// Searches one tree. Trees are bounded, so all of it is read.
    async fn tree(&self, db: &Reader) -> StoreResult<Matches> {
        let sql = format!(
            "WITH RECURSIVE tree (id) AS (SELECT :root::uuid UNION ALL SELECT c.id FROM tree JOIN runs c ON c.parent = tree.id) \
             SELECT r.id FROM tree JOIN runs r ON r.id = tree.id WHERE r.id <= :newest AND r.id >= :oldest AND {MATCHES} \
             ORDER BY r.id DESC LIMIT :limit"
        );
        let wanted = self.filter.limit.saturating_add(1);
        let ids = self.query(db, &sql, (self.newest, wanted), |row| row.get("id"));
        let mut matches = Matches {
            ids: ids.await?,
            next: None,
        };
        cut(&mut matches, self.filter.limit);
        Ok(matches)
    }

    /// Reads candidates until there are enough matches.
    async fn lists(&self, db: &Reader, lists: &[String]) -> StoreResult<Matches> {
        let mut matches = Matches::default();
        let mut newest = self.newest;
        let mut read = 0;
        let mut batch = self.filter.limit.clamp(MIN_BATCH, MAX_BATCH - 1) + 1;
        loop {
            let list = match lists {
                [only] => only,
                _ => self.sparsest(db, lists, newest, batch).await?,
            };
            let sql = format!(
                "WITH c AS MATERIALIZED ({list}) SELECT c.id, \
                 EXISTS (SELECT 1 FROM runs r WHERE r.id = c.id AND {MATCHES}) AS is_match FROM c ORDER BY c.id DESC"
            );
            let candidate = |row: &Row<'_>| Ok((row.get("id")?, row.get("is_match")?));
            let found: Vec<(RunId, bool)> =
                self.query(db, &sql, (newest, batch), candidate).await?;
            for (id, is_match) in &found {
                if *is_match {
                    matches.ids.push(*id);
                }
                matches.next = Some(*id);
            }
            read += found.len();
            if found.len() < batch {
                matches.next = None;
            }
            if matches.ids.len() > self.filter.limit || read >= MAX_CANDIDATES {
                cut(&mut matches, self.filter.limit);
                return Ok(matches);
            }
            let Some(last) = matches.next.and_then(|id| id.0.as_u128().checked_sub(1)) else {
                return Ok(matches);
            };
            newest = Uuid::from_u128(last);
            batch = (batch * 4).min(MAX_BATCH);
        }
    }

    /// The list whose next entries reach the oldest id, or that has the fewest if it ends before.
    async fn sparsest<'l>(
        &self,
        db: &Reader,
        lists: &'l [String],
        newest: Uuid,
        batch: usize,
    ) -> StoreResult<&'l String> {
        let reaches = lists.iter().map(async |list| {
            let sql = format!(
                "WITH c AS MATERIALIZED ({list}) \
                 SELECT count(*) AS entries, (SELECT id FROM c ORDER BY id LIMIT 1) AS oldest FROM c"
            );
            let reach = |row: &Row<'_>| Ok((row.get("entries")?, row.get("oldest")?));
            let found = self.query(db, &sql, (newest, batch), reach).await?;
            let (entries, oldest): (i64, Option<Uuid>) = found.first().copied().unwrap_or_default();
            let ends = entries < signed(batch as u64);
            StoreResult::Ok(match ends {
                true => (entries, None, list),
                false => (entries, oldest, list),
            })
        });
        let reaches = try_join_all(reaches).await?;
        let sparsest = reaches
            .into_iter()
            .min_by_key(|(entries, oldest, _)| (*entries, *oldest));
        Ok(sparsest.map_or(&lists[0], |(.., list)| list))
    }
}

/// Removes ids beyond the limit, after which the search continues.
fn cut(matches: &mut Matches, limit: usize) {
    if matches.ids.len() > limit {
        matches.ids.truncate(limit);
        matches.next = matches.ids.last().copied();
    }
}

async fn clock_skew(db: &Reader) -> StoreResult<ClockSkew> {
    let skew = |row: &Row<'_>| {
        Ok(ClockSkew {
            lead: row.get("lead")?,
            lag: row.get("lag")?,
        })
    };
    let found = db.first("SELECT lead, lag FROM clock", &[], skew).await?;
    Ok(found.unwrap_or(ClockSkew { lead: 0, lag: 0 }))
}

/// Statements that select ids from one index. Each list has all runs that match.
fn lists(filter: &RunFilter) -> Vec<String> {
    let mut lists: Vec<String> = (1..=filter.labels.len()).map(label_list).collect();
    lists.extend((1..=filter.scored_names().count()).map(score_list));
    if filter.session.is_some() {
        lists.push(session_list(filter));
    }
    if filter.agent.is_some() {
        lists.push(state_list(filter, Some(("agent", ":agent"))));
    }
    if filter.owner.is_some() {
        lists.push(state_list(filter, Some(("owner", ":owner"))));
    }
    let is_global = filter.agent.is_none() && filter.owner.is_none();
    if lists.is_empty() || is_global && filter.status.is_some() {
        lists.push(state_list(filter, None));
    }
    lists.dedup();
    lists
}

/// The entries of an index whose first columns have these values, from the newest. The columns are compared as one: with a
/// condition for each the server may read all runs in the order of their ids instead, of which hardly any may match.
fn entries(columns: &[(&str, &str)]) -> String {
    let join = |parts: Vec<String>| parts.join(", ");
    let names = columns.iter().map(|(name, _)| format!("e.{name}"));
    let names: Vec<String> = names.chain(["e.id".to_owned()]).collect();
    let values = join(
        columns
            .iter()
            .map(|(_, value)| (*value).to_owned())
            .collect(),
    );
    let order = join(names.iter().map(|name| format!("{name} DESC")).collect());
    let names = join(names);
    format!(
        "({names}) <= ({values}, :newest) AND ({names}) >= ({values}, :oldest) ORDER BY {order} LIMIT :limit"
    )
}

/// The runs with the label at this position, from 1.
fn label_list(position: usize) -> String {
    format!(
        "SELECT e.run AS id FROM labels e WHERE e.key = (:keys::bytea[])[{position}] AND e.value = (:values::bytea[])[{position}] \
         AND e.run <= :newest AND e.run >= :oldest ORDER BY e.run DESC LIMIT :limit"
    )
}

/// The runs that have the score at this position, from 1.
fn score_list(position: usize) -> String {
    format!(
        "SELECT e.run AS id FROM scores e WHERE e.name = (:scored::text[])[{position}] AND e.run <= :newest AND e.run >= :oldest \
         GROUP BY e.run ORDER BY e.run DESC LIMIT :limit"
    )
}

/// The runs of the sessions with the name, of one owner or all.
fn session_list(filter: &RunFilter) -> String {
    let entries = match filter.owner {
        Some(_) => entries(&[("owner", ":owner"), ("session", ":session")]),
        None => entries(&[("session", ":session")]),
    };
    format!("SELECT e.id FROM runs e WHERE e.session IS NOT NULL AND {entries}")
}

/// The runs with the status, or with any, of an agent or owner (a column and its value). Of unfinished runs, those of all
/// agents and owners.
fn state_list(filter: &RunFilter, scope: Option<(&str, &str)>) -> String {
    let mut branches = Vec::new();
    let children: &[&str] = match filter.include_children {
        true => &["false", "true"],
        false => &["false"],
    };
    let scope_is_set = scope.map_or(String::new(), |(column, _)| {
        format!("AND e.{column} IS NOT NULL ")
    });
    for status in Status::ALL.into_iter().filter(|it| it.is_terminal()) {
        if filter.status.is_some_and(|wanted| wanted != status) {
            continue;
        }
        let status = format!("'{}'", status.as_str());
        branches.extend(children.iter().map(|child| {
            let mut columns: Vec<(&str, &str)> = scope.into_iter().collect();
            columns.extend([("status", &*status), ("child", *child)]);
            format!(
                "(SELECT e.id FROM runs e WHERE e.finished_at IS NOT NULL {scope_is_set}AND {})",
                entries(&columns)
            )
        }));
    }
    if filter.status.is_none_or(|status| !status.is_terminal()) {
        branches.push(
            "(SELECT e.id FROM runs e WHERE e.finished_at IS NULL AND e.id <= :newest AND e.id >= :oldest \
             ORDER BY e.id DESC LIMIT :limit)"
                .to_owned(),
        );
    }
    format!(
        "SELECT b.id FROM ({}) b ORDER BY b.id DESC LIMIT :limit",
        branches.join(" UNION ALL ")
    )
}
