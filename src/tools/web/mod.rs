//! The tools that reach the web: `url_fetch` reads a page that a model chooses, `web_search` queries the configured service,
//! tools of `[[http_tools]]` send requests to the hosts of an agent's file.

mod content;
mod fetch;
mod html;
mod html_reader;
pub mod http_tool;
pub mod search;
pub mod url_fetch;
