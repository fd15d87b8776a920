//! Reads YAML as JSON values, within limits on depth, number and bytes. Aliases count as often as they are used.

use std::collections::{BTreeMap, HashMap};

use saphyr_parser::{Event, Parser, ScalarStyle, Tag};
use serde_json::{Map, Number, Value};

/// The deepest nesting.
const MAX_DEPTH: usize = 100;
/// The most values of a document.
const MAX_VALUES: usize = 2_000_000;
/// The most bytes of a document's scalars and keys.
const MAX_BYTES: usize = 64 << 20;

/// The first document of a text.
#[derive(Debug)]
pub struct YamlDocument {
    /// Null for an empty text.
    pub value: Value,
    /// The lines of the keys at the top, from 1.
    pub lines: BTreeMap<String, usize>,
}

/// What is wrong, and where.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlError {
    /// From 1.
    pub line: usize,
    pub text: String,
}

/// Keys are texts, also if YAML reads them as numbers.
pub fn parse(text: &str) -> Result<YamlDocument, YamlError> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| YamlError {
            line: error.marker().line(),
            text: error.info().to_owned(),
        })?;
        let line = span.start.line();
        if let Event::DocumentEnd = event {
            break;
        }
        builder
            .add(event, line)
            .map_err(|text| YamlError { line, text })?;
    }
    Ok(YamlDocument {
        value: builder.root.unwrap_or_default(),
        lines: builder.lines,
    })
}

/// A list or a mapping that is not complete.
struct Open {
    value: Value,
    /// The key whose value comes next.
    key: Option<String>,
    anchor: usize,
    /// Of the values in it, with itself.
    size: Size,
}

#[derive(Clone, Copy, Default)]
struct Size {
    values: usize,
    /// Of scalars and keys.
    bytes: usize,
}

#[derive(Default)]
struct Builder {
    root: Option<Value>,
    open: Vec<Open>,
    /// Complete values with an anchor, and their sizes.
    anchors: HashMap<usize, (Value, Size)>,
    /// Of all values, with the copies of those that have an anchor.
    size: Size,
    lines: BTreeMap<String, usize>,
}

impl Builder {
    fn add(&mut self, event: Event<'_>, line: usize) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                if self.is_key_expected() {
                    return self.set_key(&text, line);
                }
                let size = Size {
                    values: 1,
                    bytes: text.len(),
                };
                self.count(size)?;
                let value = scalar(&text, style, tag.as_deref());
                self.put(value, size, anchor)
            }
            Event::SequenceStart(anchor, _) => self.open(Value::Array(Vec::new()), anchor),
            Event::MappingStart(anchor, _) => self.open(Value::Object(Map::new()), anchor),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(complete) => self.put(complete.value, complete.size, complete.anchor),
                None => Ok(()),
            },
            Event::Alias(anchor) => {
                let known = self.anchors.get(&anchor);
                let size = known.map(|(_, size)| *size);
                let size = size.ok_or("has an alias within its own value")?;
                // Counted before the value is copied.
                self.count(size)?;
                if self.is_key_expected() {
                    return Err("has an alias as a key".to_owned());
                }
                let value = self.anchors.get(&anchor).map(|(value, _)| value.clone());
                self.attach(value.unwrap_or_default(), size);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn is_key_expected(&self) -> bool {
        let last = self.open.last();
        last.is_some_and(|open| open.value.is_object() && open.key.is_none())
    }

    fn set_key(&mut self, key: &str, line: usize) -> Result<(), String> {
        let is_top = self.open.len() == 1;
        let Some(open) = self.open.last_mut() else {
            return Ok(());
        };
        if open.value.get(key).is_some() {
            return Err(format!("has the key \"{key}\" twice"));
        }
        let size = Size {
            values: 0,
            bytes: key.len(),
        };
        open.size.add(size);
        open.key = Some(key.to_owned());
        if is_top {
            self.lines.insert(key.to_owned(), line);
        }
        self.count(size)
    }

    fn open(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        if self.is_key_expected() {
            return Err("has a list or a mapping as a key".to_owned());
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(format!("is nested deeper than {MAX_DEPTH} levels"));
        }
        let size = Size {
            values: 1,
            bytes: 0,
        };
        self.count(size)?;
        self.open.push(Open {
            value,
            key: None,
            anchor,
            size,
        });
        Ok(())
    }

    /// Puts a value in its place that has been counted.
    fn put(&mut self, value: Value, size: Size, anchor: usize) -> Result<(), String> {
        if anchor != 0 {
            // The copy counts, too.
            self.count(size)?;
            self.anchors.insert(anchor, (value.clone(), size));
        }
        self.attach(value, size);
        Ok(())
    }

    fn attach(&mut self, value: Value, size: Size) {
        let Some(open) = self.open.last_mut() else {
            self.root = Some(value);
            return;
        };
        open.size.add(size);
        match (&mut open.value, open.key.take()) {
            (Value::Array(items), _) => items.push(value),
            (Value::Object(fields), Some(key)) => drop(fields.insert(key, value)),
            _ => {}
        }
    }

    fn count(&mut self, size: Size) -> Result<(), String> {
        self.size.add(size);
        if self.size.values > MAX_VALUES {
            return Err(format!("has over {MAX_VALUES} values"));
        }
        if self.size.bytes > MAX_BYTES {
            return Err(format!(
                "has over {MAX_BYTES} bytes of text, if each alias counts as what it repeats"
            ));
        }
        Ok(())
    }
}

