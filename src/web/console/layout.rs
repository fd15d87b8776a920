//! What surrounds every page: the head, the navigation, the headers of the response; and the pages without content of their
//! own: sign-in and errors.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, LOCATION, REFERRER_POLICY,
    VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};
use tracing::error;

use crate::store::StoreError;
use crate::web::console::assets::HASH;
use crate::web::error::Problem;
use crate::web::extract::link_prefix::LinkPrefix;
use crate::web::state::AppState;

/// Allows nothing that is inline and no other host. Previews of pictures are `blob:` and `data:` addresses.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; \
                      connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 7] = [
    (CONTENT_TYPE, "text/html; charset=utf-8"),
    (CONTENT_SECURITY_POLICY, POLICY),
    (CACHE_CONTROL, "private, no-store"),
    (VARY, "authorization"),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];

/// Name and path of each section.
const SECTIONS: [(&str, &str); 8] = [
    ("Runs", "/"),
    ("Agents", "/agents"),
    ("Approvals", "/approvals"),
    ("Sessions", "/sessions"),
    ("Evaluations", "/evals"),
    ("Compare", "/compare"),
    ("Usage", "/usage"),
    ("System", "/system"),
];

/// Calls that wait are counted up to this number.
pub const MAX_BADGE: usize = 100;

/// What the frame of a page shows.
#[derive(Clone)]
pub struct Shell {
    prefix: String,
    has_keys: bool,
    /// The key that the page was requested with.
    pub key_name: Option<String>,
    /// The number of calls that wait for a decision that the key may see.
    pub approvals: usize,
    /// Why nothing is written, and what to do.
    trouble: Option<&'static str>,
}

impl Shell {
    pub fn new(links: &LinkPrefix, state: &AppState) -> Self {
        Self {
            prefix: (**links).to_owned(),
            has_keys: !state.settings.keys.is_empty(),
            key_name: None,
            approvals: 0,
            trouble: state.runner.store_error().map(describe_trouble),
        }
    }

    /// Whether requests need a key, which a browser does not send by itself.
    pub fn has_keys(&self) -> bool {
        self.has_keys
    }

    /// The address of a page below `/ui`.
    pub fn href(&self, path: &str) -> String {
        format!("{}/ui{path}", self.prefix)
    }

    /// The address of a route of the API.
    pub fn api(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }

    fn asset(&self, name: &str) -> String {
        format!("{}/ui/assets/{}/{name}", self.prefix, *HASH)
    }
}

fn describe_trouble(error: StoreError) -> &'static str {
    match error {
        StoreError::DiskFull => {
            "The disk is full: nothing can be recorded, and runs wait. Free space on the disk of the data directory or delete \
             old runs; axed continues by itself."
        }
        _ => {
            "The store refuses writes: runs wait, and new ones are not accepted. The log of the daemon has the reason; once the \
             database works again, axed continues by itself."
        }
    }
}

/// A page without its frame.
pub struct Page {
    pub title: String,
    /// The section of the navigation that it belongs to.
    pub section: &'static str,
    pub body: Markup,
    /// Whether the page uses the whole width.
    pub is_wide: bool,
}

impl Page {
    pub fn new(section: &'static str, title: impl Into<String>, body: Markup) -> Self {
        Self {
            title: title.into(),
            section,
            body,
            is_wide: false,
        }
    }
}

/// `GET /` and `GET /ui`.
pub async fn redirect_to_console(links: LinkPrefix) -> Response {
    let location = format!("{}/ui/", &*links);
    (StatusCode::SEE_OTHER, [(LOCATION, location)]).into_response()
}

/// A page in its frame.
pub fn page(shell: &Shell, page: &Page) -> Response {
    page_response(StatusCode::OK, frame(shell, page))
}

pub fn error_page(shell: &Shell, problem: &Problem) -> Response {
    if let Some(cause) = problem.cause() {
        error!("A page of the console failed: {cause}");
    }
    let status = problem.status();
    let title = status.canonical_reason().unwrap_or("Error");
    let body = html! {
        div.empty role="alert" {
            p.code { (status.as_u16()) }
            h1 { (title) }
            p { (problem.detail()) }
            p { a.button href=(shell.href("/")) { "All runs" } }
        }
    };
    page_response(status, frame(shell, &Page::new("", title, body)))
}

