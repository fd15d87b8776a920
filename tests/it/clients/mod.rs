//! Other protocols over the same runs.

mod mcp;
mod openai;
