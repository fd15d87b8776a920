//! Other protocols over the same runs.

mod openai;
