//! Writes of one run that follow each other in a batch and only add entries: they become one entry and one change of
//! the run's row, which costs more than all the rest of such a write.

use crate::domain::run::RunId;
use crate::store::Change;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::write_queue::job::{Job, Task};

/// Keeps entries short.
const MAX_JOINED_BYTES: usize = 256 << 10;

pub struct JoinedWrites<'a> {
    writes: Vec<&'a EncodedWrite>,
    pub run: RunId,
    pub root: RunId,
}

impl<'a> JoinedWrites<'a> {
    /// Those at the beginning of these jobs; `None` if there are not at least two.
    pub fn first_of(jobs: &'a [Job]) -> Option<Self> {
        let first = joinable(jobs.first()?)?;
        let mut bytes = 0;
        let writes: Vec<&EncodedWrite> = jobs
            .iter()
            .map_while(joinable)
            .take_while(|write| {
                bytes += write.bytes();
                write.run == first.run && bytes <= MAX_JOINED_BYTES
            })
            .collect();
        (writes.len() > 1).then_some(Self {
            run: first.run,
            root: first.root,
            writes,
        })
    }

    pub fn first(&self) -> &'a EncodedWrite {
        self.writes[0]
    }

    pub fn count(&self) -> usize {
        self.writes.len()
    }

    pub fn tool_calls(&self) -> i64 {
        let counting = |write: &&&EncodedWrite| matches!(write.change, Change::CountToolCall);
        let calls = self.writes.iter().filter(counting).count();
        i64::try_from(calls).unwrap_or(i64::MAX)
    }

    pub fn event_count(&self) -> u64 {
        self.writes.iter().map(|write| write.event_count()).sum()
    }

    /// What each write returns: the number of its last event, 0 without events.
    pub fn last_seqs(&self, mut seq: u64) -> Vec<u64> {
        let last_seq = |write: &&EncodedWrite| {
            seq += write.event_count();
            if write.event_count() > 0 { seq } else { 0 }
        };
        self.writes.iter().map(last_seq).collect()
    }

    /// One array of the entries of all.
    pub fn entries(&self) -> Option<String> {
        let arrays = self.writes.iter().filter_map(|it| it.entry_texts().0);
        let items: Vec<&str> = arrays
            .filter_map(|array| array.strip_prefix('[')?.strip_suffix(']'))
            .collect();
        (!items.is_empty()).then(|| format!("[{}]", items.join(",")))
    }
}

fn joinable(job: &Job) -> Option<&EncodedWrite> {
    let Task::Write(write) = &job.task else {
        return None;
    };
    let adds_only = write.entries.as_ref().is_some_and(|it| it.texts.is_none())
        && matches!(write.change, Change::Unchanged | Change::CountToolCall)
        && write.warnings.is_none()
        && write.turns.is_none()
        && write.shared_texts.is_empty()
        && write.inputs.is_empty()
        && write.attachments.is_empty()
        && write.deliveries.is_empty()
        && write.notified_event.is_none()
        && write.others.is_empty();
    adds_only.then_some(write)
}
