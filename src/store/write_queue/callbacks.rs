//! What a writer calls with the results of its jobs: subscribers of events, the sender of deliveries, the owners of trees.

use std::sync::{Arc, OnceLock};

use tokio::sync::Notify;
use tracing::warn;

use crate::record::event::Origin;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::entries;
use crate::store::events::{HasSubscribersFn, PublishFn};
use crate::store::runs::WriteFailedFn;
use crate::store::write_queue::job::{Job, JobResult, Reply, Task};

/// What the writer calls. None of them may block.
pub struct WriterCallbacks {
    pub publish: PublishFn,
    pub has_subscribers: HasSubscribersFn,
    /// Notified after a commit that made deliveries due.
    pub delivery_notify: Arc<Notify>,
    pub on_write_failed: Arc<OnceLock<WriteFailedFn>>,
}

impl WriterCallbacks {
    /// Publishes the events of a committed batch, then replies to its callers. Leaves the batch empty.
    pub fn report(&self, batch: &mut Vec<Job>, results: Vec<JobResult>, is_notifying: bool) {
        for (job, result) in batch.iter().zip(&results) {
            self.publish_all(job, result);
        }
        if is_notifying || batch.iter().any(|job| job.task.has_deliveries()) {
            self.delivery_notify.notify_one();
        }
        for (job, result) in batch.drain(..).zip(results) {
            match job.reply {
                // The caller may have given up; the write is committed anyway.
                Some(reply) => drop(reply.send(result)),
                None => self.report_failed_write(&job.task, result),
            }
        }
    }

    /// Publishes the events of a committed write.
    fn publish_all(&self, job: &Job, result: &JobResult) {
        let (Task::Write(write), Ok(Reply::Number(last_seq))) = (&job.task, result) else {
            return;
        };
        self.publish_write(write, *last_seq);
        for (other, other_last_seq) in &write.others {
            self.publish_write(other, other_last_seq.get());
        }
    }

    fn publish_write(&self, write: &EncodedWrite, last_seq: u64) {
        if !write.events.is_empty() && last_seq > 0 && (self.has_subscribers)(write.root) {
            (self.publish)(write.root, entries::numbered(last_seq, &write.events));
        }
    }

    /// Logs a failed fire-and-forget write, and informs the owner of the tree: no caller waits for the result.
    fn report_failed_write(&self, task: &Task, result: JobResult) {
        if let (Task::Write(write), Err(error)) = (task, result) {
            let Origin { agent, depth, .. } = &write.origin;
            warn!(run.id = %write.run, run.root = %write.root, agent = &**agent, depth, error = %error, "A step of {} was not recorded: {error}", write.run);
            if let Some(on_write_failed) = self.on_write_failed.get() {
                on_write_failed(write.root);
            }
        }
    }
}
