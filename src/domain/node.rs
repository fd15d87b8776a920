//! The processes that share a database.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A process among those that share a database, from when it joins them until it leaves, or until another one takes over its
/// trees. A process that joins again gets another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub Uuid);

/// Checks labels that nodes have or agents require. The error follows the key: `has "a b", …`.
pub fn check_labels(labels: &[String]) -> Result<(), String> {
    let is_valid = |label: &str| {
        let mut bytes = label.bytes();
        (1..=64).contains(&label.len())
            && bytes.all(|b| b.is_ascii_alphanumeric() || b"._-/:=".contains(&b))
    };
    match labels.iter().find(|label| !is_valid(label)) {
        Some(label) => Err(format!(
            "has {label:?}; a label has 1 to 64 characters of A-Z a-z 0-9 . _ - / : ="
        )),
        None => Ok(()),
    }
}

/// What a node has because it can send requests to this provider. Configured labels have no spaces.
pub fn provider_label(provider: &str) -> String {
    format!("provider {provider}")
}

/// What a node has because requests may name directories below this one.
pub fn root_label(root: &Path) -> String {
    format!("root {}", root.display())
}

/// What a node with these labels has, as a part of a sentence: `label gpu, provider acme`.
pub fn describe_labels(labels: &[String]) -> String {
    let described = labels.iter().map(|label| match is_service(label) {
        true => label.clone(),
        false => format!("label {label}"),
    });
    described.collect::<Vec<_>>().join(", ")
}

/// Whether it is no configured label.
pub fn is_service(label: &str) -> bool {
    label.contains(' ')
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node_{}", self.0.simple())
    }
}
