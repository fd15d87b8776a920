//! Runs: creating, reading, the turn loop, limits, conversations.

mod api;
mod attachments;
mod budget;
mod cancel;
mod context_window;
mod memory;
mod partial_content;
mod run_loop;
mod sessions;
mod structured_output;
mod timeouts;
mod usage;
