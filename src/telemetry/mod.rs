//! Logs: their filter, format and output. Metrics and traces are in the modules below.

use std::io::{IsTerminal, Write};

use jiff::Timestamp;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::config::{LogFormat, Telemetry};
use crate::domain::terminal_text;
use crate::telemetry::json_lines::JsonLines;

pub mod json_lines;
pub mod log_queue;
pub mod metrics;
#[cfg(feature = "otel")]
pub mod otlp;
pub mod process;
pub mod prometheus;
pub mod traces;

/// The filter if the configuration has none.
const DEFAULT_FILTER: &str = "info";
const LEVELS: &str = "off, error, warn, info, debug, trace";

/// Starts logging to stderr. Only the first call in a process has an effect. Fails if `telemetry.log` is not a valid filter.
pub fn init(settings: &Telemetry) -> Result<(), String> {
    let filter = parse_filter(settings)?;
    let terminal = std::io::stderr().is_terminal();
    let format = log_format(settings);
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false);
    let human = || LogWriter(LogFormat::Human);
    let started = match format {
        LogFormat::Json => lines
            .event_format(JsonLines)
            .with_writer(|| LogWriter(LogFormat::Json))
            .try_init(),
        LogFormat::Human if terminal => lines.with_writer(human).try_init(),
        LogFormat::Human => lines.with_ansi(false).with_writer(human).try_init(),
    };
    match started {
        Ok(()) => log_queue::start().map_err(|error| format!("no thread for the log: {error}")),
        // This process logs already.
        Err(_) => Ok(()),
    }
}

/// The format of the log on stderr.
pub fn log_format(settings: &Telemetry) -> LogFormat {
    let is_terminal = std::io::stderr().is_terminal();
    settings.log_format.unwrap_or(match is_terminal {
        true => LogFormat::Human,
        false => LogFormat::Json,
    })
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
    let invalid = |why: &str| {
        format!(
            "telemetry.log: \"{directives}\" is not a filter ({why}); write one such as \"info\" or \"axed=debug,warn\""
        )
    };
    // The parser takes the spaces for a part of the names.
    let words = directives.split(',').map(str::trim);
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    if words.is_empty() {
        return Err(invalid(&format!("it is empty; levels are {LEVELS}")));
    }
    if let Some(word) = words.iter().find(|word| !is_level_or_target(word)) {
        let why = format!("\"{word}\" is no level; levels are {LEVELS}");
        return Err(invalid(&why));
    }
    let filter = EnvFilter::builder()
        .parse(words.join(","))
        .map_err(|error| invalid(&error.to_string()))?;
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

/// A word without a level is the name of a module to the parser, which enables its lines and no others: a mistyped level would
/// silence the log. Only our own modules, and paths, are accepted without one.
fn is_level_or_target(directive: &str) -> bool {
    directive.contains(['=', '['])
        || directive.contains("::")
        || directive.starts_with("axed")
        || directive.parse::<LevelFilter>().is_ok()
}

/// Queues log lines without control characters: names and errors in them come from models and servers.
struct LogWriter(LogFormat);

impl LogWriter {
    /// The line before the first one after so many were dropped.
    fn dropped_line(&self, count: u64) -> String {
        let (time, target) = (Timestamp::now(), module_path!());
        let message = format!("Log lines were dropped because nobody read them in time: {count}");
        match self.0 {
            LogFormat::Json => format!(
                "{{\"timestamp\":\"{time:.6}\",\"level\":\"WARN\",\"message\":\"{message}\",\"dropped\":{count},\"target\":\"{target}\"}}\n"
            ),
            LogFormat::Human => format!("{time:.6}  WARN {target}: {message}\n"),
        }
    }
}

impl Write for LogWriter {
    /// `formatted` is one whole event.
    fn write(&mut self, formatted: &[u8]) -> std::io::Result<usize> {
        let describe = |count| self.dropped_line(count);
        if terminal_text::is_plain_line(formatted) {
            log_queue::push(formatted, describe);
        } else {
            let text = String::from_utf8_lossy(formatted);
            let line = match self.0 {
                LogFormat::Json => terminal_text::escape_json(&text),
                LogFormat::Human => terminal_text::sanitize_log_line(&text),
            };
            log_queue::push(line.as_bytes(), describe);
        }
        Ok(formatted.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Telemetry;

    fn with_filter(filter: &str) -> Telemetry {
        Telemetry {
            log: Some(filter.to_owned()),
            ..Telemetry::default()
        }
    }

    #[test]
    fn a_mistyped_level_is_no_filter() {
        for filter in [
            "info",
            "WARN",
            "off",
            "4",
            "axed=debug, warn",
            "axed",
            "hyper=trace",
            "info,rmcp=debug",
            "hyper::proto",
            "error,[run{id}]=trace",
        ] {
            assert_eq!(super::check(&with_filter(filter)), Ok(()), "{filter}");
        }
        for filter in ["inof", "axed=debug,inof", "warning", "9", ",", " "] {
            let error = super::check(&with_filter(filter)).expect_err(filter);
            let start = format!("telemetry.log: \"{filter}\" is not a filter (");
            assert!(error.starts_with(&start), "{error}");
            assert!(
                error.contains("levels are off, error, warn, info, debug, trace"),
                "{error}"
            );
        }
    }

    #[test]
    fn filters_are_checked_and_init_is_idempotent() {
        let error = super::init(&with_filter("=,=/[")).expect_err("not a filter");
        assert!(error.starts_with("telemetry.log: \"=,=/[\""), "{error}");
        assert_eq!(super::init(&Telemetry::default()), Ok(()));
        assert_eq!(super::init(&Telemetry::default()), Ok(()));
    }
}
