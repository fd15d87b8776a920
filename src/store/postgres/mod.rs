//! The store in a PostgreSQL database, with one writer and a few connections for reading.

use std::rc::Rc;
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use uuid::Uuid;

use crate::config::cluster::Cluster;
use crate::instruments::Histogram;
use crate::store::StoreError;
use crate::store::cluster::{self, OtherNode};
use crate::store::engine::Engine;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::postgres::commit::WriterState;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::messages::{Messages, listener, sender};
use crate::store::postgres::node::{CurrentNode, NodeStatus};
use crate::store::postgres::reader_pool::ReaderPool;
use crate::store::postgres::writer::Writer;
use crate::store::reader::{ReadMode, Reader};
use crate::store::run_queries;
use crate::store::run_store::RunStore;
use crate::store::sql::row::StoreResult;
use crate::store::write_queue::job::{Reply, Task};
use crate::store::write_queue::queue::{WriteQueue, WriterEnd};

mod commit;
mod connect;
mod connection;
mod database_time;
mod delete;
mod duties;
pub mod error;
mod explain;
mod memories;
mod messages;
mod node;
mod node_messages;
pub mod offline;
mod permits;
mod pooler;
pub mod reader;
mod reader_pool;
mod run_changes;
mod run_inserts;
mod run_requests;
pub mod schema;
pub mod search;
mod shared_budgets;
mod startup;
mod statements;
mod task_plan;
mod tls;
mod tree_owners;
mod usage_rollup;
mod write_plan;
mod writer;

pub struct PostgresStore {
    queue: WriteQueue,
    readers: ReaderPool,
    node: CurrentNode,
    /// Who charges budgets: this process, whatever node it is.
    budget_writer: Uuid,
    messages: Messages,
    /// The thread of the writer, the beats and the drivers of the connections.
    thread: Option<JoinHandle<()>>,
}

impl PostgresStore {
    /// Checks a URL without a connection.
    pub fn check_url(url: &str) -> Result<(), StoreError> {
        connect::configure(url).map(drop)
    }

    /// Connects, migrates the database and joins the nodes that use it; the second URL is for messages of other nodes. Blocks.
    pub fn open(
        (url, listen_url): (&str, &str),
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
        let prepared = prepare(url, listen_url, runtime.handle());
        let ((connector, listen_connector), readers) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                // Dropped where others block, a runtime panics.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let (queue, writer_end) = WriteQueue::new(publish, has_subscribers);
        let (opened, result) = std::sync::mpsc::channel();
        let cluster = cluster.clone();
        let messages = Messages::new();
        let served = messages.clone();
        let thread = std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || {
                let connectors = (connector, listen_connector);
                runtime.block_on(async {
                    let joined = startup::start(&connectors.0, &cluster).await;
                    match joined {
                        Ok(joined) => {
                            serve(connectors, joined, &cluster, writer_end, &served, &opened).await;
                        }
                        // The caller waits for it.
                        Err(error) => drop(opened.send(Err(error))),
                    }
                });
            })
            .map_err(thread_error)?;
        let node = result.recv().map_err(|_| StoreError::Closed)??;
        Ok(Self {
            queue,
            readers,
            budget_writer: node.get().0,
            node,
            messages,
            thread: Some(thread),
        })
    }
}

/// The connectors for the store and for messages of other nodes, and the connections for reading. Nothing is opened yet.
fn prepare(
    url: &str,
    listen_url: &str,
    runtime: &Handle,
) -> Result<((Connector, Connector), ReaderPool), StoreError> {
    let connector = Connector::new("data.url", url, runtime.clone())?;
    let listen_connector = Connector::new("data.listen_url", listen_url, runtime.clone())?;
    let readers = ReaderPool::new(&connector)?;
    Ok(((connector, listen_connector), readers))
}

/// Says whether the database is open, and serves the jobs until the store is closed.
async fn serve(
    (connector, listen_connector): (Connector, Connector),
    (state, others): (WriterState, Vec<OtherNode>),
    cluster: &Cluster,
    writer_end: WriterEnd,
    messages: &Messages,
    opened: &std::sync::mpsc::Sender<Result<CurrentNode, StoreError>>,
) {
    let current = CurrentNode::new(state.node, others);
    let status = Rc::new(NodeStatus::new(current.clone()));
    let WriterEnd {
        mut jobs,
        callbacks,
        commits,
    } = writer_end;
    let place = (&connector, cluster);
    let mut writer = Writer::new(place, state, Rc::clone(&status), &callbacks, &commits);
    // Its statements need the tables of this version.
    if let Err(error) = writer.connect().await {
        let _ = opened.send(Err(error));
        return;
    }
    let _ = opened.send(Ok(current.clone()));
    let reply = tokio::select! {
        reply = writer.run(&mut jobs) => reply,
        () = node::beat(&connector, &status) => None,
        () = node::watch(&connector, &status) => None,
        () = sender::run(&connector, &messages.queue) => None,
        () = listener::run(&listen_connector, &current, &messages.queue, &messages.received) => None,
    };
    if let Some(reply) = reply {
        let _ = reply.send(Ok(Reply::Number(0)));
    }
}

impl Engine for PostgresStore {
    fn read<T: Send + 'static>(
        &self,
        mode: ReadMode,
        read: impl for<'r> FnOnce(&'r Reader) -> BoxFuture<'r, StoreResult<T>> + Clone + Send + 'static,
    ) -> BoxFuture<'_, StoreResult<T>> {
        Box::pin(self.readers.read(mode, read))
    }

    fn queue(&self) -> &WriteQueue {
        &self.queue
    }

    fn writer_id(&self) -> Uuid {
        self.node.get().0
    }
}

impl RunStore for PostgresStore {
    fn check(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.queue.request(Task::Check).await?;
            self.read(ReadMode::Statement, |db| Box::pin(run_queries::check(db)))
                .await
        })
    }

    fn commits(&self) -> &Histogram {
        self.queue.commits()
    }

    fn queued_writes(&self) -> usize {
        self.queue.queued_jobs()
    }

    fn cluster(&self) -> Option<&dyn cluster::Cluster> {
        Some(self)
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        self.queue.ended()
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
