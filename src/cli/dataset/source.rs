//! Where recorded runs are read: a daemon over HTTP, or the data directory of one that does not run. Both give what the HTTP API
//! sends. A data directory is only read: nothing in it is resumed, delivered or removed.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use crate::cli::client::{Client, RunPage};
use crate::cli::runs::conversation;
use crate::domain::run::{RunId, Status, now};
use crate::store::run_store::RunStore;
use crate::store::runs::RunFilter;
use crate::web::evals::recorded_case::{self, RecordedRequest};
use crate::web::response::run::RunView;

pub enum Source {
    Daemon(Client),
    Data(Arc<dyn RunStore>),
}

/// Which root runs are read.
pub struct Wanted<'w> {
    pub agent: &'w str,
    pub status: Status,
    pub since: Option<Timestamp>,
    /// Conditions on scores, by name. Only a daemon knows them.
    pub scores: &'w [(String, String)],
}

impl Source {
    /// A page of runs with whole texts, newest first.
    pub async fn runs(
        &self,
        wanted: &Wanted<'_>,
        limit: usize,
        cursor: Option<&str>,
    ) -> anyhow::Result<RunPage> {
        match self {
            Self::Daemon(client) => Ok(client.list_runs(&wanted.query(), limit, cursor).await?),
            Self::Data(store) => {
                let filter = RunFilter {
                    agent: Some(wanted.agent.to_owned()),
                    status: Some(wanted.status),
                    since: wanted.since,
                    before: cursor.and_then(|cursor| cursor.parse().ok()),
                    limit,
                    ..RunFilter::default()
                };
                let page = store.list(filter).await?;
                let now = now();
                let runs = page.runs.iter();
                let runs = runs.map(|run| serde_json::to_value(RunView::new(run, "", now)));
                Ok(RunPage {
                    data: runs.collect::<Result<_, _>>()?,
                    next_cursor: page.next.map(|id| id.to_string()),
                })
            }
        }
    }

    /// A run of a daemon, with whole texts. The id may be a part of one.
    pub async fn run(&self, id: &str) -> anyhow::Result<Value> {
        match self {
            Self::Daemon(client) => Ok(client.get_run(id, 0).await?),
            Self::Data(_) => anyhow::bail!("--run needs a daemon"),
        }
    }

    /// The request of a run.
    pub async fn recorded(&self, id: RunId) -> anyhow::Result<RecordedRequest> {
        match self {
            Self::Daemon(client) => {
                let id = id.to_string();
                let first = client.get_events(&id, 0, 1).await?.data;
                let pages =
                    conversation::collect(async |after| client.get_messages(&id, after).await);
                Ok(RecordedRequest {
                    fields: first
                        .first()
                        .map_or(Value::Null, |it| it["request"].clone()),
                    messages: pages.await?.data,
                })
            }
            Self::Data(store) => Ok(recorded_case::read(store.as_ref(), id).await?),
        }
    }
}

impl Wanted<'_> {
    fn query(&self) -> Vec<(String, String)> {
        let mut query = vec![
            ("agent".to_owned(), self.agent.to_owned()),
            ("status".to_owned(), self.status.as_str().to_owned()),
            ("full".to_owned(), "true".to_owned()),
        ];
        query.extend(self.since.map(|it| ("since".to_owned(), it.to_string())));
        let scores = self.scores.iter();
        query.extend(scores.map(|(name, condition)| (format!("score.{name}"), condition.clone())));
        query
    }
}
