//! Hostile input from clients, models and files.

mod agent_files;
mod clients;
mod replies;
mod requests;
mod schemas;
mod terminal_text;
