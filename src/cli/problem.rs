//! A daemon's problem details, as commands show them.

use serde::Deserialize;

/// `application/problem+json`, RFC 9457.
#[derive(Deserialize)]
pub struct Problem {
    #[serde(default)]
    pub code: String,
    title: String,
    detail: Option<String>,
    #[serde(default)]
    errors: Vec<FieldProblem>,
}

#[derive(Deserialize)]
struct FieldProblem {
    pointer: String,
    detail: String,
}

impl Problem {
    /// The detail, and the invalid fields that it does not name.
    pub fn into_message(self) -> String {
        let mut message = self.detail.unwrap_or(self.title);
        for error in self.errors {
            if !message.contains(&error.detail) {
                message.push_str(&format!("; {}: {}", error.pointer, error.detail));
            }
        }
        message
    }
}
