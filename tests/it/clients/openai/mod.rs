//! The API of OpenAI's clients.

mod chat;
pub mod client_tools;
mod models;
mod response_streams;
mod responses;
mod tool_choice;
mod unstored_responses;
