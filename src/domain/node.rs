//! The processes that share a database.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A process among those that share a database, from when it joins them until it leaves, or until another one takes over its
/// trees. A process that joins again gets another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub Uuid);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node_{}", self.0.simple())
    }
}
