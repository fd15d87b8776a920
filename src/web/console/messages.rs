//! A message of a conversation: its head and its text.

use maud::{Markup, html};

use crate::domain::message::truncate_to_bytes;
use crate::engine::blocking::run_blocking;
use crate::web::console::parts::MAX_TEXT_BYTES;
use crate::web::console::{format, markdown};

/// Who wrote it, and a button that copies it.
pub fn head(role: &str, name: &str) -> Markup {
    html! {
        header {
            b { (name) }
            (copy_button(&format!("text of the {role} message")))
        }
    }
}

/// Copies the text beside it.
pub fn copy_button(what: &str) -> Markup {
    html! { button.quiet.needs-scripts type="button" data-copy aria-label=(format!("Copy the {what}")) { "Copy" } }
}

pub async fn text(role: &str, text: &str) -> Markup {
    cut_text(role, text, MAX_TEXT_BYTES).await
}

/// The text, as Markdown unless a tool wrote it. Models and clients choose it: it is rendered off the runtime's threads.
pub async fn cut_text(role: &str, text: &str, max_bytes: usize) -> Markup {
    if text.is_empty() {
        return html! {};
    }
    let shown = truncate_to_bytes(text, max_bytes).to_owned();
    let is_cut = shown.len() < text.len();
    let is_markdown = role != "tool";
    run_blocking(move || {
        html! {
            @if is_markdown { (markdown::render(&shown)) pre data-source hidden { (format::prose(&shown)) } }
            @else { pre.text data-source tabindex="0" { (format::prose(&shown)) } }
            @if is_cut { p.muted.small { "Only the beginning is shown." } }
        }
    })
    .await
}
