//! A TOML document as a tree in which every value knows its position, and the problems of such a document. Knows
//! neither the meaning of keys nor the name of the file.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value as Json;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Maximum size of a TOML file in bytes.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Nested brackets.
const MAX_NESTING: usize = 40;
/// Dots in one key.
const MAX_KEY_DOTS: usize = 16;
/// Problems in one message; a broken file can have thousands.
pub const MAX_SHOWN_PROBLEMS: usize = 10;

pub type Table = BTreeMap<String, Node>;

/// A value and its position.
#[derive(Clone, Debug)]
pub struct Node {
    /// Position of its key, or of the value itself in a list.
    pub origin: Origin,
    pub value: Value,
}

impl Node {
    /// Tables keep the file's order, because a model reads a schema from the top. A number that is too large becomes
    /// null.
    pub fn to_json(&self) -> Json {
        match &self.value {
            Value::String(text) | Value::Datetime(text) | Value::Untyped(text) => {
                text.clone().into()
            }
            Value::Integer(number) => (*number).into(),
            Value::HugeInteger => Json::Null,
            Value::Float(number) => (*number).into(),
            Value::Boolean(flag) => (*flag).into(),
            Value::Array(items) => items.iter().map(Self::to_json).collect(),
            Value::Table(table) => {
                let mut entries: Vec<_> = table.iter().collect();
                entries.sort_by(|a, b| a.1.origin.cmp(&b.1.origin));
                let entry = |(key, node): (&String, &Self)| (key.clone(), node.to_json());
                entries.into_iter().map(entry).collect()
            }
        }
    }
}

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The file as a whole.
    Whole,
    /// Line and column count from 1; columns count characters.
    File { line: usize, column: usize },
    /// An environment variable or a flag.
    External(String),
}

impl Origin {
    pub fn line(&self) -> Option<usize> {
        match self {
            Self::File { line, .. } => Some(*line),
            Self::Whole | Self::External(_) => None,
        }
    }
}

/// A TOML value, or the text of an environment variable, which is converted to the type that its key expects.
#[derive(Clone, Debug)]
pub enum Value {
    String(String),
    Integer(i64),
    /// An integer that does not fit an `i64`.
    HugeInteger,
    Float(f64),
    Boolean(bool),
    Datetime(String),
    Array(Vec<Node>),
    Table(Table),
    Untyped(String),
}

impl Value {
    /// For messages, such as `must be a string, not a table`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::String(_) => "a string",
            Self::Integer(_) | Self::HugeInteger => "a whole number",
            Self::Float(_) => "a fraction",
            Self::Boolean(_) => "true or false",
            Self::Datetime(_) => "a date",
            Self::Array(_) => "a list",
            Self::Table(_) => "a table",
            Self::Untyped(_) => "this text",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub origin: Origin,
    /// Starts with the key, if there is one, and says how to fix the problem. Never contains a value that could be a
    /// secret.
    pub text: String,
    /// What to write instead, if that is not in the text.
    pub hint: Option<String>,
    pub kind: ProblemKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The document cannot be read: a syntax error, an unknown key, a value of the wrong type.
    Malformed,
    /// A value breaks a rule.
    RuleViolation,
    /// A value refers to nothing, such as a model without a provider.
    WrongReference,
    /// The document is valid, but it has to change before this server can use it.
    Unusable,
    /// The document may be wrong, or something that it names is missing.
    Warning,
}

impl Problem {
    /// About the file as a whole.
    pub fn of_file(kind: ProblemKind, text: impl Into<String>) -> Self {
        Self {
            origin: Origin::Whole,
            text: text.into(),
            hint: None,
            kind,
        }
    }

    pub fn with_hint(self, hint: Option<String>) -> Self {
        Self { hint, ..self }
    }

