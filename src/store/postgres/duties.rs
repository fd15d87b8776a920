//! The contract for duties, by a table with a row for each.

use futures_util::future::BoxFuture;
use uuid::Uuid;

use crate::domain::node::NodeId;
use crate::store::StoreError;
use crate::store::duties::Duties;
use crate::store::postgres::{PostgresStore, rows};
use crate::store::sql::value::params;
use crate::store::write_queue::job::Task;

const HOLDER: &str = "SELECT d.node, n.incarnation IS NOT NULL AS is_alive \
     FROM duties d LEFT JOIN nodes n ON n.incarnation = d.node WHERE d.name = :name";

impl Duties for PostgresStore {
    fn holds_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            let this_node = self.node.get();
            let read = self.readers.read(move |db| {
                Box::pin(async move {
                    let row = db.row(HOLDER, params! {":name": name}).await?;
                    let row = row.ok_or_else(|| rows::damaged(format!("no duty {name}")))?;
                    let holder: Option<Uuid> = rows::get(&row, "node")?;
                    Ok((holder.map(NodeId), rows::get(&row, "is_alive")?))
                })
            });
            let (holder, is_alive) = read.await?;
            match is_alive {
                true => Ok(holder == Some(this_node)),
                false => self.queue.is_positive(Task::TakeDuty(name, holder)).await,
            }
        })
    }

    fn hand_over_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::HandOverDuty(name))
    }
}
