//! The loop of one run: turns, tool calls, and its end.

pub mod batch;
pub mod compaction;
pub mod context_window;
pub mod conversation;
pub mod drive;
pub mod ending;
pub mod final_text;
pub mod finish;
pub mod limits;
pub mod loop_guard;
pub mod new_messages;
pub mod provider_request;
pub mod recall;
pub mod request_bounds;
pub mod request_messages;
pub mod request_size;
pub mod resume;
pub mod setup;
pub mod start;
pub mod summary;
pub mod summary_request;
pub mod tool_calls;
pub mod tool_results;
pub mod turn;
pub mod turn_loop;
pub mod turn_request;
