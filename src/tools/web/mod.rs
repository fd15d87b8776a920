//! The tools that reach the web: `url_fetch` reads a page that a model chooses, `web_search` queries the configured service.

mod content;
mod fetch;
mod html;
pub mod search;
pub mod url_fetch;
