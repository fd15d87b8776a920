//! Converts a service's error to a [`ProviderError`], from a status, headers and a body, or from an event of a stream. Pure.
//! Reads the error bodies of all wires in one place, because some servers send the error bodies of another wire.

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use jiff::fmt::{rfc2822, strtime};
use jiff::tz::TimeZone;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::providers::{ErrorCategory, MAX_MESSAGE_CHARS, ProviderError, lenient_json, surrogates};

/// The longest body, in bytes, that counts as a message although it is not JSON.
const MAX_PLAIN_BODY: usize = 300;
/// How deep messages are searched, and how many elements of a list.
const MAX_DEPTH: u8 = 5;
const MAX_LIST: usize = 8;
/// Longer values of `retry-after` are reduced to this.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Codes of services for a request that is longer than the model's context, in lower case.
const TOO_LONG_KINDS: [&str; 7] = [
    "context_length",
    "context_size",
    "context_window",
    "prompt_too_long",
    "input_too_long",
    "request_too_large",
    "max_prompt_tokens",
];
/// Words of services for the same, in lower case: OpenAI, vLLM and the many with its words; Anthropic; Bedrock; xAI; llama.cpp;
/// Moonshot; Zhipu; DashScope; Groq; TGI.
const TOO_LONG_PHRASES: [&str; 18] = [
    "context length",
    "context window",
    "context size",
    "context limit",
    "prompt is too long",
    "prompt too long",
    "prompt exceeds",
    "input is too long",
    "input too long",
    "maximum prompt length",
    "input length",
    "model token limit",
    "request too large",
    "length of the messages",
    "message size",
    "too many tokens",
    "inputs` tokens",
    "conversation is too long",
];

/// Codes of services for an account that has used up what it paid for, in lower case: OpenAI; DeepSeek; Moonshot; xAI.
const QUOTA_KINDS: [&str; 5] = [
    "insufficient_quota",
    "billing_hard_limit_reached",
    "insufficient_balance",
    "exceeded_current_quota_error",
    "credits_exhausted",
];

/// The error of a response with an error status. `body` may be empty if it could not be read.
pub fn from_status(status: StatusCode, body: &str, retry_after: Option<Duration>) -> ProviderError {
    let parsed = ErrorBody::parse(body);
    let category = match category_of_status(status.as_u16()) {
        ErrorCategory::Server
            if status == StatusCode::SERVICE_UNAVAILABLE && parsed.mentions_overload() =>
        {
            ErrorCategory::Overloaded
        }
        category => category,
    };
    let is_too_long = parsed.is_too_long(category);
    let is_quota_spent = parsed.is_quota_spent();
    let message = parsed
        .message
        .or_else(|| {
            let reason = status.canonical_reason()?;
            Some(match status.is_redirection() {
                true => format!("{reason}: redirects are not followed; check base_url"),
                false => reason.to_owned(),
            })
        })
        .unwrap_or_else(|| format!("HTTP {}", status.as_u16()));
    ProviderError {
        retry_after: retry_after.or(parsed.retry_after),
        is_quota_spent,
        ..refusal(category, message, is_too_long)
    }
}

/// The error in a response with a success status: an event of a stream, or a whole body.
pub fn from_error_body(body: &str) -> ProviderError {
    let parsed = ErrorBody::parse(body);
    let category = parsed
        .code
        .map(category_of_status)
        .or_else(|| category_of_kind(&parsed.kind))
        .unwrap_or(match parsed.mentions_overload() {
            true => ErrorCategory::Overloaded,
            false => ErrorCategory::Server,
        });
    let is_too_long = parsed.is_too_long(category);
    let is_quota_spent = parsed.is_quota_spent();
    let message = parsed
        .message
        .unwrap_or_else(|| "the service reported an error without a message".to_owned());
    ProviderError {
        retry_after: parsed.retry_after,
        is_quota_spent,
        ..refusal(category, message, is_too_long)
    }
}

/// Some services report a request that is too long as a fault of their own; a repetition would be as long.
fn refusal(category: ErrorCategory, message: String, is_too_long: bool) -> ProviderError {
    let category = match is_too_long {
        true => ErrorCategory::BadRequest,
        false => category,
    };
    ProviderError {
        is_too_long,
        ..ProviderError::new(category, message)
    }
}

