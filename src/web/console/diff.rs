//! How texts differ: lines of a file, and words of two texts side by side.

use std::time::Duration;

use maud::{Markup, html};
use similar::ChangeTag;

use crate::domain::counted::counted;
use crate::domain::terminal_text;
use crate::domain::text_diff;
use crate::web::console::format;

/// Unchanged lines around a change.
const CONTEXT: usize = 3;
/// More lines than this are counted instead of shown.
const MAX_LINES: usize = 400;
const MAX_TIME: Duration = Duration::from_millis(50);

/// The lines that change, with a sign before each.
pub fn lines(before: &str, after: &str) -> Markup {
    let (before, after) = (text_diff::lines(before), text_diff::lines(after));
    let groups = text_diff::changes(&before, &after, CONTEXT, MAX_TIME);
    let count: usize = groups.iter().map(Vec::len).sum();
    html! {
        div.lines tabindex="0" role="group" aria-label="Changed lines" {
            @if groups.is_empty() { p.muted.small { "Nothing changes." } }
            @for (tag, line) in groups.iter().flatten().take(MAX_LINES) {
                @match tag {
                    ChangeTag::Delete => pre.removed { "- " (shown(line)) },
                    ChangeTag::Insert => pre.added { "+ " (shown(line)) },
                    ChangeTag::Equal => pre { "  " (shown(line)) },
                }
            }
        }
        @if count > MAX_LINES { p.muted.small { (counted(count - MAX_LINES, "more line")) "." } }
    }
}

/// Hidden characters are `\uXXXX`: a person approves what is shown.
pub fn shown(line: &str) -> String {
    let parts = line.split('\t').map(terminal_text::escape_json);
    parts.collect::<Vec<_>>().join("\t")
}

/// Both texts, with the words marked that only one of them has.
pub fn words(before: &str, after: &str) -> (Markup, Markup) {
    let (before, after) = (split_words(before), split_words(after));
    let all = before.len() + after.len();
    let groups = text_diff::changes(&before, &after, all, MAX_TIME);
    let pieces: Vec<_> = groups.into_iter().flatten().collect();
    if pieces.is_empty() {
        let text = html! { (format::prose(&before.concat())) };
        return (text.clone(), text);
    }
    let side = |changed: ChangeTag| {
        html! {
            @for (tag, word) in &pieces {
                @if *tag == ChangeTag::Equal { (format::prose(word)) }
                @else if *tag == changed { mark { (format::prose(word)) } }
            }
        }
    };
    (side(ChangeTag::Delete), side(ChangeTag::Insert))
}

/// Words and the blanks between them.
fn split_words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let is_blank = first.is_whitespace();
        let end = rest.find(|letter: char| letter.is_whitespace() != is_blank);
        let (word, after) = rest.split_at(end.unwrap_or(rest.len()));
        words.push(word);
        rest = after;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::{lines, words};

    #[test]
    fn changed_lines_have_a_sign_and_hidden_characters_are_shown() {
        let html = lines("a\nb\nc\n", "a\nB\u{202e}\nc\n").into_string();
        for part in [">  a<", ">- b<", ">+ B\\u202e<"] {
            assert!(html.contains(part), "{part} is missing in {html}");
        }
        assert!(lines("a", "a").into_string().contains("Nothing changes"));
    }

    #[test]
    fn words_of_one_text_are_marked() {
        let (before, after) = words("the <old> page", "the new page");
        assert_eq!(before.into_string(), "the <mark>&lt;old&gt;</mark> page");
        assert_eq!(after.into_string(), "the <mark>new</mark> page");
        assert_eq!(words("same", "same").0.into_string(), "same");
    }
}
