//! The contract for duties, by a table with a row for each.

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::store::StoreError;
use crate::store::changes::Changes;
use crate::store::duties::Duties;
use crate::store::engine::Engine;
use crate::store::postgres::PostgresStore;
use crate::store::reader::ReadMode;
use crate::store::sql::row::{Row, damaged};
use crate::store::sql::value::{params, values};

const HOLDER: &str = "SELECT d.node, n.incarnation IS NOT NULL AS is_alive \
     FROM duties d LEFT JOIN nodes n ON n.incarnation = d.node WHERE d.name = :name";
const TAKE: &str =
    "UPDATE duties SET node = :node WHERE name = :name AND node IS NOT DISTINCT FROM :holder";
const HAND_OVER: &str = "UPDATE duties SET node = NULL WHERE name = :name AND node = :node \
     AND EXISTS (SELECT 1 FROM nodes n WHERE n.incarnation <> :node)";

impl Duties for PostgresStore {
    fn holds_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            let node = self.writer_id();
            let read = self.read(ReadMode::Statement, move |db| {
                Box::pin(async move {
                    let holder = |row: &Row<'_>| Ok((row.get("node")?, row.get("is_alive")?));
                    db.first(HOLDER, params! {":name": name}, holder).await
                })
            });
            let found = read.await?;
            let (holder, is_alive): (Option<Uuid>, bool) =
                found.ok_or_else(|| damaged(format_args!("no duty {name}")))?;
            if is_alive {
                return Ok(holder == Some(node));
            }
            let take = values! {":name": name, ":node": node, ":holder": holder};
            self.changes_row(Changes::one(TAKE, take), 0).await
        })
    }

    fn hand_over_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>> {
        let of_duty = values! {":name": name, ":node": self.writer_id()};
        self.changes_row(Changes::one(HAND_OVER, of_duty), 0)
    }
}
