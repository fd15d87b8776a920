//! The contract for approvals, sessions, lists, retention and usage, by the jobs of the writer and the readers.

use futures_util::future::BoxFuture;
use jiff::Timestamp;

use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::approvals::{ApprovalIndex, ApprovalPage, ApprovalQuery};
use crate::store::changed_runs::{ChangedPage, ChangedQuery, ChangedRuns};
use crate::store::postgres::{
    PostgresStore, approvals, changed_runs, retention_queries, sessions, usage_queries,
};
use crate::store::retention::{ExpiredPage, ExpiredQuery, NthNewestQuery, RunRetention};
use crate::store::sessions::{SessionIndex, SessionListQuery, SessionPage};
use crate::store::usage::{
    BudgetPeriod, BudgetUsage, SharedBudgets, UsageLog, UsageQuery, UsageReport,
};
use crate::store::write_queue::job::Task;

impl ApprovalIndex for PostgresStore {
    fn pending_approvals(
        &self,
        query: ApprovalQuery,
    ) -> BoxFuture<'_, Result<ApprovalPage, StoreError>> {
        Box::pin(
            self.readers.read_snapshot(move |db| {
                Box::pin(async move { approvals::list(db, &query).await })
            }),
        )
    }
}

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

impl ChangedRuns for PostgresStore {
    fn changed_runs(&self, query: ChangedQuery) -> BoxFuture<'_, Result<ChangedPage, StoreError>> {
        Box::pin(
            self.readers
                .read_long(move |db| Box::pin(async move { changed_runs::list(db, &query).await })),
        )
    }
}

impl RunRetention for PostgresStore {
    fn delete(&self, root: RunId) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::Delete(root))
    }

    fn expired_roots(&self, query: ExpiredQuery) -> BoxFuture<'_, Result<ExpiredPage, StoreError>> {
        Box::pin(self.readers.read_snapshot(move |db| {
            Box::pin(async move { retention_queries::expired_roots(db, query).await })
        }))
    }

    fn nth_newest_ended(
        &self,
        query: NthNewestQuery,
    ) -> BoxFuture<'_, Result<Option<RunId>, StoreError>> {
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move { retention_queries::nth_newest(db, query).await })
        }))
    }

    fn vacuum(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::Vacuum)
    }
}

impl UsageLog for PostgresStore {
    fn usage(&self, query: UsageQuery) -> BoxFuture<'_, Result<UsageReport, StoreError>> {
        Box::pin(self.readers.read_long_snapshot(move |db| {
            Box::pin(async move { usage_queries::report(db, &query).await })
        }))
    }

    fn budget_usage(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move { usage_queries::budget_usage(db, &budget, period, None).await })
        }))
    }

    fn trim_usage(&self, before: Timestamp) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.queue.is_positive(Task::TrimUsage(before))
    }
}

impl SharedBudgets for PostgresStore {
    fn budget_usage_of_others(
        &self,
        budget: String,
        period: BudgetPeriod,
    ) -> BoxFuture<'_, Result<BudgetUsage, StoreError>> {
        let own = Some(self.budget_writer);
        Box::pin(self.readers.read(move |db| {
            Box::pin(async move { usage_queries::budget_usage(db, &budget, period, own).await })
        }))
    }

    fn settle_charges(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        // The writer does its jobs in their order.
        self.queue.execute(Task::Check)
    }
}
