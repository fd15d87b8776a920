//! Other protocols over the same runs.

mod ag_ui;
mod console;
mod mcp;
mod openai;
