//! A write in the form in which it is stored. Callers encode their writes, so the writer thread does not have to.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use crate::domain::attachment::Attachment;
use crate::domain::event::Event;
use crate::domain::run::{Outcome, RunId};
use crate::record::entry::RecordedEntry;
use crate::record::event::Origin;
use crate::record::stored::{self, StoredEntries};
use crate::store::encoding::input_changes::{self, InputChange};
use crate::store::encoding::notified_event::{self, NotifiedEvent};
use crate::store::encoding::{run_values, turns};
use crate::store::turn_record::SharedText;
use crate::store::{Change, NewDelivery, StoreError, Write};

/// Databases reject values above 10⁹ bytes. A write far below that cannot fail for its length in the middle of a batch.
const MAX_WRITE_BYTES: usize = 500_000_000;

pub struct EncodedWrite {
    pub run: RunId,
    pub root: RunId,
    pub origin: Origin,
    pub change: Change,
    pub entries: Option<StoredEntries>,
    pub events: Vec<Event>,
    /// What its events change of the pending inputs.
    pub inputs: Vec<InputChange>,
    /// The pictures and files in its entries, each once.
    pub attachments: Vec<Attachment>,
    pub deliveries: Vec<NewDelivery>,
    /// What receivers of push notifications are notified of.
    pub notified_event: Option<NotifiedEvent>,
    /// The run's warnings as JSON, if there are new ones.
    pub warnings: Option<String>,
    pub turns: Option<Vec<u8>>,
    /// What its turns refer to besides the texts of the run.
    pub shared_texts: Vec<Arc<SharedText>>,
    /// Writes to other runs in the same transaction. The cell gets the number of the write's last event when it is known.
    pub others: Vec<(EncodedWrite, Cell<u64>)>,
}

impl EncodedWrite {
    pub fn encode(write: Write) -> Result<Self, StoreError> {
        let events: Vec<Event> = write.origin.events(&write.entries).collect();
        let requests = write.turns.iter().filter_map(|it| it.request.as_ref());
        let shared_texts = requests.filter_map(|it| it.shared_text.clone()).collect();
        let encoded = Self {
            run: write.origin.run_id,
            root: write.origin.root_id,
            change: write.change,
            entries: stored::encode(&write.entries).map_err(|error| {
                StoreError::Backend(format!("an entry could not be written: {error}"))
            })?,
            inputs: input_changes::changes(&events),
            attachments: distinct_attachments(&write.entries),
            deliveries: write.deliveries,
            notified_event: notified_event::notified_event(write.origin.root_id, &events),
            origin: write.origin,
            events,
            warnings: run_values::warnings_value(write.warnings.as_deref())?,
            turns: turns::turns_value(write.turns)?,
            shared_texts,
            others: Vec::new(),
        };
        if encoded.bytes() > MAX_WRITE_BYTES {
            return Err(StoreError::Backend(format!(
                "a write of {} is larger than {MAX_WRITE_BYTES} bytes",
                encoded.run
            )));
        }
        Ok(encoded)
    }

    /// Like [`EncodedWrite::encode`], with writes to other runs that are committed with it.
    pub fn encode_with(write: Write, others: Vec<Write>) -> Result<Self, StoreError> {
        let others = others
            .into_iter()
            .map(|other| Ok((Self::encode(other)?, Cell::new(0))));
        Ok(Self {
            others: others.collect::<Result<_, StoreError>>()?,
            ..Self::encode(write)?
        })
    }

    pub fn event_count(&self) -> u64 {
        self.events.len() as u64
    }

    /// The entries as JSON, and their long texts.
    pub fn entry_texts(&self) -> (Option<&str>, Option<&str>) {
        let entries = self.entries.as_ref();
        (
            entries.map(|it| it.entries.as_str()),
            entries.and_then(|it| it.texts.as_deref()),
        )
    }

    /// Whether it adds a row to the record.
    pub fn has_row(&self) -> bool {
        self.entries.is_some() || self.turns.is_some()
    }

    /// About how many bytes it writes, with its writes to other runs.
    pub fn bytes(&self) -> usize {
        let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let data = self.attachments.iter().filter_map(|it| it.data.as_ref());
        let data_bytes: usize = data.map(Bytes::len).sum();
        let shared = self.shared_texts.iter().map(|it| it.text.len());
        let turn_bytes = self.turns.as_ref().map_or(0, Vec::len) + shared.sum::<usize>();
        let others: usize = self.others.iter().map(|(other, _)| other.bytes()).sum();
        let entries = self.entries.as_ref();
        entries.map_or(0, |it| it.entries.len() + len(&it.texts))
            + turn_bytes
            + self.change_bytes()
            + data_bytes
            + others
    }

    fn change_bytes(&self) -> usize {
        match &self.change {
            Change::Create(new_run) => {
                let run = &new_run.run;
                run.input.text_bytes() + run.task.as_ref().map_or(0, String::len)
            }
            Change::Finish(finished) => match &finished.outcome {
                Outcome::Completed { content, .. } => content.len(),
                Outcome::Failed { partial, .. } | Outcome::Cancelled { partial, .. } => {
                    partial.as_ref().map_or(0, String::len)
                }
            },
            _ => 0,
        }
    }
}

/// The pictures and files in these entries, each once.
fn distinct_attachments(entries: &[RecordedEntry]) -> Vec<Attachment> {
    let all = entries.iter().flat_map(|it| it.entry.attachments());
    let mut digests = BTreeSet::new();
    let new = all.filter(|attachment| digests.insert(attachment.sha256));
    new.cloned().collect()
}
