//! The commands.

mod commands;
mod home;
mod runs;
