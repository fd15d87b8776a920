//! The statement of a write: it begins with the tree's row, which only the owner of the tree can change, and changes nothing if that or
//! the change of the run is impossible. It returns the number of the write's last event.

use std::sync::LazyLock;

use crate::domain::content::Content;
use crate::store::NewRun;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::encoded_write::EncodedWrite;
use crate::store::encoding::integers::signed;
use crate::store::postgres::connection::Query;
use crate::store::row_changes::{
    self, ENDED_COLUMNS, ENDED_ROOT_COLUMNS, NEW_COLUMNS, NEW_VALUES, RowChange, SET_LAST_EVENT,
};
use crate::store::sql::value::{NamedValue, free_text, values};

/// Who writes: a node, and which owner of the tree it is.
#[derive(Clone, Copy, Debug)]
pub struct Ownership {
    pub node: uuid::Uuid,
    pub epoch: i64,
}

/// `trees.permit` of a tree that waits for a permit, and of one that has one.
const WANTED: i64 = 1;
pub const HELD: i64 = 2;

/// Takes the numbers of the write's events, if this node owns the tree.
const FENCE: &str = "UPDATE trees SET last_event = last_event + :count \
     WHERE root = :root AND node = :node AND epoch = :epoch RETURNING last_event";
/// The same for the end of a root: nothing is written to its tree any more.
const LAST_FENCE: &str = "DELETE FROM trees WHERE root = :root AND node = :node AND epoch = :epoch \
     RETURNING last_event + :count AS last_event";
/// The same for a new root, if its node was not replaced.
const NEW_FENCE: &str = "INSERT INTO trees (root, node, epoch, last_event, owner, agent, session, permit, labels) \
     SELECT :root, CASE WHEN :is_here THEN incarnation END, 1, :count, :owner, :agent, :session, :permit, :node_labels \
     FROM (SELECT incarnation FROM nodes WHERE incarnation = :node FOR KEY SHARE) AS alive RETURNING last_event";

struct Statements {
    /// By [`RowChange`].
    changes: Vec<String>,
    finish_root: String,
    insert_root: String,
    insert_child: String,
}

static STATEMENTS: LazyLock<Statements> = LazyLock::new(|| Statements {
    changes: RowChange::ALL
        .iter()
        .enumerate()
        .map(
            |(index, change)| match index == RowChange::Finish as usize {
                true => finish(FENCE, *change),
                false => statement(FENCE, &update(*change, "r.id"), "", ""),
            },
        )
        .collect(),
    finish_root: finish(LAST_FENCE, RowChange::ALL[RowChange::Finish as usize]),
    insert_root: statement(NEW_FENCE, &insert(), "", ""),
    insert_child: statement(FENCE, &insert(), "", ""),
});

fn update((set, condition): (&str, &str), returned: &str) -> String {
    format!(
        "UPDATE runs r SET {SET_LAST_EVENT}{set} FROM fence WHERE r.id = :run AND r.finished_at IS NULL{condition} \
         RETURNING {returned}"
    )
}

fn insert() -> String {
    format!("INSERT INTO runs ({NEW_COLUMNS}) SELECT {NEW_VALUES} FROM fence RETURNING id")
}

/// Ends a run, and returns what is counted of it: its own values and those of its root.
fn finish(fence: &str, change: (&str, &str)) -> String {
    let changed = update(change, &format!("r.id, {ENDED_COLUMNS}"));
    let decided = ", decided AS (DELETE FROM inputs a USING changed WHERE a.run = changed.id)";
    let columns = format!(
        ", {}, {ENDED_ROOT_COLUMNS}",
        ENDED_COLUMNS.replace("r.", "changed.")
    );
    statement(fence, &changed, decided, &columns) + " JOIN runs root ON root.id = :root"
}

/// Adds the entry after what `changed` and `more` do, and returns the number of the last event with these columns.
fn statement(fence: &str, changed: &str, more: &str, columns: &str) -> String {
    format!(
        "WITH fence AS ({fence}), changed AS ({changed}){more}, \
         entry AS (INSERT INTO entries (root, last_seq, run, count, entries, texts, turns) \
         SELECT :root, fence.last_event, :run, :count, :entries, :texts, :turns FROM fence, changed WHERE :has_entry) \
         SELECT fence.last_event AS last_event{columns} FROM fence, changed"
    )
}

/// The statement of a write to a run that exists. It affects no row if the tree belongs to another node, and if the run does
/// not exist, has ended, or does not allow the change.
pub fn change<'a>(write: &'a EncodedWrite, owner: Ownership) -> Query<'a> {
    let (change, mut values) = row_changes::row_change(&write.change);
    let sql = match change == RowChange::Finish && write.run == write.root {
        true => &STATEMENTS.finish_root,
        false => &STATEMENTS.changes[change as usize],
    };
    values.extend(write_values(write, owner));
    Query::required_text(sql, values)
}

/// The statement of a write that inserts a run.
pub fn new_run<'a>(
    write: &'a EncodedWrite,
    new_run: &'a NewRun,
    definition: Hash,
    owner: Ownership,
) -> Query<'a> {
    let (run, entry) = (&*new_run.run, &new_run.entry);
    let mut values = row_changes::new_run_values(new_run, definition);
    values.extend(row_changes::input_values(run));
    values.extend(write_values(write, owner));
    values.extend(values! {":input_is_parts": matches!(run.input, Content::Parts(_))});
    if write.run != write.root {
        return Query::required_text(&STATEMENTS.insert_child, values);
    }
    let permit = if entry.has_permit { HELD } else { WANTED };
    let labels: Vec<&str> = new_run.node_labels.iter().map(String::as_str).collect();
    let labels = Some(labels).filter(|labels| !labels.is_empty());
    values.extend(values! {":permit": permit, ":is_here": entry.is_here, ":node_labels": labels});
    Query::required_text(&STATEMENTS.insert_root, values)
}

/// What every write has: its tree with the owner, and its entry.
fn write_values(write: &EncodedWrite, owner: Ownership) -> [NamedValue<'_>; 9] {
    let (entries, texts) = write.entry_texts();
    values! {
        ":root": write.root,
        ":run": write.run,
        ":node": owner.node,
        ":epoch": owner.epoch,
        ":count": signed(write.event_count()),
        ":entries": entries.map(free_text),
        ":texts": texts.map(free_text),
        ":turns": write.turns.as_ref(),
        ":has_entry": write.has_row(),
    }
}