/// The error that a body or a message with a success status reports instead of a reply, or beside a part of one.
pub fn reported_error(text: &str) -> Option<ProviderError> {
    let list: Vec<&RawValue> = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).ok()?,
        false => Vec::new(),
    };
    let is_error = match list.first() {
        Some(first) => is_error_object(first.get()),
        None => is_error_object(text),
    };
    is_error.then(|| from_error_body(text))
}

/// The error that a service reports as a short plain text.
pub fn plain_error(body: &str) -> Option<ProviderError> {
    let message = ErrorBody::parse(body).message?;
    Some(ProviderError::new(ErrorCategory::Server, message))
}

fn is_error_object(text: &str) -> bool {
    let Some(fields) = lenient_json::fields(text) else {
        return false;
    };
    let get = |name: &str| {
        let field = fields.iter().find(|(key, _)| key == name);
        field.map(|(_, value)| value.get())
    };
    let names_error = |name| matches!(get(name), Some("\"error\"" | "\"ERROR\""));
    let is_reported = ["error", "errors"]
        .into_iter()
        .filter_map(get)
        .any(|it| !is_blank_error(it))
        || names_error("object")
        || names_error("type")
        || names_error("status")
        || get("success") == Some("false")
        || get("base_resp").is_some_and(has_status_code);
    let begins = |name, start: &str| get(name).is_some_and(|value| value.starts_with(start));
    let is_reply = ["choices", "content", "output"]
        .into_iter()
        .filter_map(get)
        .any(|value| value.starts_with('[') || !lenient_json::is_blank(value))
        || [
            "message",
            "delta",
            "item",
            "part",
            "response",
            "content_block",
        ]
        .into_iter()
        .any(|name| begins(name, "{"))
        || ["\"response.", "\"content_block", "\"message_", "\"ping"]
            .into_iter()
            .any(|kind| begins("type", kind));
    let has_message = || {
        let keys = MESSAGE_KEYS.iter().filter(|name| **name != "base_resp");
        let mut messages = keys.filter_map(|name| get(name));
        messages.any(|it| it.starts_with(['"', '[', '{']) && !is_blank_error(it))
    };
    is_reported || !is_reply && has_message()
}

/// Whether the code of MiniMax's `base_resp` is an error's.
fn has_status_code(base_resp: &str) -> bool {
    #[derive(Deserialize)]
    struct BaseResponse {
        #[serde(default)]
        status_code: i64,
    }
    let parsed = serde_json::from_str::<BaseResponse>(base_resp);
    parsed.is_ok_and(|parsed| parsed.status_code != 0)
}

/// Whether the value of an error field says that there is none: some services always send the field.
pub fn is_blank_error(json: &str) -> bool {
    fn is_blank(value: &Value) -> bool {
        match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.trim().is_empty(),
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::Array(list) => list.iter().all(is_blank),
            Value::Object(fields) => fields.values().all(is_blank),
            Value::Bool(true) => false,
        }
    }
    serde_json::from_str::<Value>(json).is_ok_and(|value| is_blank(&value))
}

/// The keys of messages, and of what contains them.
const MESSAGE_KEYS: [&str; 15] = [
    "error",
    "errors",
    "message",
    "Message",
    "msg",
    "detail",
    "error_message",
    "errorMessage",
    "error_msg",
    "err_msg",
    "error_description",
    "base_resp",
    "status_msg",
    "fault",
    "faultstring",
];
/// The keys of waits, and the seconds in their unit.
const WAIT_KEYS: [(&str, f64); 8] = [
    ("retryDelay", 1.0),
    ("retry_delay", 1.0),
    ("retryAfter", 1.0),
    ("retry_after", 1.0),
    ("retry_after_seconds", 1.0),
    ("retry-after", 1.0),
    ("retry_after_ms", 1e-3),
    ("retryAfterMs", 1e-3),
];

/// The wait that a service requests with `retry-after-ms` (OpenAI) or `retry-after` (RFC 9110: seconds or a date).
pub fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let seconds = match (text("retry-after-ms"), text("retry-after")) {
        (Some(ms), _) if ms.trim().parse::<f64>().is_ok() => ms.trim().parse::<f64>().ok()? / 1e3,
        (_, Some(value)) => match value.trim().parse::<f64>() {
            Ok(seconds) => seconds,
            Err(_) => {
                let date = http_date(value.trim())?;
                (date.as_second() - now.as_second()).max(0) as f64
            }
        },
        _ => return None,
    };
    bounded_wait(seconds)
}

