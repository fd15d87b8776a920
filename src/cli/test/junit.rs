//! Writes the results as JUnit XML, in the form that CI services read.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use crate::cli::test::case::{CaseResult, Outcome};
use crate::cli::test::report;

pub fn write(path: &Path, results: &[CaseResult], duration: Duration) -> anyhow::Result<()> {
    std::fs::write(path, to_xml(results, duration))
        .with_context(|| format!("could not write {}", path.display()))
}

fn to_xml(results: &[CaseResult], duration: Duration) -> String {
    let count = |is: fn(&Outcome) -> bool| results.iter().filter(|it| is(&it.outcome)).count();
    let failures = count(|it| matches!(it, Outcome::Failed));
    let errors = results.len() - failures - count(|it| matches!(it, Outcome::Passed));
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let seconds = duration.as_secs_f64();
    // Writing to a string cannot fail.
    let _ = writeln!(
        xml,
        "<testsuites>\n<testsuite name=\"axed\" tests=\"{}\" failures=\"{failures}\" errors=\"{errors}\" time=\"{seconds:.3}\">",
        results.len()
    );
    for result in results {
        let name = escape(&result.path.display().to_string());
        let agent = escape(&result.agent);
        let seconds = result.duration.as_secs_f64();
        let _ = write!(
            xml,
            "<testcase name=\"{name}\" classname=\"{agent}\" file=\"{name}\" time=\"{seconds:.3}\""
        );
        let element = match &result.outcome {
            Outcome::Failed => "failure",
            _ => "error",
        };
        let _ = match report::failure_text(result) {
            None => writeln!(xml, "/>"),
            Some(text) => {
                let text = escape(&text);
                let first = text.lines().next().unwrap_or_default();
                writeln!(
                    xml,
                    "><{element} message=\"{first}\">{text}</{element}></testcase>"
                )
            }
        };
    }
    xml.push_str("</testsuite>\n</testsuites>\n");
    xml
}

/// For texts and attributes. Characters that XML 1.0 does not allow become U+FFFD.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(character),
            '\0'..' ' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn texts_are_safe_in_xml() {
        assert_eq!(
            escape("a<b & \"c\"\u{1b}[2J"),
            "a&lt;b &amp; &quot;c&quot;\u{fffd}[2J"
        );
    }
}
