//! `/ui/agents`: the agents, with the errors of their files.

use maud::{Markup, html};

use crate::catalog::Entry;
use crate::config::KeyScope::Run;
use crate::domain::counted::counted;
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
    let is_empty = entries.is_empty();
    let is_scripted = |entry: &&Entry| entry.name.ends_with("-scripted");
    let (scripted, others): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_scripted);
    let body = html! {
        div.head { h1 { "Agents" } }
        div #list data-live="10000" {
            @if is_empty {
                (parts::empty_with("No agents", "An agent is one TOML file in a directory of agents. This command writes one:", "axed agents init helper"))
            }
            @if !others.is_empty() { ul.cards { @for entry in &others { (card(request, entry)) } } }
            @if !scripted.is_empty() {
                details #scripted data-keep open[others.is_empty()] {
                    summary { (counted(scripted.len(), "scripted agent")) ", which answer from files, without a key" }
                    ul.cards { @for entry in &scripted { (card(request, entry)) } }
                }
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
                @if !agent.tools.is_empty() { " · " (counted(agent.tools.len(), "tool")) }
                @if !agent.sub_agents.is_empty() { " · calls " (agent.sub_agents.join(", ")) }
            }
            @if agent.version.is_some() && request.may(Run) {
                p.actions {
                    a.button href=(format!("{href}#start-title")) { "Run" }
                    @if takes_text { a.button href=(format!("{href}/chat")) { "Chat" } }
                }
            }
        }
    }
}

/// Whether the file is valid.
pub fn state(agent: &AgentBrief<'_>) -> Markup {
    html! {
        @if !agent.valid { span.status.failed { "invalid" } }
        @else if !agent.warnings.is_empty() { span.status.waiting { (counted(agent.warnings.len(), "warning")) } }
    }
}
