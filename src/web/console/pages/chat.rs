//! `/ui/agents/{name}/chat`: a conversation with an agent. Each message is a run of one session.

use maud::{Markup, html};
use serde::Deserialize;

use crate::catalog::LoadError;
use crate::config::KeyScope;
use crate::domain::agent::is_agent_name;
use crate::domain::chat_session;
use crate::domain::run::Run;
use crate::store::runs::SessionQuery;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts::{self, text_block};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::SessionName;
use crate::web::problem_code::ProblemCode;

/// Messages that are shown.
const MAX_RUNS: usize = 50;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ChatQuery {
    session: Option<SessionName>,
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let query: ChatQuery = request.query()?;
    let name = request.param("name").to_owned();
    let agents = request.state.runner.catalog().current();
    if !is_agent_name(&name) || !request.principal.can_use_agent(&name) {
        return Err(LoadError::NotFound(name).into());
    }
    agents.get(&name)?;
    if !request.may(KeyScope::Run) {
        let why = "this key may not start runs, so it cannot chat";
        return Err(Problem::new(ProblemCode::InsufficientScope, why));
    }
    let is_new = query.session.is_none();
    let session = match query.session {
        Some(SessionName(session)) => session,
        None => chat_session::new_name(),
    };
    let runs = match is_new {
        true => Vec::new(),
        false => earlier(request, &name, &session).await?,
    };
    let href = request.href(&format!("/agents/{name}/chat"));
    let path = request.shell.api(&format!("/agents/{name}/runs"));
    let body = html! {
        div.head {
            div { h1 { a href=(request.href(&format!("/agents/{name}"))) { (name) } } p.muted { "Session " code { (session) } } }
            div.actions { a.button href=(href) { "New conversation" } }
        }
        div.chat data-chat=(format!("{href}?{}", parts::query_string(&[("session", &session)]))) {
            ol #messages.messages aria-label="Conversation" {
                @for run in runs.iter().rev() { (exchange(request, run)) }
            }
            (parts::needs_scripts("Sending messages"))
            form.compose.needs-scripts data-chat-form data-post=(path) {
                input type="hidden" name="session" value=(session);
                label.sr for="message" { "Message" }
                textarea #message name="input" rows="3" placeholder="Message" required {}
                div.actions {
                    label.button for="chat-pictures" { "Add pictures" }
                    input.sr #chat-pictures type="file" accept="image/png,image/jpeg,image/webp,image/gif" multiple data-pictures="input";
                    span.previews data-previews {}
                    span.error role="alert" {}
                    button.primary type="submit" { "Send" }
                }
            }
        }
    };
    Ok(Page::new("Agents", format!("Chat with {name}"), body))
}

async fn earlier(
    request: &ConsoleRequest,
    agent: &str,
    session: &str,
) -> Result<Vec<Run>, Problem> {
    let store = request.state.runner.store();
    let query = SessionQuery {
        owner: request.principal.key_name().map(str::to_owned),
        name: session.to_owned(),
        agent: Some(agent.to_owned()),
        limit: MAX_RUNS,
        skip_damaged: true,
        ..SessionQuery::default()
    };
    let runs = store.session_runs(query).await?;
    Ok(request.principal.visible_runs(runs, store.as_ref()).await?)
}

fn exchange(request: &ConsoleRequest, run: &Run) -> Markup {
    let answer = run.content.as_deref().or(run.partial_content.as_deref());
    html! {
        li.user { (parts::message(request, run.id, &run.input)) }
        li.agent data-run=(run.id) data-after=(run.last_event) data-active[!run.status.is_terminal()] {
            @if let Some(answer) = answer { (text_block(answer)) }
            @else { pre.text { (format::prose(&request.state.runner.partial_reply(run.id).unwrap_or_default().text)) } }
            @if let Some(error) = &run.error { p.error { (error.message) } }
            p.small.muted {
                a href=(request.run_href(run.id)) {
                    @if let Some(cause) = parts::waiting_for(run) { "The run waits " (cause) ": open it" } @else { "Open the run" }
                }
            }
        }
    }
}
