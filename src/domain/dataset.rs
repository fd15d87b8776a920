//! Datasets: files of JSON lines, each of them a case that evaluations run. An error names the line and the key.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::run::RunId;
use crate::settings::suggestion;

/// Most cases of a dataset.
pub const MAX_CASES: usize = 100_000;
/// Most bytes of a dataset.
pub const MAX_BYTES: usize = 64 << 20;
/// Most bytes of a line.
pub const MAX_LINE_BYTES: usize = 1 << 20;
/// Most characters of a case's id.
const MAX_ID: usize = 128;
/// Reading stops after so many errors.
const MAX_ERRORS: usize = 100;

/// A case of a dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Unique within its dataset. A case without one has the id of its run, or else the number of its line: lines that are added at
    /// the end change no id.
    pub id: String,
    /// The body of the request for its run, as JSON: `input`, and what it has of `context`, `messages` and `labels`.
    pub request: String,
    /// The answer that is expected, for scorers.
    pub expected: Option<Value>,
    /// The recorded run that it comes from.
    pub run: Option<RunId>,
}

/// What is wrong with a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetError {
    /// From 1; `None` for the file as a whole.
    pub line: Option<usize>,
    /// Begins with a JSON Pointer to the key, if the error is about one.
    pub message: String,
}

impl DatasetError {
    fn at(line: usize, message: impl Into<String>) -> Self {
        Self {
            line: Some(line),
            message: message.into(),
        }
    }

    pub fn of_file(message: impl Into<String>) -> Self {
        Self {
            line: None,
            message: message.into(),
        }
    }
}

impl fmt::Display for DatasetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// Says what is wrong with the body of a request for a run, as the API checks it.
pub type CheckRequest<'c> = dyn Fn(&str) -> Result<(), String> + 'c;

/// Reads a dataset. Blank lines are left out, but count as lines.
///
/// # Errors
/// Everything that is wrong with it, up to 100 lines.
pub fn parse(bytes: &[u8], check: &CheckRequest<'_>) -> Result<Vec<Case>, Vec<DatasetError>> {
    if bytes.len() > MAX_BYTES {
        let mebibytes = MAX_BYTES >> 20;
        let message = format!("the file has more than {mebibytes} MiB, the most of a dataset");
        return Err(vec![DatasetError::of_file(message)]);
    }
    // Editors on Windows write a byte order mark, which has no meaning.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    parse_lines(bytes.split(|byte| *byte == b'\n'), check)
}

/// As [`parse`], of cases that are lines already.
///
/// # Errors
/// Those of [`parse`].
pub fn parse_lines<'l>(
    lines: impl Iterator<Item = &'l [u8]>,
    check: &CheckRequest<'_>,
) -> Result<Vec<Case>, Vec<DatasetError>> {
    let (mut cases, mut errors) = (Vec::new(), Vec::new());
    let mut lines_by_id = HashMap::new();
    for (index, line) in lines.enumerate() {
        let number = index + 1;
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        if cases.len() == MAX_CASES {
            let message = format!("is above the {MAX_CASES} cases that a dataset may have");
            errors.push(DatasetError::at(number, message));
            break;
        }
        match parse_case(line, number, check) {
            Ok(case) => match lines_by_id.get(&case.id) {
                Some(first) => errors.push(repeated_id(&case, *first, number)),
                None => {
                    lines_by_id.insert(case.id.clone(), number);
                    cases.push(case);
                }
            },
            Err(message) => errors.push(DatasetError::at(number, message)),
        }
        if errors.len() >= MAX_ERRORS {
            break;
        }
    }
    match errors.is_empty() {
        true => Ok(cases),
        false => Err(errors),
    }
}

fn repeated_id(case: &Case, first: usize, line: usize) -> DatasetError {
    let message = format!(
        "/id: {:?} is the id of line {first} too; a case without \"id\" has the id of its run, or else the number of its line",
        case.id
    );
    DatasetError::at(line, message)
}

