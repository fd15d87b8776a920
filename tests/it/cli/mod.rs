//! The commands.

mod commands;
mod runs;
