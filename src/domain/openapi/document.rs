//! A document: its operations, and what references in it lead to.

use serde_json::Value;

use crate::domain::http_tool::HttpMethod;
use crate::domain::yaml;

/// The largest document.
pub const MAX_DOCUMENT_BYTES: usize = 16 << 20;
/// The most references that lead to one object.
const MAX_HOPS: usize = 16;

pub struct Document {
    pub(super) root: Value,
    pub(super) is_version_3_0: bool,
}

impl Document {
    /// Reads JSON or YAML.
    ///
    /// # Errors
    /// The second half of a sentence that begins with the document.
    pub fn parse(text: &str) -> Result<Self, String> {
        let root = match text.trim_start().starts_with('{') {
            true => serde_json::from_str(text).map_err(|error| format!("is no JSON: {error}"))?,
            false => {
                let read = yaml::parse(text);
                read.map_err(|it| format!("line {}: {}", it.line, it.text))?
            }
        };
        if root.get("swagger").is_some() {
            return Err("is of Swagger 2.0; convert it to OpenAPI 3".to_owned());
        }
        let version = root.get("openapi").and_then(Value::as_str);
        let version = version.ok_or("is no OpenAPI document: it has no openapi: 3.x at its top")?;
        if !version.starts_with("3.") {
            return Err(format!("is of OpenAPI {version}; 3.0 and 3.1 are read"));
        }
        Ok(Self {
            is_version_3_0: version.starts_with("3.0"),
            root,
        })
    }

    /// Its operations, in its order.
    pub(super) fn entries(&self) -> Entries<'_> {
        let mut entries = Entries::default();
        let paths = self.root.get("paths").and_then(Value::as_object);
        for (path, item) in paths.into_iter().flatten() {
            let item = match self.resolve(item) {
                Ok(item) => item,
                Err(why) => {
                    entries.unreadable_paths.push((path.as_str(), why));
                    continue;
                }
            };
            for (name, method) in HttpMethod::NAMES {
                if let Some(operation) = item.get(name.to_ascii_lowercase()) {
                    entries.operations.push(Entry {
                        path,
                        item,
                        method,
                        operation,
                    });
                }
            }
        }
        entries
    }

    /// The object, or the one that it refers to.
    pub(super) fn resolve<'d>(&'d self, value: &'d Value) -> Result<&'d Value, String> {
        let mut value = value;
        for _ in 0..MAX_HOPS {
            match value.get("$ref").and_then(Value::as_str) {
                Some(reference) => value = self.find(reference)?,
                None => return Ok(value),
            }
        }
        Err(format!("a reference leads through over {MAX_HOPS} others"))
    }

    /// What a reference such as `#/components/schemas/Pet` names.
    pub(super) fn find(&self, reference: &str) -> Result<&Value, String> {
        let Some(pointer) = reference.strip_prefix('#') else {
            return Err(format!(
                "\"{reference}\" is in another document, and only references within the document are followed"
            ));
        };
        let found = self.root.pointer(&decode(pointer));
        let found = found.filter(|_| pointer.starts_with('/'));
        found.ok_or_else(|| format!("the document has no \"{reference}\""))
    }
}

#[derive(Default)]
pub(super) struct Entries<'d> {
    pub operations: Vec<Entry<'d>>,
    /// Paths whose references lead nowhere, each with the reason.
    pub unreadable_paths: Vec<(&'d str, String)>,
}

/// An operation in the document.
pub(super) struct Entry<'d> {
    pub path: &'d str,
    /// The path's object.
    pub item: &'d Value,
    pub method: HttpMethod,
    pub operation: &'d Value,
}

impl<'d> Entry<'d> {
    pub fn id(&self) -> Option<&'d str> {
        self.operation.get("operationId").and_then(Value::as_str)
    }

    /// `GET /pets`
    pub fn address(&self) -> String {
        format!("{} {}", self.method.name(), self.path)
    }
}

/// Decodes the percent-encoding of a reference.
pub(super) fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..2).and_then(|it| std::str::from_utf8(it).ok());
        let digits = digits.filter(|it| it.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let byte = digits.and_then(|it| u8::from_str_radix(it, 16).ok());
        match (first, byte) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
