//! Estimates the cost of a schema without compiling it.

use serde_json::Value;

use crate::domain::json_schema::metered_json::copied_bytes;

/// The quantities that determine the cost of a schema.
#[derive(Clone, Copy, Debug, Default)]
pub struct Complexity {
    pub depth: usize,
    pub references: usize,
    pub patterns: usize,
    pub pattern_bytes: usize,
    /// The patterns that are matched against the names of members.
    pub name_patterns: usize,
    /// The most bytes of a keyword's value that an error of this keyword copies.
    pub copied_bytes: usize,
}

impl Complexity {
    pub fn measure(schema: &Value) -> Self {
        let mut complexity = Self::default();
        complexity.visit(schema, 1);
        complexity
    }

    pub fn reference_levels(&self) -> usize {
        self.references * self.depth
    }

    /// A property that is named like a keyword is counted too.
    fn visit(&mut self, schema: &Value, depth: usize) {
        self.depth = self.depth.max(depth);
        match schema {
            Value::String(text) => self.copied_bytes = self.copied_bytes.max(text.len()),
            Value::Array(items) => items.iter().for_each(|item| self.visit(item, depth + 1)),
            Value::Object(members) => {
                for (key, value) in members {
                    match (key.as_str(), value) {
                        ("pattern", Value::String(pattern)) => {
                            self.patterns += 1;
                            self.pattern_bytes += pattern.len();
                        }
                        ("patternProperties", Value::Object(patterns)) => {
                            self.patterns += patterns.len();
                            self.name_patterns += patterns.len();
                            let bytes = patterns.keys().map(String::len);
                            self.pattern_bytes += bytes.sum::<usize>();
                        }
                        ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(_)) => {
                            self.references += 1;
                        }
                        ("not", schema) => {
                            self.copied_bytes = self.copied_bytes.max(copied_bytes(schema));
                        }
                        _ => {}
                    }
                    self.visit(value, depth + 1);
                }
            }
            _ => {}
        }
    }
}
