//! The console: pages for people at `/ui/`, rendered here.
//!
//! A page reads runs with the functions that the API's routes use, so that a key sees the same in both, and its forms send
//! requests to the API. The pages need no script to be read; the ES modules in `assets/` add live text, keys and forms.
//!
//! A key is sent in the `Authorization` header, as everywhere. A browser does not send one by itself: the script keeps the
//! key in the tab's `sessionStorage`, fetches the pages with it and replaces the body. There is no cookie, so a page of
//! another origin has nothing to misuse, and a closed tab has forgotten the key.
//!
//! Every text in a page may come from a model or a client. `maud` escapes it, scripts only write `textContent`, and the
//! content security policy allows no inline script, no inline style and no other host.

use crate::config::KeyScope;
use crate::web::console::pages::{
    agent, agents, approvals, chat, compare, missing, picture, run, runs, sessions, system, usage,
};
use crate::web::route::{Route, page};

pub mod assets;
pub mod chart;
pub mod format;
pub mod layout;
pub mod pages;
pub mod parts;
pub mod request;
pub mod timeline;

pub fn routes() -> Vec<Route> {
    vec![
        page("/", layout::redirect_to_console),
        page("/ui", layout::redirect_to_console),
        page("/ui/", runs::page),
        page("/ui/runs/{id}", run::page),
        page("/ui/runs/{id}/pictures/{sha256}", picture::get).with_scope(KeyScope::Read),
        page("/ui/compare", compare::page),
        page("/ui/agents", agents::page),
        page("/ui/agents/{name}", agent::page),
        page("/ui/agents/{name}/chat", chat::page),
        page("/ui/approvals", approvals::page),
        page("/ui/sessions", sessions::page),
        page("/ui/sessions/{name}", sessions::session_page),
        page("/ui/usage", usage::page),
        page("/ui/system", system::page),
        page("/ui/assets/{hash}/{file}", assets::get),
        page("/ui/{*path}", missing::page),
    ]
}
