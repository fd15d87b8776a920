//! Reads YAML as JSON values, within limits on depth, number and bytes. Aliases count as often as they are used.

use std::collections::{BTreeMap, HashMap};

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_saphyr::options::{MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Error, MessageFormatter, Spanned, UserMessageFormatter};

/// The deepest nesting.
const MAX_DEPTH: usize = 64;
/// The most values of a document.
const MAX_VALUES: usize = 2_000_000;
/// The most parts of a document that aliases repeat.
const MAX_REPEATED: usize = 200_000;
/// The most bytes of a document's scalars and keys.
const MAX_BYTES: usize = 64 << 20;

/// What is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlError {
    /// From 1.
    pub line: u64,
    pub text: String,
}

/// The first document of a text; null if it is empty. Keys are texts, also if YAML reads them as numbers.
pub fn parse(text: &str) -> Result<Value, YamlError> {
    read(text).map_err(|error| YamlError {
        line: error.location().map_or(1, |at| at.line()),
        text: UserMessageFormatter.format_message(&error).into_owned(),
    })
}

/// The lines of the keys at the top, from 1.
pub fn key_lines(text: &str) -> BTreeMap<String, u64> {
    let keys: HashMap<Spanned<String>, IgnoredAny> = read(text).unwrap_or_default();
    let keys = keys.into_keys();
    keys.map(|key| (key.value, key.referenced.line())).collect()
}

fn read<T: DeserializeOwned + Default>(text: &str) -> Result<T, Error> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_nodes: MAX_VALUES,
            max_events: 2 * MAX_VALUES,
            max_total_scalar_bytes: MAX_BYTES,
            max_recorded_anchor_events: MAX_REPEATED,
            enforce_alias_anchor_ratio: false,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_REPEATED,
        },
        // The core schema of YAML 1.2.
        merge_keys: MergeKeyPolicy::AsOrdinary,
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        null_as_string: true,
        strict_booleans: true,
        underscored_numbers_as_strings: true,
    };
    let mut bytes = text.as_bytes();
    let first = serde_saphyr::read_with_options(&mut bytes, options).next();
    first.unwrap_or_else(|| Ok(T::default()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{key_lines, parse};

    #[test]
    fn yaml_becomes_json() {
        let text = "name: x # a comment\nlist:\n- 1\n- -2.5\n- 0x1f\n- ~\n- yes\n- true\n- '1'\n- !!str 1\n- 1.2.3\n- .inf\n\
                    200: &ok\n  a: >-\n    folded\n    text\n  b: |\n    lines\nagain: *ok\n";
        let ok = json!({"a": "folded text", "b": "lines\n"});
        assert_eq!(
            parse(text).expect("a document"),
            json!({
                "name": "x",
                "list": [1, -2.5, 31, null, "yes", true, "1", "1", "1.2.3", ".inf"],
                "200": ok, "again": ok,
            })
        );
        let lines = key_lines(text);
        assert_eq!((lines["name"], lines["200"]), (1, 13));
        assert!(key_lines("- a\n").is_empty());
        for (text, expected) in [
            ("", json!(null)),
            ("{\"a\": [1]}", json!({"a": [1]})),
            (
                "null: 1\n~: 2\n1.50: 3\n",
                json!({"null": 1, "~": 2, "1.50": 3}),
            ),
            (
                "<<: {a: 1}\nb: 1_000\n---\nc: 1\n",
                json!({"<<": {"a": 1}, "b": "1_000"}),
            ),
        ] {
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn errors_have_a_line_and_sizes_are_bounded() {
        // Each line repeats the one before ten times.
        let bomb: String = (1..20)
            .map(|at| format!("a{at}: &a{at} [{}]\n", format!("*a{}, ", at - 1).repeat(10)))
            .collect();
        let too_long = "too large or too complex: limits breached: ScalarBytes";
        let text = "x".repeat(1 << 20);
        // The copy that the anchor keeps counts, too.
        let texts = format!("a: &a {text}\nb: [{}]\n", "*a, ".repeat(63));
        let keys: String = (0..1000)
            .map(|at| format!("{at}{}: 1, ", "x".repeat(1000)))
            .collect();
        let keys = format!("a: &a {{{keys}}}\nb: [{}]\n", "*a, ".repeat(80));
        for (text, line, expected) in [
            (texts.as_str(), 2, too_long),
            (&keys, 2, too_long),
            ("a: 1\nb: [1\nc: 2\n", 3, ""),
            (
                "a: 1\na: 2\n",
                2,
                "duplicate mapping key `a` is not allowed here",
            ),
            ("a: 1\n[1]: 2\n", 2, "expected string scalar"),
            ("a: &a [*a]\n", 1, "Recursive reference not allowed here"),
            (&"[".repeat(150), 1, "recursion limit exceeded"),
            (&"[".repeat(100_000), 1, "recursion limit exceeded"),
            (
                &"- ".repeat(100_000),
                1,
                "too complex: limits breached: Depth",
            ),
            (
                &"? ".repeat(100_000),
                1,
                "too complex: limits breached: Depth",
            ),
            (
                &format!("a0: &a0 x\n{bomb}"),
                7,
                "too complex: limits breached: RecordedAnchorEvents",
            ),
        ] {
            let error = parse(text).expect_err("an error");
            assert!(error.text.contains(expected), "{error:?}");
            assert_eq!(error.line, line, "{error:?}");
        }
    }
}
