//! What the reasons mean for which services end their replies, on all wires: gateways pass on those of other services. Pure.

use crate::domain::message::ReplyLimit;
use crate::providers::{ErrorCategory, ProviderError, ReplyOutcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopKind {
    /// The model had nothing more to say, or came to a stop sequence.
    Normal,
    Limit(ReplyLimit),
    Filtered,
    /// The model called tools, or a turn of the service's own tools is not over.
    Continues,
    /// The service gave the reply up.
    Failure,
    Unknown,
}

impl StopKind {
    fn of(reason: &str) -> Self {
        let reason = reason.to_ascii_lowercase();
        let has = |parts: &[&str]| parts.iter().any(|part| reason.contains(part));
        let words = reason.split(|c: char| !c.is_ascii_alphanumeric());
        if has(&[
            "error",
            "abort",
            "cancel",
            "fail",
            "insufficient",
            "timeout",
            "timed_out",
            "interrupt",
            "unavailable",
            "overload",
            "malformed",
            "disconnect",
            "preempt",
            "evict",
            "killed",
            "crash",
            "exception",
            "quota",
            "rate_limit",
            "shutdown",
            "unload",
        ]) {
            Self::Failure
        } else if has(&["context"]) {
            Self::Limit(ReplyLimit::ContextWindow)
        } else if has(&["length", "max", "limit", "truncat"]) {
            Self::Limit(ReplyLimit::Tokens)
        } else if has(&[
            "filter",
            "refus",
            "safety",
            "sensitive",
            "prohibited",
            "block",
            "recitation",
            "spii",
            "guardrail",
            "moderation",
        ]) {
            Self::Filtered
        } else if has(&["tool", "function", "call", "pause"]) {
            Self::Continues
        } else if !has(&["incomplete"])
            && (has(&["stop", "complete", "finish", "eos", "endoftext"])
                || words.into_iter().any(|it| matches!(it, "end" | "done")))
        {
            Self::Normal
        } else {
            Self::Unknown
        }
    }
}

/// The limit that the reply reached.
pub fn limit(reason: Option<&str>) -> Option<ReplyLimit> {
    match StopKind::of(reason?) {
        StopKind::Limit(limit) => Some(limit),
        _ => None,
    }
}

/// What a reply has.
#[derive(Clone, Copy, Debug)]
pub struct ReplyContent {
    pub has_text: bool,
    pub has_calls: bool,
    pub is_refused: bool,
}

/// # Errors
/// The service gave the reply up, or the reply has no content and no reason that explains it.
pub fn outcome(reason: Option<&str>, content: ReplyContent) -> Result<ReplyOutcome, ProviderError> {
    let kind = reason.map(StopKind::of);
    let given_up = || {
        let reason = reason.unwrap_or_default();
        let category = match reason.contains("insufficient") || reason.contains("overload") {
            true => ErrorCategory::Overloaded,
            false => ErrorCategory::Server,
        };
        let message = format!("the service ended the reply before it was complete: {reason}");
        let message = crate::providers::error_mapping::sanitize_message(&message);
        ProviderError::new(category, message.unwrap_or_default())
    };
    Ok(match kind {
        Some(StopKind::Failure) => return Err(given_up()),
        _ if content.has_calls => ReplyOutcome::Complete,
        _ if content.is_refused => ReplyOutcome::Refused,
        Some(StopKind::Unknown) if content.has_text => return Err(given_up()),
        _ if content.has_text => ReplyOutcome::Complete,
        Some(StopKind::Normal) => ReplyOutcome::Complete,
        Some(StopKind::Limit(_)) => ReplyOutcome::Truncated,
        Some(StopKind::Filtered) => ReplyOutcome::Refused,
        None | Some(StopKind::Continues | StopKind::Unknown) => {
            let message = "response contains no content";
            return Err(ProviderError::new(ErrorCategory::Server, message));
        }
    })
}

/// The reason, unless it is a placeholder of a service that writes out that there is none.
pub fn known(reason: Option<String>) -> Option<String> {
    reason.filter(|reason| !is_placeholder(reason))
}

/// Whether a text stands for no value.
pub fn is_placeholder(text: &str) -> bool {
    matches!(text.trim(), "" | "null" | "None" | "none" | "undefined")
}

#[cfg(test)]
mod tests {
    use super::{ReplyContent, StopKind, outcome};
    use crate::domain::message::ReplyLimit;
    use crate::providers::ReplyOutcome;

    #[test]
    fn reasons_of_services_are_classified() {
        let table: [(StopKind, &[&str]); 7] = [
            (
                StopKind::Normal,
                &[
                    "stop",
                    "STOP",
                    "end_turn",
                    "stop_sequence",
                    "eos_token",
                    "COMPLETE",
                    "completed",
                    "<|im_end|>",
                    "done",
                    "finished",
                ],
            ),
            (
                StopKind::Limit(ReplyLimit::Tokens),
                &[
                    "length",
                    "max_tokens",
                    "MAX_TOKENS",
                    "max_output_tokens",
                    "model_length",
                ],
            ),
            (
                StopKind::Limit(ReplyLimit::ContextWindow),
                &["model_context_window_exceeded"],
            ),
            (
                StopKind::Filtered,
                &["content_filter", "refusal", "SAFETY", "sensitive"],
            ),
            (
                StopKind::Continues,
                &["tool_calls", "tool_use", "function_call", "pause_turn"],
            ),
            (
                StopKind::Failure,
                &[
                    "error",
                    "abort",
                    "aborted",
                    "network_error",
                    "insufficient_system_resource",
                    "cancelled",
                    "failed",
                    "MALFORMED_FUNCTION_CALL",
                    "timeout",
                    "unload",
                    "internal_server_error",
                ],
            ),
            (
                StopKind::Unknown,
                &["OTHER", "incomplete", "in_progress", "queued", "suspended"],
            ),
        ];
        for (kind, reasons) in table {
            for reason in reasons {
                assert_eq!(StopKind::of(reason), kind, "{reason}");
            }
        }
    }

    #[test]
    fn a_reply_that_the_service_gave_up_is_an_error() {
        let content = |has_text, has_calls| ReplyContent {
            has_text,
            has_calls,
            is_refused: false,
        };
        for reason in ["error", "insufficient_system_resource"] {
            for (has_text, has_calls) in [(true, false), (true, true), (false, true)] {
                assert!(outcome(Some(reason), content(has_text, has_calls)).is_err());
            }
        }
        assert!(outcome(Some("strange"), content(true, false)).is_err());
        let calls = outcome(Some("strange"), content(false, true));
        assert_eq!(calls.ok(), Some(ReplyOutcome::Complete));
        let text = outcome(None, content(true, false));
        assert_eq!(text.ok(), Some(ReplyOutcome::Complete));
        assert!(outcome(None, content(false, false)).is_err());
    }
}
