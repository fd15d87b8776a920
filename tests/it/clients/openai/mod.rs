//! The API of OpenAI's clients.

mod models;