    /// The text with the hint.
    pub fn message(&self) -> Cow<'_, str> {
        match &self.hint {
            Some(hint) => format!("{}; {hint}", self.text).into(),
            None => self.text.as_str().into(),
        }
    }

    pub fn is_error(&self) -> bool {
        self.kind != ProblemKind::Warning
    }

    /// `<file>:<line>:<column>: <text>`, or `<variable or flag>: <text>`.
    pub fn format_in(&self, file: &str) -> String {
        format!("{}: {}", self.place(file), self.message())
    }

    /// Like [`Problem::format_in`], with `error: ` or `warning: ` before the text.
    pub fn format_with_severity(&self, file: &str) -> String {
        let severity = if self.is_error() { "error" } else { "warning" };
        format!("{}: {severity}: {}", self.place(file), self.message())
    }

    fn place(&self, file: &str) -> String {
        match &self.origin {
            Origin::Whole => file.to_owned(),
            Origin::File { line, column } => format!("{file}:{line}:{column}"),
            Origin::External(name) => name.clone(),
        }
    }
}

/// The first problems with their positions.
pub fn format_problems(problems: &[Problem], file: &str, separator: &str) -> String {
    let mut lines: Vec<String> = problems
        .iter()
        .take(MAX_SHOWN_PROBLEMS)
        .map(|problem| problem.format_in(file))
        .collect();
    if problems.len() > MAX_SHOWN_PROBLEMS {
        lines.push(format!("and {} more", problems.len() - MAX_SHOWN_PROBLEMS));
    }
    lines.join(separator)
}

/// # Errors
/// Everything that is wrong with the bytes as TOML.
pub fn parse(bytes: &[u8]) -> Result<Table, Vec<Problem>> {
    let start = Origin::File { line: 1, column: 1 };
    let problem = |origin: Origin, text: String| Problem {
        origin,
        text,
        hint: None,
        kind: ProblemKind::Malformed,
    };
    if bytes.len() > MAX_FILE_BYTES {
        let text = format!("the file is larger than {MAX_FILE_BYTES} bytes");
        return Err(vec![problem(start, text)]);
    }
    // Editors on Windows write a byte order mark, which has no meaning.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
        let origin = LineIndex::new(&valid).origin_at(valid.len());
        let text = "the file is not UTF-8; save it as UTF-8";
        vec![problem(origin, text.to_owned())]
    })?;
    let positions = LineIndex::new(text);
    if let Some(offset) = find_too_deep(text) {
        let message = format!(
            "nested too deeply: at most {MAX_NESTING} brackets, and {MAX_KEY_DOTS} dots in a key"
        );
        return Err(vec![problem(positions.origin_at(offset), message)]);
    }
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // The parser's own rendering quotes the line, which may contain a secret; its message does not.
        let problems = errors.iter().map(|error| {
            let origin = positions.origin_at(error.span().map_or(text.len(), |span| span.start));
            problem(origin, format!("syntax error: {}", error.message()))
        });
        let mut problems: Vec<Problem> = problems.collect();
        problems.sort_by(|a, b| a.origin.cmp(&b.origin));
        // After the first error of a line, the parser only guesses.
        problems.dedup_by_key(|problem| problem.origin.line());
        return Err(problems);
    }
    Ok(convert_table(table.get_ref(), &positions))
}

/// The offset at which a document exceeds the limits of nesting. Each bracket and each dot of a key nests a table or
/// list. Thousands of levels could be parsed, but dropping them would overflow the stack.
fn find_too_deep(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut open = Vec::new();
    let mut dots = 0;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'#' => at += bytes[at..].iter().take_while(|it| **it != b'\n').count(),
            b'"' | b'\'' => at = end_of_string(bytes, at),
            b'{' | b'[' => open.push(byte),
            b'}' if open.last() == Some(&b'{') => drop(open.pop()),
            b']' if open.last() == Some(&b'[') => drop(open.pop()),
            _ => {}
        }
        dots = match byte {
            b'.' => dots + 1,
            b'{' | b'[' | b'}' | b']' | b'=' | b',' | b'\n' | b'#' => 0,
            _ => dots,
        };
        if open.len() > MAX_NESTING || dots > MAX_KEY_DOTS {
            return Some(at);
        }
        at += 1;
    }
    None
}

