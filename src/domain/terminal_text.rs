//! Makes untrusted text safe for a terminal and for pages: removes control sequences, bidirectional controls and invisible
//! characters.

use std::fmt::Write;

/// Replaces an unsafe character.
const REPLACEMENT: char = '\u{fffd}';

/// Sanitizes a text of several lines. Keeps line breaks, tabs, and joiners, which scripts and emoji need.
pub fn sanitize_lines(text: &str) -> String {
    let sanitize = |c: char| match c {
        '\n' | '\t' => c,
        c if is_joiner(c) => c,
        c if is_unsafe(c) => REPLACEMENT,
        c => c,
    };
    // Line breaks of other systems.
    text.replace("\r\n", "\n").chars().map(sanitize).collect()
}

/// Sanitizes a text for one line. Line breaks and tabs become spaces.
pub fn sanitize_line(text: &str) -> String {
    let sanitize = |c: char| match c {
        '\n' | '\t' => ' ',
        c if is_joiner(c) => c,
        c if is_unsafe(c) => REPLACEMENT,
        c => c,
    };
    text.replace("\r\n", "\n").chars().map(sanitize).collect()
}

/// Replaces a character that changes the order of those after it by a visible mark. Others stay, such as the marks that texts
/// written from right to left need.
pub fn mark_reordering(c: char) -> char {
    if is_reordering(c) { REPLACEMENT } else { c }
}

/// Whether the line is printable ASCII, which needs no change; it may end with a line break.
pub fn is_plain_line(line: &[u8]) -> bool {
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    text.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Writes every unsafe character of a JSON text as `\uXXXX`. The result is equivalent JSON.
pub fn escape_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\n' | '\t' => escaped.push(c),
            c if is_unsafe(c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(escaped, "\\u{unit:04x}");
                }
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// Sanitizes a formatted log line. Keeps colours; a line break within it becomes `\n`.
pub fn sanitize_log_line(formatted: &str) -> String {
    let line = formatted.strip_suffix('\n').unwrap_or(formatted);
    let mut sanitized = String::with_capacity(formatted.len());
    let mut rest = line;
    while let Some(c) = rest.chars().next() {
        if let Some(length) = color_sequence_len(rest) {
            sanitized.push_str(&rest[..length]);
            rest = &rest[length..];
            continue;
        }
        rest = &rest[c.len_utf8()..];
        match c {
            '\t' => sanitized.push(c),
            c if is_joiner(c) => sanitized.push(c),
            c if is_unsafe(c) => sanitized.extend(c.escape_default()),
            c => sanitized.push(c),
        }
    }
    if formatted.ends_with('\n') {
        sanitized.push('\n');
    }
    sanitized
}

/// The length of the colour or style sequence at the start of the text.
fn color_sequence_len(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("\u{1b}[")?;
    let parameters = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
    let end = parameters.strip_prefix('m')?;
    Some(text.len() - end.len())
}

/// Some scripts and emoji need these characters.
fn is_joiner(c: char) -> bool {
    matches!(c, '\u{200c}' | '\u{200d}' | '\u{fe00}'..='\u{fe0f}')
}

fn is_reordering(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Terminal controls (C0, DEL, C1), bidirectional controls, other line breaks, and invisible characters.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || is_reordering(c)
        || matches!(c,
            // Marks of direction.
            '\u{061c}' | '\u{200e}' | '\u{200f}'
            // Line breaks.
            | '\u{2028}' | '\u{2029}'
            // Unicode's default-ignorable characters.
            | '\u{00ad}' | '\u{034f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}'
            | '\u{206a}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
            | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{
        escape_json, is_plain_line, mark_reordering, sanitize_line, sanitize_lines,
        sanitize_log_line,
    };

    /// A clear screen by C0 and by C1, a bidirectional override, a hidden tag, a soft hyphen.
    const HOSTILE: &str =
        "a\u{1b}[2J\u{9b}2J\r\u{8}\u{7f}\u{202e}b\u{2066}c\u{e0041}\u{ad}\u{200b}d";

    #[test]
    fn a_text_cannot_control_the_terminal() {
        assert_eq!(
            sanitize_lines("a\n\tb\u{1b}[2Jc\r"),
            "a\n\tb\u{fffd}[2Jc\u{fffd}"
        );
        assert_eq!(sanitize_lines("a\r\nb\n"), "a\nb\n");
        assert_eq!(sanitize_line("a\r\nb\tc"), "a b c");
        for sanitized in [
            sanitize_lines(HOSTILE),
            sanitize_line(HOSTILE),
            escape_json(HOSTILE),
            sanitize_log_line(HOSTILE),
        ] {
            let is_plain = |c: char| c == '\u{fffd}' || (' '..='~').contains(&c);
            assert!(sanitized.chars().all(is_plain), "{sanitized:?}");
        }
    }

    #[test]
    fn a_page_shows_what_reorders_a_text() {
        let marked: String = "a\u{202e}b\u{2069}c\u{200f}\r\n👩\u{200d}💻"
            .chars()
            .map(mark_reordering)
            .collect();
        assert_eq!(marked, "a\u{fffd}b\u{fffd}c\u{200f}\r\n👩\u{200d}💻");
    }

    #[test]
    fn ordinary_text_stays_unchanged() {
        for text in ["Grüße, 世界", "می‌خواهم", "👩‍💻 ❤️", "שלום", "e\u{301}"]
        {
            assert_eq!(sanitize_lines(text), text);
            assert_eq!(sanitize_line(text), text);
        }
    }

    #[test]
    fn a_plain_line_stays_unchanged() {
        let line = "{\"message\":\"a ~ b\"}\n";
        assert!(is_plain_line(line.as_bytes()));
        assert_eq!(sanitize_log_line(line), line);
        assert_eq!(escape_json(line), line);
        for other in ["a\nb\n", "a\tb", "\u{1b}[2J", "\u{7f}", "\u{e9}"] {
            assert!(!is_plain_line(other.as_bytes()), "{other:?}");
        }
    }

    #[test]
    fn json_stays_the_same_value() {
        let value = json!({"text": HOSTILE, "\u{202e}key": "👩‍💻"});
        let escaped = escape_json(&serde_json::to_string_pretty(&value).expect("JSON"));
        assert!(
            escaped.contains("\\u009b2J") && escaped.contains("\\udb40\\udc41"),
            "{escaped}"
        );
        assert_eq!(
            serde_json::from_str::<Value>(&escaped).expect("JSON"),
            value
        );
    }

    #[test]
    fn a_log_line_keeps_its_colours_and_stays_one_line() {
        assert_eq!(
            sanitize_log_line(
                "\u{1b}[2m2026\u{1b}[0m \u{1b}[1;32mINFO\u{1b}[0m a\u{1b}[2J\nb\u{202e}\n"
            ),
            "\u{1b}[2m2026\u{1b}[0m \u{1b}[1;32mINFO\u{1b}[0m a\\u{1b}[2J\\nb\\u{202e}\n"
        );
    }
}