/// The page that asks for a key, or for another one than that which was refused. Without a refusal its status is 200: a
/// browser's first request cannot have a key.
pub fn sign_in(shell: &Shell, refusal: Option<&Problem>) -> Response {
    let status = refusal.map_or(StatusCode::OK, Problem::status);
    let why = refusal.map_or("", |problem| match status {
        StatusCode::UNAUTHORIZED => "The server does not know this key.",
        _ => problem.detail(),
    });
    let body = html! {
        form.sign-in #sign-in data-sign-in {
            (mark())
            h1 { "Sign in" }
            p.muted { "This server needs a key. It is kept in this tab only, until you close it." }
            label for="key" { "Key" }
            input #key type="password" name="key" autocomplete="off" spellcheck="false" required;
            p.error role="alert" { (why) }
            button.primary type="submit" { "Sign in" }
            noscript {
                p.muted {
                    "Without scripts, a browser cannot send a key. A program can: send the header "
                    code { "Authorization: Bearer <key>" } " with any page."
                }
            }
        }
    };
    page_response(status, frame(shell, &Page::new("", "Sign in", body)))
}

fn page_response(status: StatusCode, page: Markup) -> Response {
    let mut response = (status, page.into_string()).into_response();
    for (name, value) in HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

fn frame(shell: &Shell, page: &Page) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" data-prefix=(shell.prefix) {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (page.title) " · axed" }
                link rel="icon" type="image/svg+xml" href=(shell.asset("icon.svg"));
                link rel="stylesheet" href=(shell.asset("console.css"));
                link rel="stylesheet" href=(shell.asset("run.css"));
                script src=(shell.asset("theme.js")) {}
                script type="module" src=(shell.asset("console.js")) {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                (top_bar(shell, page.section))
                div #trouble.trouble role="alert" data-live { @if let Some(trouble) = shell.trouble { (trouble) } }
                main #main tabindex="-1" class=(if page.is_wide { "wide" } else { "page" }) { (page.body) }
                p #notice role="status" {}
                // Sentences of a streaming text. A box that grows by words would interrupt a screen reader.
                div.sr #spoken role="log" aria-live="polite" {}
                (key_help())
            }
        }
    }
}

fn top_bar(shell: &Shell, section: &str) -> Markup {
    let is_open = !shell.has_keys || shell.key_name.is_some();
    html! {
        header.top {
            a.brand href=(shell.href("/")) { (mark()) span { "axed" } }
            @if is_open {
                nav aria-label="Sections" {
                    @for (name, path) in SECTIONS {
                        @let current = (name == section).then_some("page");
                        a href=(shell.href(path)) aria-current=[current] {
                            (name)
                            @if path == "/approvals" { (badge(shell.approvals)) }
                        }
                    }
                }
            }
            div.tools {
                @if let Some(key) = &shell.key_name {
                    span.muted title="The key of this tab" { (key) }
                    button.quiet type="button" data-sign-out { "Sign out" }
                }
                button.quiet.icon type="button" data-help aria-label="Keyboard shortcuts" title="Keyboard shortcuts" { "?" }
                button.quiet.icon type="button" data-theme-toggle aria-label="Light or dark" title="Light or dark" {
                    svg viewBox="0 0 16 16" aria-hidden="true" {
                        circle cx="8" cy="8" r="6" class="ring" {}
                        path d="M8 2a6 6 0 0 1 0 12z" class="half" {}
                    }
                }
            }
        }
    }
}

/// The number of what waits, of which [`MAX_BADGE`] are counted.
fn badge(count: usize) -> Markup {
    html! {
        span #waiting.badge data-live {
            @if count >= MAX_BADGE { (MAX_BADGE - 1) "+" }
            @else if count > 0 { (count) }
        }
    }
}

fn mark() -> Markup {
    html! {
        svg.mark viewBox="0 0 24 24" aria-hidden="true" {
            path d="M4 6h10M8 12h12M4 18h8" {}
            circle cx="18" cy="6" r="2" {}
            circle cx="16" cy="18" r="2" {}
        }
    }
}

fn key_help() -> Markup {
    let keys = [
        ("j", "Next row"),
        ("k", "Previous row"),
        ("enter", "Open the row"),
        ("/", "Search or filter"),
        ("g r", "Runs"),
        ("g a", "Agents"),
        ("?", "This help"),
        ("esc", "Close"),
    ];
    html! {
        dialog #help aria-labelledby="help-title" {
            h2 #help-title { "Keyboard shortcuts" }
            dl.keys {
                @for (key, meaning) in keys { div { dt { kbd { (key) } } dd { (meaning) } } }
            }
            form method="dialog" { button type="submit" { "Close" } }
        }
    }
}
