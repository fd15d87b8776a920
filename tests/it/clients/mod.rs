//! Other protocols over the same runs.

mod console;
mod mcp;
mod openai;
