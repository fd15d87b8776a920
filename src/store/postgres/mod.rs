//! The store in a PostgreSQL database, with one writer and a few connections for reading.

use std::rc::Rc;
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;

use crate::config::cluster::Cluster;
use crate::store::StoreError;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::postgres::connect::Connector;
use crate::store::postgres::node::NodeStatus;
use crate::store::postgres::reader_pool::ReaderPool;
use crate::store::postgres::writer::Writer;
use crate::store::run_store::RunStore;
use crate::store::write_queue::job::Task;
use crate::store::write_queue::queue::{WriteQueue, WriterEnd};

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
    queue: WriteQueue,
    readers: ReaderPool,
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
        let (queue, writer_end) = WriteQueue::new(publish, has_subscribers);
        let (opened, result) = std::sync::mpsc::channel();
        let cluster = cluster.clone();
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || runtime.block_on(serve(connector, &cluster, writer_end, &opened)))
            .map_err(thread_error)?;
        result.recv().map_err(|_| StoreError::Closed)??;
        Ok(Self {
            queue,
            readers,
            thread: Some(thread),
        })
    }
}

/// Opens the database, says so, and serves the jobs until the store is closed.
async fn serve(
    connector: Connector,
    cluster: &Cluster,
    writer_end: WriterEnd,
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
    let WriterEnd {
        mut jobs,
        callbacks,
        commits,
    } = writer_end;
    let mut writer = Writer::new(&connector, state, Rc::clone(&status), &callbacks, &commits);
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
            self.queue.request(Task::Check).await?;
            self.readers.read(|db| Box::pin(queries::check(db))).await
        })
    }

    fn commit_count(&self) -> u64 {
        self.queue.commit_count()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.readers.close();
            // An error means that the store is closed already.
            let _ = self.queue.request(Task::Close(Vec::new())).await;
        })
    }
}

impl Drop for PostgresStore {
    /// Commits the queued writes and leaves the database, if the store was not closed before.
    fn drop(&mut self) {
        self.readers.close();
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