/// A line, with the parts of the request as they are written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'l> {
    id: Option<String>,
    #[serde(borrow)]
    input: Option<&'l RawValue>,
    #[serde(borrow)]
    context: Option<&'l RawValue>,
    #[serde(borrow)]
    messages: Option<&'l RawValue>,
    expected: Option<Value>,
    labels: Option<BTreeMap<String, String>>,
    run: Option<RunId>,
}

const KEYS: [&str; 7] = [
    "id", "input", "context", "messages", "expected", "labels", "run",
];

/// The body of the request for a run.
#[derive(Serialize)]
struct Request<'l> {
    input: &'l RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<&'l RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'l RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<BTreeMap<String, String>>,
}

fn parse_case(line: &[u8], number: usize, check: &CheckRequest<'_>) -> Result<Case, String> {
    if line.len() > MAX_LINE_BYTES {
        let mebibytes = MAX_LINE_BYTES >> 20;
        return Err(format!("has more than {mebibytes} MiB, the most of a line"));
    }
    let text = std::str::from_utf8(line).map_err(|_| "is not UTF-8".to_owned())?;
    if !text.starts_with('{') {
        return Err("is not a JSON object".to_owned());
    }
    let line: Line<'_> = serde_json::from_str(text).map_err(|_| shape_error(text))?;
    let id = match (line.id, line.run) {
        (Some(id), _) => check_id(id)?,
        (None, Some(run)) => run.to_string(),
        (None, None) => number.to_string(),
    };
    let request = Request {
        input: line.input.ok_or("/input: is required")?,
        context: line.context,
        messages: line.messages,
        labels: line.labels,
    };
    let request = serde_json::to_string(&request).map_err(|error| error.to_string())?;
    check(&request)?;
    Ok(Case {
        id,
        request,
        expected: line.expected,
        run: line.run,
    })
}

fn check_id(id: String) -> Result<String, String> {
    let is_valid = !id.trim().is_empty()
        && id.chars().nth(MAX_ID).is_none()
        && !id.chars().any(char::is_control);
    match is_valid {
        true => Ok(id),
        false => Err(format!(
            "/id: must be 1 to {MAX_ID} characters, none of them a control character"
        )),
    }
}

