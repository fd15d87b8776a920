//! The contract for what one node does for all that share a database.

use futures_util::future::BoxFuture;

use crate::store::StoreError;

/// Schedules, retention, webhooks, batches, and runs that no node can drive.
pub const LEADER: &str = "leader";

pub trait Duties: Send + Sync + 'static {
    /// Whether this node has the duty of this name. It gets a duty whose node is gone, and has it until it is gone itself.
    fn holds_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Leaves the duty to another node. Returns false if this node does not have it, or there is no other.
    fn hand_over_duty(&self, name: &'static str) -> BoxFuture<'_, Result<bool, StoreError>>;
}
