//! Keeps the first lines of many in sorted order, in bounded memory.

use std::collections::BTreeSet;

const MAX_LINES: usize = 10_000;

#[derive(Debug, Default)]
pub struct SortedLines {
    lines: BTreeSet<String>,
    total: usize,
}

impl SortedLines {
    /// Inserts a line; drops the last one if there are too many.
    pub fn insert(&mut self, line: String) {
        self.total += 1;
        self.lines.insert(line);
        if self.lines.len() > MAX_LINES {
            self.lines.pop_last();
        }
    }

    /// The lines in at most `max_bytes`, with a notice if some are left out; `None` if there are none.
    pub fn render(self, max_bytes: usize, noun: &str) -> Option<String> {
        let mut text = String::new();
        let mut shown_count = 0;
        for line in &self.lines {
            if text.len() + line.len() >= max_bytes && shown_count > 0 {
                break;
            }
            text.push_str(line);
            text.push('\n');
            shown_count += 1;
        }
        if shown_count < self.total {
            text.push_str(&format!(
                "... (the first {shown_count} of {} {noun})\n",
                self.total
            ));
        }
        text.pop()?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_LINES, SortedLines};

    #[test]
    fn only_the_first_lines_are_kept() {
        let mut sorted = SortedLines::default();
        for number in (0..MAX_LINES + 5).rev() {
            sorted.insert(format!("{number:06}"));
        }
        let text = sorted.render(1 << 20, "entries").expect("lines");
        assert!(text.starts_with("000000\n000001\n"));
        assert!(text.ends_with("009999\n... (the first 10000 of 10005 entries)"));
    }

    #[test]
    fn text_stays_within_max_bytes() {
        let mut sorted = SortedLines::default();
        for letter in ["c", "a", "b"] {
            sorted.insert(letter.repeat(10));
        }
        let text = sorted.render(25, "entries").expect("lines");
        assert_eq!(
            text,
            "aaaaaaaaaa\nbbbbbbbbbb\n... (the first 2 of 3 entries)"
        );
        assert_eq!(SortedLines::default().render(25, "entries"), None);
    }
}
