//! Log lines as JSON objects: `timestamp`, `level`, the event's `message` and fields, `target`.
//!
//! tracing-subscriber's own format builds a map and formats each value twice, which took 6 % of a run of one turn.

use std::fmt::{self, Write};

use jiff::Timestamp;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_log::NormalizeEvent;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Formats events. Spans are not part of a line.
pub struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Events of the `log` crate have their origin in fields.
        let normalized = event.normalized_metadata();
        let metadata = normalized.as_ref().unwrap_or_else(|| event.metadata());
        let mut line = Line(String::with_capacity(512));
        write!(line.0, "{{\"timestamp\":\"{:.6}\"", Timestamp::now())?;
        line.text("level", metadata.level().as_str());
        event.record(&mut line);
        line.text("target", metadata.target());
        line.0.push_str("}\n");
        writer.write_str(&line.0)
    }
}

/// An object that is not closed.
struct Line(String);

impl Line {
    fn key(&mut self, name: &str) {
        self.0.push_str(",\"");
        self.0.push_str(name);
        self.0.push_str("\":");
    }

    fn text(&mut self, name: &str, text: &str) {
        self.key(name);
        let needs_escape = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
        if text.bytes().any(needs_escape) {
            self.0.push_str(&serde_json::Value::from(text).to_string());
            return;
        }
        self.0.push('"');
        self.0.push_str(text);
        self.0.push('"');
    }

    fn bare(&mut self, field: &Field, value: impl fmt::Display) {
        self.key(field.name());
        // Writing to a string cannot fail.
        let _ = write!(self.0, "{value}");
    }
}

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.bare(field, serde_json::Value::from(value)),
            false => self.bare(field, "null"),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.bare(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.bare(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.bare(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if !field.name().starts_with("log.") {
            self.text(field.name(), value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use serde_json::{Value, json};
    use tracing_subscriber::fmt::MakeWriter;

    use super::JsonLines;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").extend_from_slice(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Lines {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn fields_keep_their_types_and_every_text_is_escaped() {
        let lines = Lines::default();
        let subscriber = tracing_subscriber::fmt()
            .event_format(JsonLines)
            .with_writer(lines.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(
                run.id = %"run_\"1\"", count = 3_u64, change = -1_i64, share = 0.5, ratio = f64::NAN, is_last = true,
                error = None::<String>, path = "a\\b", list = ?["x"], "Line one\nline \"two\""
            );
        });
        let text = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("UTF-8");
        assert_eq!(text.lines().count(), 1, "{text}");
        let mut line: Value = serde_json::from_str(&text).expect("JSON");
        let timestamp = line["timestamp"].take();
        assert!(
            timestamp.as_str().is_some_and(|at| at.len() == 27),
            "{timestamp}"
        );
        assert_eq!(
            line,
            json!({
                "timestamp": null, "level": "WARN", "message": "Line one\nline \"two\"", "run.id": "run_\"1\"",
                "count": 3, "change": -1, "share": 0.5, "ratio": null, "is_last": true, "path": "a\\b",
                "list": "[\"x\"]", "target": module_path!(),
            })
        );
    }
}
