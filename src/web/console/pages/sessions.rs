//! `/ui/sessions`: the key's sessions, and the runs of one.

use maud::{Markup, html};

use crate::config::KeyScope;
use crate::domain::agent::is_agent_name;
use crate::domain::run::{Run, RunId, now};
use crate::store::runs::SessionQuery;
use crate::store::sessions::SessionListQuery;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::messages;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::{Cursor, PageQuery, SessionName};

const PAGE_SIZE: usize = 50;
/// Runs of a session on one page.
const EXCHANGES: usize = 20;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let page: PageQuery<SessionName> = request.query()?;
    let query = SessionListQuery {
        owner: request.principal.key_name().map(str::to_owned),
        after: page.cursor.map(|Cursor(SessionName(name))| name),
        limit: PAGE_SIZE,
    };
    let page = request.state.runner.store().sessions(query).await?;
    let next = page.next.map(|next| {
        format!(
            "{}?{}",
            request.href("/sessions"),
            query_string(&[("cursor", &next)])
        )
    });
    let can_use = |agent: &str| request.principal.can_use_agent(agent);
    let now = now();
    let sessions = page.sessions.into_iter();
    let sessions: Vec<_> = sessions.filter(|it| can_use(&it.last_agent)).collect();
    let body = html! {
        div.head { h1 { "Sessions" } }
        div #list data-live="5000" {
            @if sessions.is_empty() {
                (parts::empty_with("No sessions", "A run that names a session starts one; later runs continue its conversation:", "axed chat helper --session first"))
            } @else {
                div.scroll role="region" aria-label="Sessions" tabindex="0" {
                    table.list {
                        thead { tr { th { "Session" } th { "Agent" } th.number { "Runs" } th.number { "Last run" } } }
                        tbody {
                            @for session in &sessions {
                                tr data-row {
                                    td.main { a href=(request.href(&format!("/sessions/{}", session.name))) { (session.name) } }
                                    td { (session.last_agent) }
                                    td.number { (session.runs) }
                                    td.number { (format::ago(session.updated_at, now)) }
                                }
                            }
                        }
                    }
                }
            }
            (next_names(next))
        }
    };
    Ok(Page::new("Sessions", "Sessions", body))
}

fn next_names(href: Option<String>) -> Markup {
    html! {
        @if let Some(href) = href {
            nav.pages aria-label="Pages" { a.button href=(href) rel="next" { "More" } }
        }
    }
}

pub async fn session_page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let page: PageQuery<RunId> = request.query()?;
    let name = request.param("name");
    if !is_agent_name(name) {
        return Err(Problem::session_not_found(name));
    }
    let before = page.cursor.map(|Cursor(id)| id);
    let query = SessionQuery {
        owner: request.principal.key_name().map(str::to_owned),
        name: name.to_owned(),
        before,
        limit: EXCHANGES,
        cut_texts: false,
        skip_damaged: true,
        ..SessionQuery::default()
    };
    let store = request.state.runner.store();
    let runs = store.session_runs(query).await?;
    let last = runs.last().map(|run| run.id);
    let next = last.filter(|_| runs.len() == EXCHANGES).map(|last| {
        let query = query_string(&[("cursor", &last.to_string())]);
        format!("{}?{query}", request.href(&format!("/sessions/{name}")))
    });
    let runs = request.principal.visible_runs(runs, store.as_ref()).await?;
    let runs = request.state.runner.with_suspensions(runs);
    if runs.is_empty() && before.is_none() {
        return Err(Problem::session_not_found(name));
    }
    let mut transcript = Vec::new();
    for run in runs.iter().rev() {
        transcript.push(exchange(request, run).await);
    }
    let body = html! {
        div.head { h1 { (name) } (chat_link(request, name, &runs)) }
        div #list data-live="3000" {
            ol.thread { @for exchange in &transcript { (exchange) } }
            (parts::next_page(next))
            h2 { "Runs" }
            (parts::run_table(request, &runs, now(), false))
        }
    };
    Ok(Page::new("Sessions", format!("Session {name}"), body))
}

/// What was said in a run of the session.
async fn exchange(request: &ConsoleRequest, run: &Run) -> Markup {
    let input = messages::text("user", &run.input.to_plain_text()).await;
    let answer = run.content.as_deref().or(run.partial_content.as_deref());
    let answer = messages::text("assistant", answer.unwrap_or_default()).await;
    html! {
        li.user {
            (messages::head("user", "User"))
            (input)
            @for attachment in run.input.attachments() { (parts::attached(request, run.id, attachment)) }
        }
        li.assistant {
            (messages::head("assistant", &run.agent))
            (answer)
            @if let Some(error) = &run.error { p.error { (error.message) } }
            p.small.muted { a href=(request.run_href(run.id)) { (run.status.as_str()) " " (format::ago(run.created_at, now())) } }
        }
    }
}

fn chat_link(request: &ConsoleRequest, name: &str, runs: &[Run]) -> Markup {
    let agent = runs.first().filter(|_| request.may(KeyScope::Run));
    html! {
        @if let Some(run) = agent {
            @let query = query_string(&[("session", name)]);
            a.button href=(request.href(&format!("/agents/{}/chat?{query}", run.agent))) { "Continue as a chat" }
        }
    }
}
