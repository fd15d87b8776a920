//! The store in a PostgreSQL database, with one writer and a few connections for reading.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::config::cluster::Cluster;
use crate::store::StoreError;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::postgres::connect::Connector;
use crate::store::postgres::node::NodeStatus;
use crate::store::postgres::reader_pool::ReaderPool;
use crate::store::postgres::writer::Writer;
use crate::store::run_store::RunStore;
use crate::store::runs::WriteFailedFn;
use crate::store::write_queue::callbacks::WriterCallbacks;
use crate::store::write_queue::job::{Job, Task};

mod approvals;
mod attachments;
mod batch_queries;
mod batch_records;
mod changed_runs;
mod commit;
mod connect;
mod connection;
mod delete;
pub mod error;
mod explain;
mod list_records;
mod lists;
mod node;
pub mod offline;
mod outbox_queries;
mod outbox_records;
mod push_configs;
mod queries;
mod reader_pool;
mod retention_queries;
mod rows;
mod run_changes;
mod run_inserts;
mod run_records;
mod run_rows;
mod schedules;
mod schema;
mod search;
mod sessions;
pub mod sql;
mod startup;
mod statements;
mod task_plan;
mod tls;
mod turns;
mod usage_queries;
mod usage_rollup;
mod write_plan;
mod writer;

pub struct PostgresStore {
    job_sender: mpsc::Sender<Job>,
    readers: ReaderPool,
    commits: Arc<AtomicU64>,
    delivery_notify: Arc<Notify>,
    on_write_failed: Arc<OnceLock<WriteFailedFn>>,
    /// The thread of the writer, the beats and the drivers of the connections.
    thread: Option<JoinHandle<()>>,
}

impl PostgresStore {
    /// Connects, migrates the database and joins it. Waits until a process that has used it, and may be dead, has shown no sign
    /// of life for some seconds; fails if it is alive. Blocks.
    pub fn open(
        url: &str,
        cluster: &Cluster,
        publish: PublishFn,
        has_subscribers: HasSubscribersFn,
    ) -> Result<Self, StoreError> {
        let thread_error = |error: std::io::Error| {
            StoreError::Backend(format!("could not start the store's thread: {error}"))
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(thread_error)?;
        let connector = Connector::new(url, runtime.handle().clone())?;
        let readers = ReaderPool::new(connector.reader_pool()?);
        let (job_sender, jobs) = mpsc::channel(writer::MAX_QUEUED_WRITES);
        let commits = Arc::<AtomicU64>::default();
        let delivery_notify = Arc::<Notify>::default();
        let on_write_failed = Arc::<OnceLock<WriteFailedFn>>::default();
        let callbacks = WriterCallbacks {
            on_write_failed: Arc::clone(&on_write_failed),
            publish,
            has_subscribers,
            delivery_notify: Arc::clone(&delivery_notify),
        };
        let (opened, result) = std::sync::mpsc::channel();
        let (cluster, commit_count) = (cluster.clone(), Arc::clone(&commits));
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || {
                let serve = serve(
                    connector,
                    &cluster,
                    &callbacks,
                    &commit_count,
                    jobs,
                    &opened,
                );
                runtime.block_on(serve);
            })
            .map_err(thread_error)?;
        result.recv().map_err(|_| StoreError::Closed)??;
        Ok(Self {
            job_sender,
            readers,
            commits,
            delivery_notify,
            on_write_failed,
            thread: Some(thread),
        })
    }

    async fn request(&self, task: Task) -> Result<u64, StoreError> {
        let (reply, result) = oneshot::channel();
        let job = Job {
            task,
            reply: Some(reply),
        };
        self.job_sender
            .send(job)
            .await
            .map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }
}

/// Opens the database, says so, and serves the jobs until the store is closed.
async fn serve(
    connector: Connector,
    cluster: &Cluster,
    callbacks: &WriterCallbacks,
    commit_count: &AtomicU64,
    mut jobs: mpsc::Receiver<Job>,
    opened: &std::sync::mpsc::Sender<Result<(), StoreError>>,
) {
    let state = match startup::start(&connector, cluster).await {
        Ok(state) => state,
        Err(error) => {
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    let (node, status) = (state.node, Rc::new(NodeStatus::default()));
    let mut writer = Writer::new(
        &connector,
        state,
        Rc::clone(&status),
        callbacks,
        commit_count,
    );
    let reply = tokio::select! {
        reply = writer.run(&mut jobs) => reply,
        () = node::beat(&connector, node, &status) => None,
    };
    if let Some(reply) = reply {
        let _ = reply.send(Ok(0));
    }
}

impl RunStore for PostgresStore {
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.request(Task::Check).await?;
            self.readers.read(|db| Box::pin(queries::check(db))).await
        })
    }

    fn commit_count(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.readers.close();
            // An error means that the store is closed already.
            let _ = self.request(Task::Close(Vec::new())).await;
        })
    }
}

impl Drop for PostgresStore {
    /// Commits the queued writes and leaves the database, if the store was not closed before.
    fn drop(&mut self) {
        self.readers.close();
        let (closed, _) = mpsc::channel(1);
        drop(std::mem::replace(&mut self.job_sender, closed));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
