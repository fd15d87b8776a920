//! The first lines of many in their order, held within bounds whatever comes. Knows no file.

use std::collections::BTreeSet;

/// Most lines that are kept.
const MOST_LINES: usize = 10_000;

/// The lines so far.
#[derive(Debug, Default)]
pub struct Sorted {
    lines: BTreeSet<String>,
    all: usize,
}

impl Sorted {
    /// Puts a line in its place; the last one goes where there are too many.
    pub fn put(&mut self, line: String) {
        self.all += 1;
        self.lines.insert(line);
        if self.lines.len() > MOST_LINES {
            self.lines.pop_last();
        }
    }

    /// The lines within so many bytes, with a notice where some are left out; none where there are none.
    pub fn text(self, room: usize, what: &str) -> Option<String> {
        let mut text = String::new();
        let mut shown = 0;
        for line in &self.lines {
            if text.len() + line.len() >= room && shown > 0 {
                break;
            }
            text.push_str(line);
            text.push('\n');
            shown += 1;
        }
        if shown < self.all {
            text.push_str(&format!("... (the first {shown} of {} {what})\n", self.all));
        }
        text.pop()?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_LINES, Sorted};

    #[test]
    fn the_first_lines_stay_whatever_comes() {
        let mut sorted = Sorted::default();
        for number in (0..MOST_LINES + 5).rev() {
            sorted.put(format!("{number:06}"));
        }
        let text = sorted.text(1 << 20, "entries").expect("lines");
        assert!(text.starts_with("000000\n000001\n"));
        assert!(text.ends_with("009999\n... (the first 10000 of 10005 entries)"));
    }

    #[test]
    fn it_stays_within_its_room() {
        let mut sorted = Sorted::default();
        for letter in ["c", "a", "b"] {
            sorted.put(letter.repeat(10));
        }
        let text = sorted.text(25, "entries").expect("lines");
        assert_eq!(
            text,
            "aaaaaaaaaa\nbbbbbbbbbb\n... (the first 2 of 3 entries)"
        );
        assert_eq!(Sorted::default().text(25, "entries"), None);
    }
}
