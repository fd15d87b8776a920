//! The commands.

mod chat;
mod checks;
mod commands;
mod home;
mod run;
mod runs;
