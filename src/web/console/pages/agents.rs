//! `/ui/agents`: the agents, with the errors of their files.

use maud::{Markup, html};

use crate::catalog::Entry;
use crate::config::KeyScope::Run;
use crate::engine::agent_check;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::NoParameters;
use crate::web::routes::agents::AgentBrief;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    request.query::<NoParameters>()?;
    let agents = agent_check::inspected_agents(request.state.runner.catalog()).await;
    let entries = agents.entries.values();
    let entries: Vec<_> = entries
        .filter(|entry| request.principal.can_use_agent(&entry.name))
        .collect();
    let body = html! {
        div.head { h1 { "Agents" } }
        div #list data-live="10000" {
            @if entries.is_empty() {
                (parts::empty("No agents", "Put a TOML file into one of the agents' directories."))
            }
            ul.cards {
                @for entry in entries { (card(request, entry)) }
            }
        }
    };
    Ok(Page::new("Agents", "Agents", body))
}

fn card(request: &ConsoleRequest, entry: &Entry) -> Markup {
    let agent = &AgentBrief::new(entry);
    let definition = entry.agent.as_deref();
    let takes_text = definition.is_some_and(|agent| agent.input_schema.is_none());
    let href = request.href(&format!("/agents/{}", agent.name));
    html! {
        li.card data-row {
            h2 { a href=(href) { (agent.name) } (state(agent)) }
            p { (agent.description.unwrap_or_default()) }
            @if let Some(error) = &agent.error { p.error { (format::excerpt(error, 200)) } }
            p.muted.small {
                @if let Some(model) = agent.model { (model) }
                @if !agent.tools.is_empty() { " · " (format::plural(agent.tools.len(), "tool")) }
                @if !agent.sub_agents.is_empty() { " · calls " (agent.sub_agents.join(", ")) }
            }
            @if takes_text && request.may(Run) {
                p { a.button href=(format!("{href}/chat")) { "Chat" } }
            }
        }
    }
}

/// Whether the file is valid.
pub fn state(agent: &AgentBrief<'_>) -> Markup {
    html! {
        @if !agent.valid { span.status.failed { "invalid" } }
        @else if !agent.warnings.is_empty() { span.status.waiting { (format::plural(agent.warnings.len(), "warning")) } }
    }
}
