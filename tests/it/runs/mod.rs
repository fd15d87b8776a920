//! Runs: creating, reading, the turn loop, limits, conversations.

mod api;
mod attachment_forms;
mod attachment_urls;
mod attachments;
mod budget;
mod cancel;
pub mod context_window;
mod earlier_messages;
mod memory;
mod partial_content;
mod pause;
mod run_loop;
mod run_messages;
pub mod run_search;
mod scorers;
mod scores;
mod session_context;
mod session_queue;
mod session_routes;
mod sessions;
mod structured_input;
mod structured_output;
mod timeouts;
mod turns;
mod turns_kept;
mod usage;
mod warnings;
