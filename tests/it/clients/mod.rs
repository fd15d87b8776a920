//! Other protocols over the same runs.

mod a2a;
mod ag_ui;
mod console;
mod mcp;
pub mod openai;
mod wrong_shapes;
