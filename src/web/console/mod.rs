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
use crate::web::console::layout::Page;
use crate::web::console::pages::{
    add_to_dataset, agent, agents, approvals, chat, compare, eval, evals, missing, picture, run,
    runs, sessions, system, usage,
};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::route::{Route, page};

pub mod assets;
pub mod chart;
pub mod diff;
pub mod format;
pub mod interval;
pub mod layout;
pub mod markdown;
pub mod messages;
pub mod pages;
pub mod parts;
pub mod request;
pub mod timeline;

pub fn routes() -> Vec<Route> {
    vec![
        page("/", layout::redirect_to_console),
        page("/ui", layout::redirect_to_console),
        html_page("/ui/", runs::page),
        html_page("/ui/runs/{id}", run::page),
        html_page("/ui/runs/{id}/dataset", add_to_dataset::page),
        page("/ui/runs/{id}/pictures/{sha256}", picture::get).with_scope(KeyScope::Read),
        html_page("/ui/compare", compare::page),
        html_page("/ui/evals", evals::page),
        html_page("/ui/evals/{id}", eval::page),
        html_page("/ui/agents", agents::page),
        html_page("/ui/agents/{name}", agent::page),
        html_page("/ui/agents/{name}/chat", chat::page),
        html_page("/ui/approvals", approvals::page),
        html_page("/ui/sessions", sessions::page),
        html_page("/ui/sessions/{name}", sessions::session_page),
        html_page("/ui/usage", usage::page),
        html_page("/ui/system", system::page),
        page("/ui/assets/{hash}/{file}", assets::get),
        html_page("/ui/{*path}", missing::page),
    ]
}

/// A page, or a page with the error.
fn html_page<P>(path: &'static str, render: fn(ConsoleRequest) -> P) -> Route
where
    P: Future<Output = Result<Page, Problem>> + Send + 'static,
{
    page(path, move |request: ConsoleRequest| async move {
        let shell = request.shell.clone();
        match render(request).await {
            Ok(page) => layout::page(&shell, &page),
            Err(problem) => layout::error_page(&shell, &problem),
        }
    })
}
