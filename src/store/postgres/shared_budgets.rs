//! The contract for budgets that several nodes charge.

use futures_util::future::BoxFuture;

use crate::store::StoreError;
use crate::store::engine::Engine;
use crate::store::postgres::PostgresStore;
use crate::store::reader::ReadMode;
use crate::store::usage::{BudgetPeriod, BudgetUsage, SharedBudgets};
use crate::store::usage_queries::budget_usage;
use crate::store::write_queue::job::Task;

impl SharedBudgets for PostgresStore {
    fn budget_usage_of_others(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        let own = Some(self.budget_writer);
        self.read(ReadMode::Statement, move |db| {
            Box::pin(async move { budget_usage(db, &budget, period, own).await })
        })
    }

    fn settle_charges(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        // The writer does its jobs in their order.
        self.queue.execute(Task::Check)
    }
}
