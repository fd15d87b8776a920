//! Logs: their filter, format and output. Metrics and traces are in the modules below.

use std::io::{IsTerminal, Write};

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Telemetry};
use crate::domain::terminal_text;
use crate::telemetry::json_lines::JsonLines;

pub mod json_lines;
pub mod metrics;
#[cfg(feature = "otel")]
pub mod otlp;
pub mod prometheus;
pub mod traces;

/// The filter if the configuration has none.
const DEFAULT_FILTER: &str = "info";

/// Starts logging to stderr. Only the first call in a process has an effect. Fails if `telemetry.log` is not a valid filter.
pub fn init(settings: &Telemetry) -> Result<(), String> {
    let filter = parse_filter(settings)?;
    let terminal = std::io::stderr().is_terminal();
    let format = settings.log_format.unwrap_or(if terminal {
        LogFormat::Human
    } else {
        LogFormat::Json
    });
    // A closed stderr must not stop the daemon: lines that cannot be written are lost.
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false);
    let human = || TerminalSafeStderr(terminal_text::sanitize_log_line);
    let started = match format {
        LogFormat::Json => lines
            .event_format(JsonLines)
            .with_writer(|| TerminalSafeStderr(terminal_text::escape_json))
            .try_init(),
        LogFormat::Human if terminal => lines.with_writer(human).try_init(),
        LogFormat::Human => lines.with_ansi(false).with_writer(human).try_init(),
    };
    // An error means that this process logs already.
    drop(started);
    Ok(())
}

/// Checks the filter of the log.
///
/// # Errors
/// What is wrong with it; the text starts with its key.
pub fn check(settings: &Telemetry) -> Result<(), String> {
    parse_filter(settings).map(drop)
}

fn parse_filter(settings: &Telemetry) -> Result<EnvFilter, String> {
    let directives = settings.log.as_deref().unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::builder().parse(directives).map_err(|error| {
        format!("telemetry.log: \"{directives}\" is not a filter ({error}); write one such as \"info\" or \"axed=debug,warn\"")
    })?;
    // We log their errors ourselves. The MCP library logs whole messages, which may contain secrets, and the pool of connections each
    // one that has broken.
    let own_errors = [("rmcp", "rmcp=off"), ("deadpool", "deadpool=off")];
    Ok(own_errors
        .into_iter()
        .fold(filter, |filter, (library, off)| {
            match (directives.contains(library), off.parse()) {
                (false, Ok(off)) => filter.add_directive(off),
                _ => filter,
            }
        }))
}

/// Writes log lines to stderr without control characters: names and errors in them come from models and servers.
struct TerminalSafeStderr(fn(&str) -> String);

impl Write for TerminalSafeStderr {
    /// `formatted` is one whole event.
    fn write(&mut self, formatted: &[u8]) -> std::io::Result<usize> {
        if terminal_text::is_plain_line(formatted) {
            std::io::stderr().write_all(formatted)?;
        } else {
            let line = (self.0)(&String::from_utf8_lossy(formatted));
            std::io::stderr().write_all(line.as_bytes())?;
        }
        Ok(formatted.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Telemetry;

    #[test]
    fn filters_are_checked_and_init_is_idempotent() {
        let invalid = Telemetry {
            log: Some("=,=/[".to_owned()),
            ..Telemetry::default()
        };
        let error = super::init(&invalid).expect_err("not a filter");
        assert!(error.starts_with("telemetry.log: \"=,=/[\""), "{error}");
        assert_eq!(super::init(&Telemetry::default()), Ok(()));
        assert_eq!(super::init(&Telemetry::default()), Ok(()));
    }
}