fn bounded_wait(seconds: f64) -> Option<Duration> {
    (seconds >= 0.0).then(|| Duration::from_secs_f64(seconds.min(MAX_RETRY_AFTER.as_secs_f64())))
}

/// The wait in the fields of an error.
fn wait_in(json: &Value, depth: u8) -> Option<Duration> {
    let seconds = |value: &Value, unit: f64| match value {
        Value::Number(number) => bounded_wait(number.as_f64()? * unit),
        Value::String(text) => bounded_wait(match text.trim().parse::<f64>() {
            Ok(number) => number * unit,
            Err(_) => parse_seconds(text)?,
        }),
        // Protobuf's duration.
        Value::Object(fields) => {
            let part = |name| fields.get(name).and_then(Value::as_f64);
            bounded_wait(part("seconds")? + part("nanos").unwrap_or(0.0) / 1e9)
        }
        _ => None,
    };
    let inner: Vec<&Value> = match json {
        Value::Object(fields) => {
            let mut waits = WAIT_KEYS.iter();
            let own = waits.find_map(|(key, unit)| seconds(fields.get(*key)?, *unit));
            if own.is_some() {
                return own;
            }
            fields.values().collect()
        }
        Value::Array(list) => list.iter().take(MAX_LIST).collect(),
        _ => return None,
    };
    let depth = depth.checked_sub(1)?;
    inner.into_iter().find_map(|value| wait_in(value, depth))
}

/// The wait that a message asks for, such as "try again in 1m2.5s" or "retry after 20 seconds".
fn wait_in_text(message: &str) -> Option<Duration> {
    let message = message.to_ascii_lowercase();
    let starts = [
        "again in ",
        "again after ",
        "retry in ",
        "retry after ",
        "retrying in ",
    ];
    let mut rests = starts.iter().filter_map(|start| {
        let at = message.find(start)?;
        parse_seconds(&message[at + start.len()..])
    });
    bounded_wait(rests.next()?)
}

/// The seconds that a text begins with: numbers with units, as `1h2m3.5s` or `20 seconds`.
fn parse_seconds(text: &str) -> Option<f64> {
    let mut seconds = None;
    let mut rest = text.trim_start();
    while rest.starts_with(|c: char| c.is_ascii_digit()) {
        let is_number = |c: char| c.is_ascii_digit() || c == '.';
        let end = rest.find(|c| !is_number(c)).unwrap_or(rest.len());
        let number: f64 = rest[..end].trim_end_matches('.').parse().ok()?;
        let after = rest[end..].trim_start();
        let end = after.find(|c: char| !c.is_ascii_alphabetic());
        let unit = &after[..end.unwrap_or(after.len())];
        let unit_seconds = match unit.to_ascii_lowercase().as_str() {
            "ms" | "millisecond" | "milliseconds" => 1e-3,
            "s" | "sec" | "secs" | "second" | "seconds" => 1.0,
            "m" | "min" | "mins" | "minute" | "minutes" => 60.0,
            "h" | "hr" | "hour" | "hours" => 3600.0,
            "d" | "day" | "days" => 86_400.0,
            _ => break,
        };
        seconds = Some(seconds.unwrap_or(0.0) + number * unit_seconds);
        rest = after[unit.len()..].trim_start();
    }
    seconds
}

/// A date in one of the three formats that a recipient must accept (RFC 9110, section 5.6.7).
fn http_date(text: &str) -> Option<Timestamp> {
    let parse_as = |format: &str| {
        let date = strtime::parse(format, text).ok()?.to_datetime().ok()?;
        Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp())
    };
    let imf_date = rfc2822::parse(text).map(|date| date.timestamp());
    imf_date
        .ok()
        .or_else(|| parse_as("%A, %d-%b-%y %H:%M:%S GMT"))
        .or_else(|| parse_as("%a %b %e %H:%M:%S %Y"))
}

fn category_of_status(status: u16) -> ErrorCategory {
    match status {
        401 | 403 => ErrorCategory::Auth,
        408 => ErrorCategory::Timeout,
        429 => ErrorCategory::RateLimit,
        529 => ErrorCategory::Overloaded,
        // A retry can succeed after a conflict with another request or a request that was too early.
        409 | 425 => ErrorCategory::Server,
        400..=499 => ErrorCategory::BadRequest,
        _ => ErrorCategory::Server,
    }
}

