//! What a tree that plays a recorded one again gets from its record: results of calls, and the tools of MCP servers, none of which
//! is started.

pub mod load;
pub mod offer;
pub mod recorded_calls;
pub mod unknown_calls;
