//! What `axed test` prints: a line for each test, the first difference of one that failed, and the totals.

use std::io::IsTerminal;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::output;
use crate::cli::style::{Color, Styled};
use crate::cli::test::case::{CaseResult, Outcome};
use crate::cli::test::diff;
use crate::domain::counted::counted;

/// Shows results on stdout as tests end.
pub struct Progress {
    is_silent: bool,
    has_status_line: bool,
    ended: usize,
}

impl Progress {
    pub fn new(is_silent: bool) -> Self {
        Self {
            is_silent,
            has_status_line: !is_silent && std::io::stderr().is_terminal(),
            ended: 0,
        }
    }

    pub fn show(&mut self, result: &CaseResult) {
        self.ended += 1;
        if self.is_silent {
            return;
        }
        self.clear();
        // If stdout is closed, the exit code still says how the tests ended.
        let _ = output::print_safe(describe(result).as_str());
        if self.has_status_line {
            output::eprint_status(format_args!("{} …", counted(self.ended, "test")));
        }
    }

    pub fn clear(&self) {
        if self.has_status_line {
            output::eprint_status(format_args!(""));
        }
    }
}

/// A line, and below it why the test failed.
fn describe(result: &CaseResult) -> Styled {
    let path = result.path.display();
    let mut attempts = match result.attempts.len() {
        0 | 1 => String::new(),
        count => format!(", {} of {count} passed", result.passes()),
    };
    if result.is_accepted {
        attempts.push_str(", the file is changed");
    }
    let duration = format_duration(result.duration);
    let line = match &result.outcome {
        Outcome::Passed => Styled::default().colored(Color::Green, "ok     "),
        Outcome::Failed => Styled::default().colored(Color::Red, "FAILED "),
        Outcome::Invalid { .. } | Outcome::ProviderFailed { .. } => {
            Styled::default().colored(Color::Red, "ERROR  ")
        }
    };
    let line = line
        .plain(&path)
        .colored(Color::Dim, format!("  {duration}{attempts}\n"));
    match &result.outcome {
        Outcome::Passed => line,
        Outcome::Failed => describe_failure(line, result),
        Outcome::Invalid { .. } | Outcome::ProviderFailed { .. } => {
            line.plain(format!("  {}\n", error_message(result)))
        }
    }
}

/// With the file and the line.
fn error_message(result: &CaseResult) -> String {
    match &result.outcome {
        Outcome::Invalid {
            line: Some(line),
            message,
        } => format!("{}:{line}: {message}", result.path.display()),
        Outcome::Invalid {
            line: None,
            message,
        } => format!("{}: {message}", result.path.display()),
        Outcome::ProviderFailed { message } => message.clone(),
        Outcome::Passed | Outcome::Failed => String::new(),
    }
}

fn describe_failure(mut text: Styled, result: &CaseResult) -> Styled {
    let Some(attempt) = result.failed_attempt() else {
        return text;
    };
    if let Some(divergence) = &attempt.divergence {
        let difference = &divergence.difference;
        text = text.plain(format!(
            "  {}\n  turn {}, {} (- recorded, + now):\n",
            divergence.path, divergence.turn, difference.field
        ));
        let changes = diff::diff(&difference.recorded, &difference.now);
        text = text.append(changes);
        let hint = match difference.is_acceptable && !result.is_accepted {
            true => "  --accept takes it over into the file\n",
            false => "  the file cannot take this over: save a new run with axed runs save\n",
        };
        text = text.colored(Color::Dim, hint);
    }
    for failed in &attempt.failed {
        text = text.plain(format!(
            "  expect.{}: {}\n",
            failed.assertion, failed.message
        ));
    }
    text
}

/// The totals.
pub struct Report {
    passed: usize,
    failed: usize,
    errors: usize,
    duration: Duration,
}

impl Report {
    pub fn new(results: &[CaseResult], duration: Duration) -> Self {
        let count = |is: fn(&Outcome) -> bool| results.iter().filter(|it| is(&it.outcome)).count();
        let passed = count(|it| matches!(it, Outcome::Passed));
        let failed = count(|it| matches!(it, Outcome::Failed));
        Self {
            passed,
            failed,
            errors: results.len() - passed - failed,
            duration,
        }
    }

    pub fn summary(&self) -> Styled {
        let Self {
            passed,
            failed,
            errors,
            duration,
        } = self;
        let color = match failed + errors {
            0 => Color::Green,
            _ => Color::Red,
        };
        let duration = format_duration(*duration);
        let mut text = format!("{passed} passed, {failed} failed");
        if *errors > 0 {
            text.push_str(&format!(", {errors} with errors"));
        }
        Styled::default().colored(color, format!("{text}, in {duration}"))
    }

    pub fn to_json(&self, results: &[CaseResult]) -> Value {
        json!({
            "passed": self.passed,
            "failed": self.failed,
            "errors": self.errors,
            "duration_ms": millis(self.duration),
            "tests": results.iter().map(result_json).collect::<Vec<_>>(),
        })
    }
}

fn result_json(result: &CaseResult) -> Value {
    let (status, line) = match &result.outcome {
        Outcome::Passed => ("passed", None),
        Outcome::Failed => ("failed", None),
        Outcome::Invalid { line, .. } => ("invalid", *line),
        Outcome::ProviderFailed { .. } => ("provider_failed", None),
    };
    let message = error_message(result);
    let attempts = result.attempts.iter().map(|attempt| {
        let divergence = attempt.divergence.as_ref().map(|it| {
            json!({
                "path": it.path, "turn": it.turn, "field": it.difference.field,
                "recorded": it.difference.recorded, "now": it.difference.now,
            })
        });
        let failed = attempt.failed.iter();
        let failed = failed.map(|it| json!({"assertion": it.assertion, "message": it.message}));
        json!({
            "passed": attempt.passed(), "divergence": divergence,
            "failed": failed.collect::<Vec<_>>(), "runs": attempt.runs,
            "tokens": attempt.tokens, "cost_usd": attempt.cost_usd,
        })
    });
    json!({
        "file": result.path.display().to_string(),
        "agent": result.agent,
        "status": status,
        "line": line,
        "error": (!message.is_empty()).then_some(message),
        "accepted": result.is_accepted,
        "duration_ms": millis(result.duration),
        "attempts": attempts.collect::<Vec<_>>(),
    })
}

/// Why a test did not pass, as plain text; `None` if it did.
pub fn failure_text(result: &CaseResult) -> Option<String> {
    match &result.outcome {
        Outcome::Passed => None,
        Outcome::Invalid { .. } | Outcome::ProviderFailed { .. } => Some(error_message(result)),
        Outcome::Failed => {
            let attempt = result.failed_attempt()?;
            let divergence = attempt.divergence.iter().map(|it| {
                format!(
                    "{}, turn {}, {}\nrecorded: {}\nnow: {}",
                    it.path,
                    it.turn,
                    it.difference.field,
                    it.difference.recorded,
                    it.difference.now
                )
            });
            let failed = attempt.failed.iter();
            let failed = failed.map(|it| format!("expect.{}: {}", it.assertion, it.message));
            Some(divergence.chain(failed).collect::<Vec<_>>().join("\n"))
        }
    }
}

/// Milliseconds below a second, else seconds.
fn format_duration(duration: Duration) -> String {
    match duration.as_millis() {
        millis @ 0..1000 => format!("{millis} ms"),
        _ => format!("{:.1} s", duration.as_secs_f64()),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
