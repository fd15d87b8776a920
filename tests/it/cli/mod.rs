//! The commands.

mod checks;
mod commands;
mod home;
mod runs;