impl Size {
    fn add(&mut self, other: Self) {
        self.values += other.values;
        self.bytes += other.bytes;
    }
}

/// A scalar by the core schema of YAML 1.2.
fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Value {
    let is_text = tag.is_some_and(|tag| tag.is_yaml_core_schema() && tag.suffix == "str");
    if style != ScalarStyle::Plain || is_text {
        return Value::String(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    number(text).map_or_else(|| Value::String(text.to_owned()), Value::Number)
}

fn number(text: &str) -> Option<Number> {
    let digits = text.trim_start_matches(['+', '-']);
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok().map(Number::from);
    }
    if let Some(octal) = text.strip_prefix("0o") {
        return u64::from_str_radix(octal, 8).ok().map(Number::from);
    }
    // Rust also parses names such as "inf".
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let plain = text.strip_prefix('+').unwrap_or(text);
    if let Ok(whole) = plain.parse::<i64>() {
        return Some(whole.into());
    }
    plain.parse::<f64>().ok().and_then(Number::from_f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::parse;

    #[test]
    fn yaml_becomes_json() {
        let text = "name: x # a comment\nlist:\n- 1\n- -2.5\n- 0x1f\n- ~\n- yes\n- true\n- '1'\n- !!str 1\n- 1.2.3\n- .inf\n\
                    200: &ok\n  a: >-\n    folded\n    text\n  b: |\n    lines\nagain: *ok\n";
        let document = parse(text).expect("a document");
        let ok = json!({"a": "folded text", "b": "lines\n"});
        assert_eq!(
            document.value,
            json!({
                "name": "x",
                "list": [1, -2.5, 31, null, "yes", true, "1", "1", "1.2.3", ".inf"],
                "200": ok, "again": ok,
            })
        );
        assert_eq!(document.lines["name"], 1);
        assert_eq!(document.lines["200"], 13);
        assert_eq!(parse("").expect("empty").value, json!(null));
        assert_eq!(
            parse("{\"a\": [1]}").expect("JSON").value,
            json!({"a": [1]})
        );
    }

    #[test]
    fn errors_have_a_line_and_sizes_are_bounded() {
        // Each line repeats the one before ten times.
        let bomb: String = (1..20)
            .map(|at| format!("a{at}: &a{at} [{}]\n", format!("*a{}, ", at - 1).repeat(10)))
            .collect();
        let too_long = "has over 67108864 bytes of text";
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
            ("a: 1\na: 2\n", 2, "has the key \"a\" twice"),
            ("a: 1\n[1]: 2\n", 2, "as a key"),
            ("a: &a [*a]\n", 1, "has an alias within its own value"),
            (&"[".repeat(150), 1, "is nested deeper than 100 levels"),
            (&"[".repeat(100_000), 1, "recursion limit exceeded"),
            (&format!("a0: &a0 x\n{bomb}"), 7, "has over 2000000 values"),
        ] {
            let error = parse(text).expect_err("an error");
            assert!(error.text.contains(expected), "{error:?}");
            assert_eq!(error.line, line, "{error:?}");
        }
    }
}