/// The category of an error's `type` and `code` as Anthropic, OpenAI and llama.cpp send them.
fn category_of_kind(kind: &str) -> Option<ErrorCategory> {
    let has = |terms: &[&str]| terms.iter().any(|term| kind.contains(term));
    // More specific terms come first: OpenAI's error for an invalid key is also an `invalid_request_error`.
    Some(if has(&["overloaded"]) {
        ErrorCategory::Overloaded
    } else if has(&[
        "rate_limit",
        "too_many_requests",
        "toomanyrequests",
        "ratelimit",
        "throttl",
        "quota",
        "resource_exhausted",
        "resource_unavailable",
    ]) {
        ErrorCategory::RateLimit
    } else if has(&[
        "authentication",
        "permission",
        "invalid_api_key",
        "unauthorized",
        "unauthenticated",
    ]) {
        ErrorCategory::Auth
    } else if has(&["timeout", "deadline_exceeded"]) {
        ErrorCategory::Timeout
    } else if has(&[
        "invalid_request",
        "invalid_argument",
        "validation",
        "bad_request",
        "badrequest",
        "invalid_prompt",
        "invalid_image",
        "policy_violation",
        "not_found",
        "too_large",
        "billing",
        "context_size",
        "context_length",
    ]) {
        ErrorCategory::BadRequest
    } else {
        return None;
    })
}

#[derive(Default)]
struct ErrorBody {
    message: Option<String>,
    /// `type` and `code` if they are strings, in lower case.
    kind: String,
    /// `code` if it is an HTTP status.
    code: Option<u16>,
    /// How long the service wants the client to wait.
    retry_after: Option<Duration>,
}

/// The JSON values of a body: one, one a line, or the data of events.
fn json_values(body: &str) -> Vec<Value> {
    if let Ok(value) = serde_json::from_str(&surrogates::repair(body)) {
        return vec![value];
    }
    let lines = body.lines().take(MAX_LIST).map(|line| {
        let line = line.trim();
        line.strip_prefix("data:").unwrap_or(line).trim()
    });
    let lines = lines.filter(|line| line.starts_with(['{', '[', '"']));
    lines
        .filter_map(|line| serde_json::from_str(&surrogates::repair(line)).ok())
        .collect()
}

impl ErrorBody {
    fn parse(body: &str) -> Self {
        let body = body.trim().trim_start_matches('\u{feff}');
        let mut parsed = Self::default();
        let mut is_json = false;
        for json in json_values(body) {
            is_json = true;
            parsed.collect(&json, MAX_DEPTH);
            parsed.retry_after = parsed.retry_after.or_else(|| wait_in(&json, MAX_DEPTH));
        }
        let is_plain =
            body.len() <= MAX_PLAIN_BODY && !body.contains('\n') && !body.starts_with(['<', '{']);
        if !is_json && is_plain {
            parsed.message = sanitize_message(body);
        }
        let message = parsed.message.as_deref();
        parsed.retry_after = parsed.retry_after.or_else(|| wait_in_text(message?));
        parsed
    }

