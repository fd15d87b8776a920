//! `/ui/agents/{name}`: an agent's definition, what is wrong with its file, forms that start a run or an evaluation, its last runs.

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::catalog::{Entry, LoadError, agent_toml};
use crate::config::KeyScope;
use crate::domain::agent::is_agent_name;
use crate::domain::run::{Run, now};
use crate::engine::agent_check;
use crate::settings::section::Audience;
use crate::store::runs::RunFilter;
use crate::web::console::layout::Page;
use crate::web::console::pages::agents::state;
use crate::web::console::pages::{agent_versions, evaluate, input_form};
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::routes::agents::AgentBrief;
use crate::web::routes::runs::{self, require_run};

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AgentQuery {
    /// The run that fills the form.
    from: Option<String>,
}

/// The last runs that are shown.
const RUNS: usize = 20;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let AgentQuery { from } = request.query()?;
    let name = request.param("name").to_owned();
    let agents = agent_check::inspected_agents(request.state.runner.catalog()).await;
    let is_visible = is_agent_name(&name) && request.principal.can_use_agent(&name);
    let entry = agents.entries.get(&name).filter(|_| is_visible);
    let entry = entry.ok_or_else(|| LoadError::NotFound(name.clone()))?;
    let agent = &AgentBrief::new(entry);
    let schema = entry.agent.as_deref();
    let schema = schema.and_then(|agent| agent.input_schema.as_deref());
    let schema = schema.map(RawValue::get);
    let filter = RunFilter {
        agent: Some(name.clone()),
        limit: RUNS,
        cut_texts: true,
        ..RunFilter::default()
    };
    let last = runs::visible_page(&request.state, &request.principal, filter).await?;
    let versions = agent_versions::render(request, &name, agent.version).await?;
    let source = match &from {
        Some(id) => Some(require_run(&request.state, request.visible_run(id).await?).await?),
        None => None,
    };
    let may_start = agent.version.is_some() && request.may(KeyScope::Run);
    let evaluations = evaluate::render(request, entry, may_start).await?;
    let body = html! {
        div.head {
            div { h1 { (name) " " (state(agent)) } p.muted { (agent.description.unwrap_or_default()) } }
            div.actions {
                @if may_start && schema.is_none() { a.button.primary href="#start-title" { "Run" } a.button href=(request.href(&format!("/agents/{name}/chat"))) { "Chat" } }
                @if may_start { a.button href="#evaluate-title" { "Evaluate" } }
            }
        }
        @if let Some(error) = &agent.error { div.failure role="alert" { b { "The file is invalid" } pre.plain { (error) } } }
        @for warning in &agent.warnings { p.warning { (warning) } }
        @if may_start { (start_form(request, &name, agent, schema, source.as_ref())) }
        h2 { "Last runs" }
        div #list data-live="10000" {
            @if last.runs.is_empty() { p.muted { "No run yet." } }
            @else {
                (parts::run_table(request, &last.runs, now(), false))
                p { a href=(format!("{}?{}", request.href("/"), query_string(&[("agent", &name)]))) { "All runs of " (name) } }
            }
        }
        (versions)
        (evaluations)
        (definition(entry))
    };
    Ok(Page::new("Agents", name.clone(), body))
}

fn start_form(
    request: &ConsoleRequest,
    name: &str,
    agent: &AgentBrief<'_>,
    schema: Option<&str>,
    source: Option<&Run>,
) -> Markup {
    let path = request.shell.api(&format!("/agents/{name}/runs"));
    let model = agent.model.map(ToString::to_string).unwrap_or_default();
    let labels = source.into_iter().flat_map(|run| &run.labels);
    let labels: Vec<_> = labels
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let labels = labels.join(", ");
    html! {
        section.panel aria-labelledby="start-title" {
            h2 #start-title { "Start a run" }
            (parts::needs_scripts("Starting a run"))
            form #start.needs-scripts data-post=(path) data-then="run" {
                @if let Some(source) = source {
                    p.muted.small {
                        "Filled from " a href=(request.run_href(source.id)) { "a run" } "."
                        @if source.input.attachments().next().is_some() { " Add its pictures and files again." }
                    }
                }
                (input_form::fields(schema, source.map(|run| run.input.to_plain_text()).as_deref()))
                details open[source.is_some_and(|run| !run.labels.is_empty())] {
                    summary { "More" }
                    div.grid {
                        label { span { "Session" } input name="session"; }
                        label { span { "Labels" } input name="labels" data-type="labels" placeholder="team=search, env=test" value=(labels); }
                        label { span { "Model" } input name="model" placeholder=(model); }
                        label { span { "Time limit, seconds" } input name="timeout" data-type="number" inputmode="numeric"; }
                        label { span { "Context" } textarea name="context" rows="2" {} }
                    }
                }
                div.actions { button.primary type="submit" { "Start" } span.error role="alert" {} }
            }
        }
    }
}

/// The keys of the file, and all keys with their defaults. Neither has what may be secret.
fn definition(entry: &Entry) -> Markup {
    html! {
        h2 { "Definition" }
        p.muted.small { code { (entry.path.display().to_string()) } }
        @if let Some(agent) = entry.agent.as_deref() {
            @if entry.error.is_some() { p.muted { "The last valid file. Runs use it until the new one is valid." } }
            (parts::text_block(&agent_toml::to_client_toml(agent, &entry.positions)))
            details #all-keys data-keep {
                summary { "With all defaults" }
                (parts::text_block(&agent_toml::to_toml(agent, Audience::Client)))
            }
            p.muted.small { "Without comments, queries of addresses and what else may be secret." }
        }
    }
}
