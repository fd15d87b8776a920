//! How two texts differ.

use std::time::{Duration, Instant};

use similar::algorithms::{Capture, Replace, myers};
use similar::{ChangeTag, DiffOp};

/// A piece of one of the texts, or of both.
pub type Piece<'a> = (ChangeTag, &'a str);

/// Groups of changes of lines or words, with `context` unchanged pieces around them. After `max_time` they may be longer than
/// necessary. One algorithm only: `similar::TextDiff` would bring all of the crate's into the program, half a megabyte.
pub fn changes<'a>(
    before: &'a [&'a str],
    after: &'a [&'a str],
    context: usize,
    max_time: Duration,
) -> Vec<Vec<Piece<'a>>> {
    let mut found = Replace::new(Capture::new());
    let (all_before, all_after) = (0..before.len(), 0..after.len());
    let deadline = Some(Instant::now() + max_time);
    // A capture cannot fail.
    let _ = myers::diff_deadline_raw(&mut found, before, all_before, after, all_after, deadline);
    let pieces = |group: &Vec<DiffOp>| {
        let changes = group.iter().flat_map(|op| op.iter_changes(before, after));
        let pieces = changes.map(|change| (change.tag(), change.value()));
        pieces.collect()
    };
    let groups = found.into_inner().into_grouped_ops(context);
    groups.iter().map(pieces).collect()
}

/// The lines without their line breaks; an empty text has none.
pub fn lines(text: &str) -> Vec<&str> {
    match text {
        "" => Vec::new(),
        text => text
            .strip_suffix('\n')
            .unwrap_or(text)
            .split('\n')
            .collect(),
    }
}