    /// Collects from `{"error": {…}}`, `{"error": "…"}`, `{"message": …}`, `{"detail": …}` and the like, a text, or a list of
    /// those.
    fn collect(&mut self, json: &Value, depth: u8) {
        match json {
            Value::String(text) => self.collect_text(text, depth),
            Value::Array(list) => {
                for (index, value) in list.iter().take(MAX_LIST).enumerate() {
                    let Some(depth) = depth.checked_sub(1) else {
                        return;
                    };
                    if index == 0 || self.message.is_none() {
                        self.collect(value, depth);
                    } else {
                        let mut other = Self::default();
                        other.collect(value, depth);
                        self.add_message(other.message, "; ");
                    }
                }
            }
            Value::Object(fields) if depth > 0 => {
                for key in MESSAGE_KEYS {
                    if let Some(inner) = fields.get(key) {
                        self.collect(inner, depth - 1);
                    }
                }
                // A gateway quotes the service behind it.
                if let Some(raw) = fields.get("metadata").and_then(|it| it.get("raw")) {
                    let mut quoted = Self::default();
                    quoted.collect(raw, depth - 1);
                    self.add_message(quoted.message, ": ");
                    self.retry_after = self.retry_after.or(quoted.retry_after);
                }
                for key in ["type", "code", "status", "error_code", "status_code"] {
                    match fields.get(key) {
                        Some(Value::String(text)) => match text.parse::<u16>() {
                            Ok(code) => self.set_code(code.into()),
                            Err(_) => {
                                self.kind.push(' ');
                                self.kind.push_str(&text.to_lowercase());
                            }
                        },
                        Some(Value::Number(code)) => self.set_code(code.as_u64().unwrap_or(0)),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }

    /// Takes a text as the message. Some gateways put the JSON of the service behind them into it.
    fn collect_text(&mut self, text: &str, depth: u8) {
        if self.message.is_some() {
            return;
        }
        if let Some(depth) = depth.checked_sub(1)
            && text.trim_start().starts_with(['{', '['])
            && let Ok(json) = serde_json::from_str::<Value>(text)
        {
            self.collect(&json, depth);
            self.retry_after = self.retry_after.or_else(|| wait_in(&json, depth));
        }
        if self.message.is_none() {
            self.message = sanitize_message(text);
        }
    }

    fn add_message(&mut self, added: Option<String>, separator: &str) {
        let Some(added) = added else { return };
        self.message = match self.message.take() {
            Some(message) if message.contains(&added) => Some(message),
            Some(message) => sanitize_message(&format!("{message}{separator}{added}")),
            None => Some(added),
        };
    }

    fn set_code(&mut self, code: u64) {
        if (400..600).contains(&code) && self.code.is_none() {
            self.code = u16::try_from(code).ok();
        }
    }

    fn is_too_long(&self, category: ErrorCategory) -> bool {
        let has = |text: &str, terms: &[&str]| terms.iter().any(|term| text.contains(term));
        let message = self.message.as_deref().unwrap_or_default().to_lowercase();
        let counts_tokens = message.contains("token")
            && has(&message, &["prompt", "input", "context"])
            && has(
                &message,
                &[
                    "exceed",
                    "too l",
                    "too many",
                    "maximum",
                    "greater",
                    "less than",
                    "limit",
                ],
            );
        matches!(category, ErrorCategory::BadRequest | ErrorCategory::Server)
            && (has(&self.kind, &TOO_LONG_KINDS)
                || has(&message, &TOO_LONG_PHRASES)
                || counts_tokens)
    }

    fn is_quota_spent(&self) -> bool {
        QUOTA_KINDS.iter().any(|kind| self.kind.contains(kind))
    }

    fn mentions_overload(&self) -> bool {
        let message = self.message.as_deref().unwrap_or_default().to_lowercase();
        self.kind.contains("overload") || message.contains("overload")
    }
}

/// Truncates the message and replaces control characters, so that it fits on one line. `None` if the result is empty.
pub fn sanitize_message(text: &str) -> Option<String> {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_MESSAGE_CHARS)
        .collect();
    let clean = clean.trim();
    (!clean.is_empty()).then(|| clean.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderMap, HeaderValue, StatusCode};
    use jiff::Timestamp;

    use super::{from_error_body, from_status, reported_error, retry_after};

    #[test]
    fn a_spent_quota_is_known_by_its_code() {
        let is_spent = |body: &str| {
            let error = from_status(StatusCode::TOO_MANY_REQUESTS, body, None);
            assert_eq!(error.category.as_str(), "rate_limit");
            error.is_quota_spent
        };
        assert!(is_spent(
            r#"{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}"#
        ));
        // Gemini says the same of a limit of a minute.
        assert!(!is_spent(
            r#"{"error":{"code":429,"message":"You exceeded your current quota","status":"RESOURCE_EXHAUSTED"}}"#
        ));
        assert!(!is_spent(
            r#"{"error":{"message":"Rate limit reached","type":"tokens","code":"rate_limit_exceeded"}}"#
        ));
    }

    fn error_text(status: u16, body: &str) -> String {
        let status = StatusCode::from_u16(status).expect("a status");
        from_status(status, body, None).to_string()
    }

    #[test]
    fn the_message_is_the_services_then_the_reason_phrase_then_the_status() {
        let own = [
            r#"{"error":{"message":"no","type":"x","code":null}}"#,
            r#"{"type":"error","error":{"type":"x","message":" no\n"}}"#,
            r#"{"error":{"code":400,"message":"no"}}"#,
            r#"{"error":"no"}"#,
            r#"{"object":"error","message":"no","code":40001}"#,
            r#"{"detail":"no"}"#,
            r#"{"detail":[{"loc":["body"],"msg":"no"}]}"#,
            r#"[{"error":{"message":"no","status":"INVALID_ARGUMENT"}}]"#,
            "\"no\"",
            "no\n",
        ];
        for body in own {
            assert_eq!(error_text(400, body), "bad_request: no", "{body}");
        }
        let without = [
            "",
            "{}",
            "[]",
            "17",
            "null",
            r#"{"error":{"message":""}}"#,
            r#"{"error":"#,
            "<html><body>no</body></html>",
            "two\nlines",
        ];
        for body in without {
            assert_eq!(error_text(400, body), "bad_request: Bad Request", "{body}");
            assert_eq!(error_text(529, body), "overloaded: HTTP 529", "{body}");
        }
        let long = error_text(500, &format!("{{\"error\":\"{}\"}}", "ä".repeat(5000)));
        assert_eq!(long.chars().count(), "server: ".len() + 1000);
        let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(error_text(500, &deep), "server: Internal Server Error");
    }

    #[test]
    fn a_request_longer_than_the_context_is_known_by_many_words() {
        let status = |status: u16, body: &str| {
            let status = StatusCode::from_u16(status).expect("a status");
            let error = from_status(status, body, None);
            (error.category.as_str(), error.is_too_long)
        };
        for message in [
            "This model's maximum context length is 4096 tokens. However, you requested 5200 tokens.",
            "Your input exceeds the context window of this model. Please adjust your input and try again.",
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300000 tokens.",
            "prompt is too long: 214000 tokens > 200000 maximum",
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
            "Input is too long for requested model.",
            "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
            "Prompt contains 65673 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
            "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
            "the request exceeds the available context size, try increasing it",
            "Please reduce the length of the messages or completion.",
            "Invalid request: Your request exceeded model token limit: 131072",
            "Prompt exceeds max length",
            "Range of input length should be [1, 30720]",
            "context window exceeds limit (2013)",
            "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",
            "prompt token count of 128557 exceeds the limit of 128000",
            "prompt too long; exceeded max context length by 4 tokens",
            "too many tokens: total number of tokens in the prompt cannot exceed 4081",
            "Requested input length 9000 exceeds maximum input length 8192",
        ] {
            let body = format!("{{\"error\":{{\"message\":{message:?}}}}}");
            assert_eq!(status(400, &body), ("bad_request", true), "{message}");
            assert_eq!(status(500, &body), ("bad_request", true), "{message}");
            assert!(from_error_body(&body).is_too_long, "{message}");
            assert!(!status(429, &body).1, "{message}");
        }
        for code in [
            "context_length_exceeded",
            "exceed_context_size_error",
            "request_too_large",
        ] {
            let body = format!("{{\"error\":{{\"message\":\"no\",\"code\":{code:?}}}}}");
            assert_eq!(status(400, &body), ("bad_request", true), "{code}");
        }
        for message in [
            "no",
            "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
            "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens",
            "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum",
            "Invalid 'tools': array too long. Expected an array with maximum length 128",
            "Unsupported parameter: 'max_tokens' is not supported with this model.",
        ] {
            let body = format!("{{\"error\":{{\"message\":{message:?}}}}}");
            assert!(!status(400, &body).1, "{message}");
        }
    }

    #[test]
    fn the_services_own_words_are_found_in_any_wrapping() {
        for body in [
            r#"{"errors":[{"code":7,"message":"no"}],"success":false}"#,
            r#"{"errors":["no"]}"#,
            r#"{"error":{"message":"no","metadata":{"raw":"no"}}}"#,
            r#"{"code":1001,"msg":"no"}"#,
            r#"{"message":"{\"error\":{\"message\":\"no\"}}"}"#,
            r#"{"base_resp":{"status_code":1004,"status_msg":"no"}}"#,
            r#"{"error_code":110,"error_msg":"no"}"#,
            r#"{"Message":"no"}"#,
            "{\"error\":{\"message\":\"no\"}}\n{\"error\":{\"message\":\"again\"}}",
            "{\"type\":\"error\"}\n{\"message\":\"no\"}",
            "event: error\ndata: {\"error\":{\"message\":\"no\"}}\n\n",
            "\u{feff}{\"error\":\"no\"}",
        ] {
            assert_eq!(error_text(400, body), "bad_request: no", "{body}");
        }
        let raw = r#"{"error":{"message":"Provider returned error","metadata":{"raw":"{\"error\":{\"message\":\"too large\"}}"}}}"#;
        let message = "bad_request: Provider returned error: too large";
        assert_eq!(error_text(400, raw), message);
        assert_eq!(
            error_text(
                400,
                r#"{"errors":[{"message":"a"},{"message":"b"},{"message":"a"}]}"#
            ),
            "bad_request: a; b"
        );
        assert_eq!(
            error_text(400, r#"{"error":{"message":"half \ud83d"}}"#),
            "bad_request: half \u{fffd}"
        );
    }

    #[test]
    fn a_wait_is_found_in_the_body() {
        let wait = |body: &str| from_status(StatusCode::TOO_MANY_REQUESTS, body, None).retry_after;
        let seconds = |s: f64| Some(Duration::from_secs_f64(s));
        for (body, expected) in [
            (
                r#"[{"error":{"message":"m","details":[{},{"retryDelay":"3s"}]}}]"#,
                3.0,
            ),
            (r#"{"error":{"details":[{"retryDelay":"3.5s"}]}}"#, 3.5),
            (
                r#"{"error":{"details":[{"retryDelay":{"seconds":3,"nanos":500000000}}]}}"#,
                3.5,
            ),
            (r#"{"error":{"message":"Please try again in 6ms."}}"#, 0.006),
            (
                r#"{"error":{"message":"Please try again in 1m2.5s. Or not."}}"#,
                62.5,
            ),
            (
                r#"{"error":{"message":"Please retry after 20 seconds."}}"#,
                20.0,
            ),
            (r#"{"error":{"message":"Please retry in 36.9s."}}"#, 36.9),
            (r#"{"message":"slow","retry_after":7}"#, 7.0),
            (r#"{"message":"slow","retry_after_ms":"250"}"#, 0.25),
            ("try again in 2 minutes", 120.0),
        ] {
            assert_eq!(wait(body), seconds(expected), "{body}");
        }
        for without in [
            "",
            "{}",
            r#"{"message":"try again in a moment"}"#,
            r#"{"retry_after":-1}"#,
        ] {
            assert_eq!(wait(without), None, "{without}");
        }
        let header = Some(Duration::from_secs(9));
        let body = r#"{"retry_after":7}"#;
        let error = from_status(StatusCode::TOO_MANY_REQUESTS, body, header);
        assert_eq!(error.retry_after, header);
        assert_eq!(from_error_body(body).retry_after, seconds(7.0));
    }

    #[test]
    fn an_error_instead_of_a_reply_is_told_from_a_reply() {
        for error in [
            r#"{"object":"error","message":"engine died","type":"InternalServerError","code":500}"#,
            r#"{"message":"engine died","type":"InternalServerError"}"#,
            r#"{"detail":"engine died"}"#,
            r#"{"detail":[{"msg":"engine died"}]}"#,
            r#"{"code":1001,"msg":"engine died"}"#,
            r#"{"error":"engine died"}"#,
            r#"{"errors":["engine died"]}"#,
            r#"{"choices":[],"error":{"message":"engine died"}}"#,
            r#"{"choices":null,"base_resp":{"status_code":1004,"status_msg":"engine died"}}"#,
            r#"{"type":"error","error":{"message":"engine died"}}"#,
            r#"[{"error":{"message":"engine died"}}]"#,
        ] {
            let found = reported_error(error).map(|error| error.message);
            assert_eq!(found.as_deref(), Some("engine died"), "{error}");
        }
        for reply in [
            "",
            "x",
            "{",
            "{}",
            "[]",
            r#"{"choices":[],"error":null}"#,
            r#"{"choices":[],"error":{"message":"","code":0}}"#,
            r#"{"choices":[],"errors":[],"detail":"fine"}"#,
            r#"{"choices":[],"base_resp":{"status_code":0,"status_msg":"success"}}"#,
            r#"{"type":"message","content":[],"message":"x"}"#,
            r#"{"type":"response.progress","message":"x"}"#,
            r#"{"message":{"content":"x"},"done":false}"#,
            r#"{"type":"ping"}"#,
            r#"{"usage":{}}"#,
        ] {
            assert!(reported_error(reply).is_none(), "{reply}");
        }
    }

    #[test]
    fn statuses_map_to_categories() {
        let table = [
            ("auth", &[401, 403][..]),
            ("bad_request", &[400, 402, 404, 405, 413, 415, 422]),
            ("rate_limit", &[429]),
            ("overloaded", &[529]),
            (
                "server",
                &[301, 302, 307, 409, 425, 500, 502, 503, 504, 599],
            ),
            ("timeout", &[408]),
        ];
        for (category, statuses) in table {
            for status in statuses {
                assert_eq!(
                    error_text(*status, "x"),
                    format!("{category}: x"),
                    "{status}"
                );
            }
        }
        for body in [
            r#"{"error":{"type":"overloaded_error","message":"busy"}}"#,
            r#"{"error":{"message":"The model is Overloaded"}}"#,
        ] {
            assert!(error_text(503, body).starts_with("overloaded: "), "{body}");
        }
    }

    #[test]
    fn errors_in_a_stream_map_by_type_and_code() {
        let table = [
            (r#"{"type":"overloaded_error","message":"m"}"#, "overloaded"),
            (r#"{"type":"rate_limit_error","message":"m"}"#, "rate_limit"),
            (r#"{"type":"authentication_error","message":"m"}"#, "auth"),
            (r#"{"type":"permission_error","message":"m"}"#, "auth"),
            (
                r#"{"type":"invalid_request_error","message":"m"}"#,
                "bad_request",
            ),
            (r#"{"type":"not_found_error","message":"m"}"#, "bad_request"),
            (
                r#"{"type":"request_too_large","message":"m"}"#,
                "bad_request",
            ),
            (r#"{"type":"timeout_error","message":"m"}"#, "timeout"),
            (r#"{"type":"api_error","message":"m"}"#, "server"),
            (
                r#"{"type":"server_error","message":"m","code":500}"#,
                "server",
            ),
            (r#"{"code":429,"message":"m"}"#, "rate_limit"),
            (r#"{"code":"502","message":"m"}"#, "server"),
            (
                r#"{"type":"invalid_request_error","code":"invalid_api_key","message":"m"}"#,
                "auth",
            ),
            (r#""m""#, "server"),
        ];
        for (error, category) in table {
            let mapped = from_error_body(&format!("{{\"type\":\"error\",\"error\":{error}}}"));
            assert_eq!(mapped.to_string(), format!("{category}: m"), "{error}");
        }
        assert_eq!(
            from_error_body(r#"{"error":{}}"#).to_string(),
            "server: the service reported an error without a message"
        );
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "2015-10-21T07:28:00Z".parse().expect("a time");
        let wait = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_str(value).expect("a value"));
            retry_after(&headers, now)
        };
        let seconds = |s: f64| Some(Duration::from_secs_f64(s));
        assert_eq!(wait("retry-after", "17"), seconds(17.0));
        assert_eq!(wait("retry-after", " 0.5 "), seconds(0.5));
        assert_eq!(
            wait("retry-after", "Wed, 21 Oct 2015 07:28:30 GMT"),
            seconds(30.0)
        );
        assert_eq!(
            wait("retry-after", "Wed, 21 Oct 2015 07:00:00 GMT"),
            seconds(0.0)
        );
        for old in [
            "Wednesday, 21-Oct-15 07:28:30 GMT",
            "Wed Oct 21 07:28:30 2015",
        ] {
            assert_eq!(wait("retry-after", old), seconds(30.0), "{old}");
        }
        let early: Timestamp = "2015-10-06T07:28:00Z".parse().expect("a time");
        let mut headers = HeaderMap::new();
        headers.insert(
            "retry-after",
            HeaderValue::from_static("Tue Oct  6 07:28:05 2015"),
        );
        assert_eq!(retry_after(&headers, early), seconds(5.0));
        assert_eq!(wait("retry-after-ms", "250"), seconds(0.25));
        assert_eq!(wait("retry-after", "1e300"), seconds(86_400.0));
        for nonsense in ["", "-1", "soon", "NaN"] {
            assert_eq!(wait("retry-after", nonsense), None, "{nonsense}");
        }
    }
}