/// Reads the line again, slowly, to find the error.
fn shape_error(text: &str) -> String {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let error = match serde_path_to_error::deserialize::<_, Line<'_>>(&mut deserializer) {
        Ok(_) => return "continues after its JSON object".to_owned(),
        Err(error) => error,
    };
    let path = error.path().to_string();
    let error = error.into_inner();
    let message = error.to_string();
    // The place is at the end; the number of the line is always 1.
    let message = message
        .rsplit_once(" at line ")
        .map_or(message.as_str(), |(message, _)| message);
    if !error.is_data() {
        return format!("is not JSON: {message} at column {}", error.column());
    }
    let key = path.split('.').next().unwrap_or_default();
    if KEYS.contains(&key) {
        return format!("/{}: {message}", path.replace('.', "/"));
    }
    match path.as_str() {
        "." => message.to_owned(),
        key => {
            let hint = suggestion::clause(suggestion::did_you_mean(key, KEYS));
            format!("/{key}: unknown key{hint}")
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{MAX_CASES, MAX_LINE_BYTES, parse};

    fn errors(text: &str) -> Vec<String> {
        let check = |request: &str| match request.contains("refused") {
            true => Err("/input: is refused".to_owned()),
            false => Ok(()),
        };
        let errors = parse(text.as_bytes(), &check).expect_err(text);
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_case_is_the_body_of_a_request_with_what_is_expected() {
        let text = "\u{feff}{\"input\": \"a\"}\r\n\n\
            {\"id\": \"b\", \"input\": {\"n\": 1.50}, \"context\": \"c\", \"labels\": {\"x\": \"y\"}, \"expected\": {\"ok\": true}}\n\
            {\"input\": [], \"messages\": [], \"run\": \"run_01980000-0000-7000-8000-000000000001\", \"expected\": null}";
        let cases = parse(text.as_bytes(), &|_| Ok(())).expect("cases");
        let ids: Vec<&str> = cases.iter().map(|case| case.id.as_str()).collect();
        let run = "run_01980000-0000-7000-8000-000000000001";
        assert_eq!(ids, ["1", "b", run]);
        assert_eq!(
            cases[1].request,
            r#"{"input":{"n": 1.50},"context":"c","labels":{"x":"y"}}"#
        );
        assert_eq!(cases[1].expected, Some(json!({"ok": true})));
        assert_eq!(cases[2].request, r#"{"input":[],"messages":[]}"#);
        assert_eq!((&cases[2].expected, cases[1].run), (&None, None));
    }

    #[test]
    fn an_error_names_its_line_and_key() {
        for (line, expected) in [
            (
                "{\"inptu\": \"x\"}",
                "/inptu: unknown key; did you mean \"input\"?",
            ),
            ("{\"a.b\": 1}", "/a.b: unknown key"),
            ("{}", "/input: is required"),
            ("{\"input\": null}", "/input: is required"),
            ("[\"x\"]", "is not a JSON object"),
            ("{\"input\": \"x\"} {}", "continues after its JSON object"),
            ("{\"input\": }", "is not JSON: expected value at column 11"),
            (
                "{\"input\": \"x\", \"id\": 5}",
                "/id: invalid type: integer `5`, expected a string",
            ),
            (
                "{\"input\": \"x\", \"id\": \" \"}",
                "/id: must be 1 to 128 characters, none of them a control character",
            ),
            (
                "{\"input\": \"x\", \"labels\": {\"a\": 1}}",
                "/labels/a: invalid type: integer `1`, expected a string",
            ),
            ("{\"input\": \"refused\"}", "/input: is refused"),
        ] {
            assert_eq!(
                errors(&format!("\n{line}\n")),
                [format!("line 2: {expected}")]
            );
        }
        let run = errors("{\"input\": \"x\", \"run\": \"r\"}");
        assert!(run[0].starts_with("line 1: /run: "), "{run:?}");
        let twice = errors("{\"input\": \"x\", \"input\": \"y\"}");
        assert!(twice[0].contains("duplicate field"), "{twice:?}");
        let all = errors("{}\n{\"input\": \"x\"}\n{\"id\": \"2\", \"input\": \"y\"}");
        assert_eq!(all.len(), 2);
        assert!(
            all[1].starts_with("line 3: /id: \"2\" is the id of line 2 too"),
            "{all:?}"
        );
    }

    #[test]
    fn lines_and_cases_are_bounded() {
        let long = format!("{{\"input\": \"{}\"}}", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(
            errors(&long),
            ["line 1: has more than 1 MiB, the most of a line"]
        );
        let many = "{\"input\": \"x\"}\n".repeat(MAX_CASES);
        assert!(parse(many.as_bytes(), &|_| Ok(())).is_ok());
        let more = errors(&format!("{many}{{\"input\": \"x\"}}"));
        assert_eq!(
            more,
            ["line 100001: is above the 100000 cases that a dataset may have"]
        );
        assert_eq!(errors(&"{}\n".repeat(1000)).len(), 100);
        let deep = format!(
            "{{\"input\": \"x\", \"expected\": {}1{}}}",
            "[".repeat(10_000),
            "]".repeat(10_000)
        );
        assert!(
            errors(&deep)[0].contains("recursion limit"),
            "{:?}",
            errors(&deep)
        );
        let large = " ".repeat(super::MAX_BYTES + 1);
        assert_eq!(
            errors(&large),
            ["the file has more than 64 MiB, the most of a dataset"]
        );
    }
}
