//! The contract for sessions, and for budgets that several nodes charge.

use futures_util::future::BoxFuture;

use crate::store::StoreError;
use crate::store::postgres::{PostgresStore, sessions};
use crate::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use crate::store::usage::{BudgetPeriod, BudgetUsage, SharedBudgets, budget_usage};
use crate::store::write_queue::job::Task;

impl SessionIndex for PostgresStore {
    fn sessions(&self, query: SessionListQuery) -> BoxFuture<'_, Result<SessionPage, StoreError>> {
        Box::pin(
            self.readers
                .read_long(move |db| Box::pin(async move { sessions::list(db, &query).await })),
        )
    }

    fn delete_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.forget_session(owner, name)
    }
}

impl SharedBudgets for PostgresStore {
    fn budget_usage_of_others(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        let own = Some(self.budget_writer);
        Box::pin(
            self.readers.read(move |db| {
                Box::pin(async move { budget_usage(db, &budget, period, own).await })
            }),
        )
    }

    fn settle_charges(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        // The writer does its jobs in their order.
        self.queue.execute(Task::Check)
    }
}
