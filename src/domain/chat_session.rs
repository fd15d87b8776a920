//! The name of a session that a chat begins, in the terminal or in the console.

use crate::domain::run::RunId;

/// The end of an id is random. Its twelve digits fit a table.
pub fn new_name() -> String {
    let random = RunId::new().0.as_u64_pair().1 & 0xffff_ffff_ffff;
    format!("chat-{random:012x}")
}