/// The last byte of the string that starts here. If it is not closed, the last byte of its line or of the text.
fn end_of_string(bytes: &[u8], start: usize) -> usize {
    let quote = bytes[start];
    let triple = [quote; 3];
    let is_triple = bytes[start..].starts_with(&triple);
    let mut at = start + if is_triple { 3 } else { 1 };
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' if quote == b'"' && bytes.get(at + 1) != Some(&b'\n') => at += 1,
            b'\n' if !is_triple => return at - 1,
            _ if is_triple && bytes[at..].starts_with(&triple) => {
                // Up to two quotes before the closing three belong to the string.
                let more = bytes[at + 3..].iter().take(2);
                return at + 2 + more.take_while(|it| **it == quote).count();
            }
            _ if !is_triple && byte == quote => return at,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

fn convert_table(table: &DeTable<'_>, positions: &LineIndex<'_>) -> Table {
    let entry = |(key, value): (&Spanned<toml::de::DeString<'_>>, &Spanned<DeValue<'_>>)| {
        let node = Node {
            origin: positions.origin_at(key.span().start),
            value: convert_value(value.get_ref(), positions),
        };
        (key.get_ref().clone().into_owned(), node)
    };
    table.iter().map(entry).collect()
}

fn convert_value(value: &DeValue<'_>, positions: &LineIndex<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::String(text.clone().into_owned()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::HugeInteger,
        },
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(time) => Value::Datetime(time.to_string()),
        DeValue::Array(items) => {
            let item = |item: &Spanned<DeValue<'_>>| Node {
                origin: positions.origin_at(item.span().start),
                value: convert_value(item.get_ref(), positions),
            };
            Value::Array(items.iter().map(item).collect())
        }
        DeValue::Table(table) => Value::Table(convert_table(table, positions)),
    }
}

/// Offsets of line starts: converts an offset to a position without counting from the top each time.
struct LineIndex<'t> {
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> LineIndex<'t> {
    fn new(text: &'t str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let starts = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1));
        Self {
            text,
            starts: starts.collect(),
        }
    }

    fn origin_at(&self, offset: usize) -> Origin {
        let line = self.starts.partition_point(|start| *start <= offset).max(1);
        let start = self.starts[line - 1];
        let before = self.text.get(start..offset).unwrap_or_default();
        Origin::File {
            line,
            column: before.chars().count() + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{format_problems, parse};

    fn error_text(bytes: &[u8]) -> String {
        format_problems(&parse(bytes).expect_err("an error"), "f", "\n")
    }

    #[test]
    fn all_syntax_errors_are_listed_without_source() {
        let errors = error_text(b"api_key = \"sk-secret\nname = \nother = = 2\n");
        let positions: Vec<&str> = errors.lines().filter_map(|line| line.get(..4)).collect();
        assert_eq!(positions, ["f:1:", "f:2:", "f:3:"], "{errors}");
        assert!(!errors.contains("sk-secret"), "{errors}");
    }

    #[test]
    fn unusual_bytes_are_reported_or_accepted() {
        assert!(parse(b"\xef\xbb\xbfname = \"x\"").is_ok());
        assert_eq!(
            error_text(b"a = 1\nb = \"\xff\""),
            "f:2:6: the file is not UTF-8; save it as UTF-8"
        );
        assert!(error_text(&vec![b'#'; 2 << 20]).contains("larger than"));
        let deep = format!("{}a = 1", "a.".repeat(500_000));
        assert_eq!(
            error_text(deep.as_bytes()),
            "f:1:34: nested too deeply: at most 40 brackets, and 16 dots in a key"
        );
        let nested = format!("a = {}", "[".repeat(500_000));
        assert!(error_text(nested.as_bytes()).contains("nested too deeply"));
        // Strings and comments may contain any brackets and dots.
        let prose = format!(
            "a = \"\"\"\n\"{0}\\\"\"\"\"\nb = '{0}' # {0}\n",
            "a.{[".repeat(100)
        );
        assert!(parse(prose.as_bytes()).is_ok());
        // The deepest document that both limits allow fits a thread's stack.
        let key = format!("{}a = {{ ", "a.".repeat(16));
        let deepest = format!("{}{}", key.repeat(40), "}".repeat(40));
        assert!(parse(deepest.as_bytes()).is_ok());
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in r#"([a-c.='"\[\]{}#,0-9 \n\\é]|name|model|\[\[|"""|inf|0x|1979-05-27){0,60}"#) {
            if let Err(problems) = parse(text.as_bytes()) {
                assert!(!problems.is_empty());
            }
        }
    }
}
