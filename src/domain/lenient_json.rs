//! Reads JSON that other programs wrote, also with what strict readers refuse: a byte order mark, half a surrogate pair,
//! control characters in texts, `NaN`.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses JSON. Half a surrogate pair and bytes that are no UTF-8 become U+FFFD; `NaN` and infinite numbers become null.
///
/// # Errors
/// It is not JSON in other ways, or not of this type.
pub fn from_slice<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    let json = json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json);
    serde_json::from_slice(json).or_else(|error| {
        let text = String::from_utf8_lossy(json);
        match repair(&text) {
            Cow::Borrowed(_) if matches!(text, Cow::Borrowed(_)) => Err(error),
            repaired => serde_json::from_str(&repaired),
        }
    })
}

/// The text as strict readers accept it, as far as that is known. Borrowed if nothing has to be changed.
pub fn repair(json: &str) -> Cow<'_, str> {
    let mut repaired = String::new();
    // Everything before this position is in `repaired`.
    let mut copied = 0;
    let mut at = 0;
    let mut in_string = false;
    let bytes = json.as_bytes();
    while at < bytes.len() {
        let rest = &json[at..];
        let (length, replacement) = match bytes[at] {
            b'"' => {
                in_string = !in_string;
                (1, None)
            }
            b'\\' if in_string => escape_sequence(rest),
            control @ 0..0x20 if in_string => (1, Some(format!("\\u{control:04x}"))),
            _ if in_string => (1, None),
            _ => match ["NaN", "Infinity", "-Infinity"]
                .into_iter()
                .find(|number| rest.starts_with(number))
            {
                Some(number) => (number.len(), Some("null".to_owned())),
                None => (1, None),
            },
        };
        if let Some(replacement) = replacement {
            repaired.push_str(&json[copied..at]);
            repaired.push_str(&replacement);
            copied = at + length;
        }
        at += length;
        while !json.is_char_boundary(at) {
            at += 1;
        }
    }
    match copied {
        0 => Cow::Borrowed(json),
        _ => Cow::Owned(repaired + &json[copied..]),
    }
}

/// The length of the escape sequence that this text begins with, and what replaces it if strict readers refuse it.
fn escape_sequence(text: &str) -> (usize, Option<String>) {
    let replaced_backslash = (1, Some("\\\\".to_owned()));
    match text.as_bytes().get(1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => (2, None),
        Some(b'u') => match code_unit(text) {
            None => replaced_backslash,
            Some(0xd800..=0xdbff)
                if matches!(text.get(6..).and_then(code_unit), Some(0xdc00..=0xdfff)) =>
            {
                (12, None)
            }
            Some(0xd800..=0xdfff) => (6, Some("\\ufffd".to_owned())),
            Some(_) => (6, None),
        },
        Some(b'\'') => (2, Some("'".to_owned())),
        _ => replaced_backslash,
    }
}

/// The UTF-16 code unit of a `\u` sequence at the beginning of the text.
fn code_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u16::from_str_radix(digits, 16)
        .ok()
        .filter(|_| is_hexadecimal)
}

/// A text that is not empty.
pub fn text<'v>(fields: &'v Value, key: &str) -> Option<&'v str> {
    let text = fields.get(key).and_then(Value::as_str);
    text.filter(|text| !text.is_empty())
}

/// Whether a value stands for true.
pub fn is_true(value: &Value) -> bool {
    match value {
        Value::Bool(value) => *value,
        Value::String(text) => text.eq_ignore_ascii_case("true"),
        Value::Number(number) => number.as_i64() == Some(1),
        _ => false,
    }
}

/// The text of a text, a number or a truth value.
pub fn scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use serde_json::{Value, json};

    use super::{from_slice, repair};

    #[test]
    fn unusual_json_is_read() {
        for (text, expected) in [
            (r#""cut \ud83d""#, json!("cut \u{fffd}")),
            (r#""\ude00 and \ud83d\ude00""#, json!("\u{fffd} and 😀")),
            (r#""\ud83d\ud83d\ude00""#, json!("\u{fffd}😀")),
            (r#""\ud83d\n""#, json!("\u{fffd}\n")),
            (r#"["\\ud83d", NaN]"#, json!(["\\ud83d", null])),
            (
                r#"{"a": -Infinity, "NaN": "NaN"}"#,
                json!({"a": null, "NaN": "NaN"}),
            ),
            ("\"a\tb\"", json!("a\tb")),
            (r#""C:\Users, it\'s \u12""#, json!("C:\\Users, it's \\u12")),
            ("\u{feff}[1]", json!([1])),
            ("[\"ä\", NaN, \"ö\"]", json!(["ä", null, "ö"])),
        ] {
            let value: Value = from_slice(text.as_bytes()).expect(text);
            assert_eq!(value, expected, "{text}");
        }
        let value: Value = from_slice(b"\"a\xffb\"").expect("text");
        assert_eq!(value, json!("a\u{fffd}b"));
    }

    #[test]
    fn other_text_stays_an_error() {
        for text in [
            "",
            "{",
            "[1,]",
            "nan",
            "\"",
            "\"\\",
            "\"\\u",
            "{\"a\" \"\\ud83d\"}",
        ] {
            assert!(from_slice::<Value>(text.as_bytes()).is_err(), "{text}");
        }
        assert!(matches!(repair(r#"{"a": "ä\u00e4"}"#), Cow::Borrowed(_)));
    }
}
