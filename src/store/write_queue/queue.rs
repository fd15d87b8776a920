//! The callers' end of the queue: the part of the store's contract that an engine does by the jobs of its writer.

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::domain::run::RunId;
use crate::instruments::Histogram;
use crate::store::changes::Changes;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::runs::WriteFailedFn;
use crate::store::write_queue::callbacks::WriterCallbacks;
use crate::store::write_queue::job::{ForgetProgress, Job, JobResult, Reply, Task};
use crate::store::{StoreError, Write};

/// Jobs that may wait for the writer. A caller with one more waits for a place in the queue.
const MAX_QUEUED_WRITES: usize = 4096;
/// Upper bounds for the duration of a commit, in seconds.
const COMMIT_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

pub struct WriteQueue {
    job_sender: mpsc::Sender<Job>,
    commits: Arc<Histogram>,
    delivery_notify: Arc<Notify>,
    on_write_failed: Arc<OnceLock<WriteFailedFn>>,
}

/// The writer's end of the queue.
pub struct WriterEnd {
    pub jobs: mpsc::Receiver<Job>,
    pub callbacks: WriterCallbacks,
    /// How long the transactions took that the writer has committed.
    pub commits: Arc<Histogram>,
}

impl WriteQueue {
    pub fn new(publish: PublishFn, has_subscribers: HasSubscribersFn) -> (Self, WriterEnd) {
        let (job_sender, jobs) = mpsc::channel(MAX_QUEUED_WRITES);
        let queue = Self {
            job_sender,
            commits: Arc::new(Histogram::new(COMMIT_BUCKETS)),
            delivery_notify: Arc::default(),
            on_write_failed: Arc::default(),
        };
        let callbacks = WriterCallbacks {
            on_write_failed: Arc::clone(&queue.on_write_failed),
            publish,
            has_subscribers,
            delivery_notify: Arc::clone(&queue.delivery_notify),
        };
        let end = WriterEnd {
            jobs,
            callbacks,
            commits: Arc::clone(&queue.commits),
        };
        (queue, end)
    }

    /// Waits for the result of a task.
    pub async fn request(&self, task: Task) -> Result<u64, StoreError> {
        match self.reply(task).await? {
            Reply::Number(number) => Ok(number),
            Reply::Changed(rows) => Ok(rows.iter().sum()),
        }
    }

    /// Executes statements, and returns how many rows each of them changed.
    pub fn change(&self, changes: Changes) -> BoxFuture<'_, Result<Vec<u64>, StoreError>> {
        Box::pin(async move {
            match self.reply(Task::Change(changes)).await? {
                Reply::Changed(rows) => Ok(rows),
                Reply::Number(_) => Err(StoreError::Closed),
            }
        })
    }

    async fn reply(&self, task: Task) -> JobResult {
        let (reply, result) = oneshot::channel();
        self.send(task, Some(reply)).await?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    /// Waits for the end of a task that sends roots, and returns them.
    pub async fn roots(
        &self,
        task: impl FnOnce(UnboundedSender<RunId>) -> Task,
    ) -> Result<Vec<RunId>, StoreError> {
        let (sender, mut sent) = mpsc::unbounded_channel();
        self.request(task(sender)).await?;
        let mut roots = Vec::new();
        while let Ok(root) = sent.try_recv() {
            roots.push(root);
        }
        Ok(roots)
    }

    /// Waits for the end of a task whose result says nothing.
    pub fn execute(&self, task: Task) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.request(task).await.map(drop) })
    }

    /// Whether the result of a task is not 0.
    pub fn is_positive(&self, task: Task) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.request(task).await? > 0) })
    }

    pub fn write(&self, write: Write) -> BoxFuture<'_, Result<u64, StoreError>> {
        let encoded = EncodedWrite::encode(write);
        Box::pin(async move { self.request(Task::Write(encoded?)).await })
    }

    pub fn write_with(
        &self,
        write: Write,
        others: Vec<Write>,
    ) -> BoxFuture<'_, Result<u64, StoreError>> {
        let encoded = EncodedWrite::encode_with(write, others);
        Box::pin(async move { self.request(Task::Write(encoded?)).await })
    }

    pub fn enqueue(&self, write: Write) -> BoxFuture<'_, Result<(), StoreError>> {
        let encoded = EncodedWrite::encode(write);
        Box::pin(async move { self.send(Task::Write(encoded?), None).await })
    }

    /// Removes the name of a session in parts; false if no run had it.
    pub fn forget_session(
        &self,
        owner: Option<String>,
        name: String,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move {
            let mut is_found = false;
            loop {
                let task = Task::ForgetSession(owner.clone(), name.clone());
                let progress = self.request(task).await?;
                is_found |= progress != ForgetProgress::NotFound as u64;
                if progress != ForgetProgress::More as u64 {
                    return Ok(is_found);
                }
            }
        })
    }

    /// Only the first call has an effect.
    pub fn on_write_failed(&self, callback: WriteFailedFn) {
        let _ = self.on_write_failed.set(callback);
    }

    pub fn delivery_notify(&self) -> Arc<Notify> {
        Arc::clone(&self.delivery_notify)
    }

    pub fn commits(&self) -> &Histogram {
        &self.commits
    }

    /// The number of jobs that wait for the writer.
    pub fn queued_jobs(&self) -> usize {
        self.job_sender.max_capacity() - self.job_sender.capacity()
    }

    /// Resolves when the writer has ended.
    pub fn ended(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.job_sender.closed())
    }

    /// The writer ends after the jobs that are queued.
    pub fn close(&mut self) {
        let (closed, _) = mpsc::channel(1);
        self.job_sender = closed;
    }

    async fn send(
        &self,
        task: Task,
        reply: Option<oneshot::Sender<JobResult>>,
    ) -> Result<(), StoreError> {
        let job = Job { task, reply };
        let sent = self.job_sender.send(job).await;
        sent.map_err(|_| StoreError::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::WriteQueue;

    #[tokio::test]
    async fn a_writer_that_panics_has_ended() {
        let (queue, end) = WriteQueue::new(Box::new(|_, _| {}), Box::new(|_| false));
        let writer = std::thread::spawn(move || {
            let _end = end;
            panic!("a bug");
        });
        queue.ended().await;
        assert!(writer.join().is_err());
    }
}
