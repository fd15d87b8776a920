//! Shows how two texts differ, line by line, on a narrow terminal.

use std::time::Duration;

use similar::ChangeTag;

use crate::cli::style::{Color, Styled};
use crate::domain::counted::counted;
use crate::domain::text_diff;

/// Columns of a line with its sign.
const WIDTH: usize = 78;
/// Unchanged lines around a change.
const CONTEXT: usize = 2;
/// More lines than this are counted instead of shown.
const MAX_LINES: usize = 40;
/// After this time the changes that are shown may be more than necessary.
const MAX_TIME: Duration = Duration::from_secs(1);

/// The changes from `recorded` to `now`, with a `-` or a `+` before each line. Blanks at the end of a changed line are visible, and
/// so is a line break at the end that only one of the texts has.
pub fn diff(recorded: &str, now: &str) -> Styled {
    let mut lines: Vec<(ChangeTag, String)> = Vec::new();
    let last_line_break = changed_last_line_break(recorded, now);
    let (recorded, now) = (text_diff::lines(recorded), text_diff::lines(now));
    let groups = text_diff::changes(&recorded, &now, CONTEXT, MAX_TIME);
    for (index, group) in groups.into_iter().enumerate() {
        if index > 0 {
            lines.push((ChangeTag::Equal, "…".to_owned()));
        }
        for (tag, text) in group {
            let line = match tag {
                ChangeTag::Equal => text.to_owned(),
                ChangeTag::Delete | ChangeTag::Insert => show_trailing_blanks(text),
            };
            for part in wrap(&line) {
                lines.push((tag, part));
            }
        }
    }
    if let Some(tag) = last_line_break {
        lines.push((tag, "(line break at the end)".to_owned()));
    }
    let hidden = lines.len().saturating_sub(MAX_LINES);
    let mut styled = Styled::default();
    for (tag, line) in lines.iter().take(MAX_LINES) {
        styled = match tag {
            ChangeTag::Delete => styled.colored(Color::Red, format!("  - {line}")),
            ChangeTag::Insert => styled.colored(Color::Green, format!("  + {line}")),
            ChangeTag::Equal => styled.colored(Color::Dim, format!("    {line}")),
        }
        .plain("\n");
    }
    if hidden > 0 {
        let more = format!(
            "    … and {}; --json has all\n",
            counted(hidden, "more line")
        );
        styled = styled.colored(Color::Dim, more);
    }
    styled
}

/// `Delete` if only `recorded` ends with a line break, `Insert` if only `now` does. An empty text has no last line to end.
fn changed_last_line_break(recorded: &str, now: &str) -> Option<ChangeTag> {
    if recorded.is_empty() || now.is_empty() {
        return None;
    }
    match (recorded.ends_with('\n'), now.ends_with('\n')) {
        (true, false) => Some(ChangeTag::Delete),
        (false, true) => Some(ChangeTag::Insert),
        (true, true) | (false, false) => None,
    }
}

/// `·` for each space at the end, `→` for each tab.
fn show_trailing_blanks(line: &str) -> String {
    let text = line.trim_end_matches([' ', '\t']);
    let blanks = line[text.len()..].chars();
    let marks = blanks.map(|blank| if blank == '\t' { '→' } else { '·' });
    text.chars().chain(marks).collect()
}

/// The line in parts that fit the terminal.
fn wrap(line: &str) -> Vec<String> {
    let width = WIDTH - 4;
    let mut parts = Vec::new();
    let mut part = String::new();
    for word in line.split_inclusive(' ') {
        let mut word: Vec<char> = word.chars().collect();
        if part.chars().count() + word.len() > width && !part.is_empty() {
            parts.push(std::mem::take(&mut part).trim_end().to_owned());
        }
        while word.len() > width {
            parts.push(word.drain(..width).collect());
        }
        part.extend(word);
    }
    if !part.is_empty() || parts.is_empty() {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::diff;

    fn plain(text: &str) -> String {
        let mut plain = text.to_owned();
        for code in ["\u{1b}[31m", "\u{1b}[32m", "\u{1b}[2m", "\u{1b}[0m"] {
            plain = plain.replace(code, "");
        }
        plain
    }

    #[test]
    fn changes_of_blanks_and_line_breaks_are_visible() {
        for (recorded, now, expected) in [
            ("a \t", "a", "  - a·→\n  + a\n"),
            ("a\n", "a", "  - (line break at the end)\n"),
            ("a", "a\n", "  + (line break at the end)\n"),
            ("a\nb", "a\n", "    a\n  - b\n  + (line break at the end)\n"),
            ("a\n", "a\nb\n", "    a\n  + b\n"),
            ("a \nb", "a \nc", "    a \n  - b\n  + c\n"),
            ("", "a\n", "  + a\n"),
            ("a\n\n", "a\n", "    a\n  - \n"),
            ("a\n", "a\n", ""),
        ] {
            let shown = diff(recorded, now);
            assert_eq!(plain(shown.as_str()), expected, "{recorded:?} {now:?}");
        }
    }

    #[test]
    fn changed_lines_are_shown_with_their_neighbours() {
        let shown = diff("a\nb\nc\nd\ne\nf\n", "a\nb\nc\nD\ne\nf\n");
        let expected = "    b\n    c\n  - d\n  + D\n    e\n    f\n";
        assert_eq!(plain(shown.as_str()), expected);
        let long = plain(diff(&"word ".repeat(40), &"x".repeat(200)).as_str());
        assert!(
            long.lines().all(|line| line.chars().count() <= 80),
            "{long}"
        );
        let many = plain(diff("", &"line\n".repeat(90)).as_str());
        assert!(
            many.ends_with("… and 50 more lines; --json has all\n"),
            "{many}"
        );
    }
}
