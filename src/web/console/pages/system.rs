//! `/ui/system`: the queue and the store, and for the scope `admin` limits, providers and MCP servers.

use axum::response::Response;
use maud::{Markup, html};

use crate::config::KeyScope::Admin;
use crate::engine::overview::Overview;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts::{facts, text};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;

pub async fn page(request: ConsoleRequest) -> Response {
    let page = render(&request).await;
    request.respond(page)
}

async fn render(request: &ConsoleRequest) -> Result<Page, Problem> {
    request.query(&[])?;
    let runner = &request.state.runner;
    let is_store_fine = runner.store().check().await.is_ok() && !runner.is_store_down();
    let gauges = runner.gauges();
    let agents = runner.catalog().current();
    let invalid = agents
        .entries
        .values()
        .filter(|it| it.error.is_some())
        .count();
    let state = |is_fine: bool, fine: &str, bad: &str| {
        html! { span class=(if is_fine { "status completed" } else { "status failed" }) { (if is_fine { fine } else { bad }) } }
    };
    let now = facts(&[
        (
            "Store",
            state(is_store_fine, "works", "does not accept writes"),
        ),
        (
            "New runs",
            state(
                !runner.is_draining(),
                "accepted",
                "refused: the daemon stops",
            ),
        ),
        ("Running", text(gauges.running)),
        ("Queued", text(gauges.queued)),
        ("Commits since the start", text(gauges.commits)),
        (
            "Agents",
            text(format!(
                "{}, {invalid} of them invalid",
                agents.entries.len()
            )),
        ),
        ("Version", text(env!("CARGO_PKG_VERSION"))),
    ]);
    let body = html! {
        div.head { h1 { "System" } }
        div #list data-live="3000" {
            h2 { "Now" }
            (now)
            @if request.may(Admin) && request.principal.can_see_all_runs() { (operator(&runner.overview())) }
        }
    };
    Ok(Page::new("System", "System", body))
}

fn operator(overview: &Overview) -> Markup {
    let limit = |number: usize| {
        text(match number {
            usize::MAX => "none".to_owned(),
            number => number.to_string(),
        })
    };
    html! {
        h2 { "Limits" }
        (facts(&[
            ("Running root runs", limit(overview.max_running)),
            ("Queued root runs", limit(overview.max_queued)),
            ("Runs of a tree", limit(overview.max_tree)),
            ("Longest time limit", text(format::duration(u64::try_from(overview.max_timeout.as_millis()).unwrap_or(u64::MAX)))),
        ]))
        h2 { "Providers" }
        table.list {
            thead { tr { th { "Provider" } th { "State" } th.number { "Free requests" } } }
            tbody {
                @let (ready, others): (Vec<_>, Vec<_>) = overview.providers.iter().partition(|it| it.unavailable.is_none());
                @for provider in ready.into_iter().chain(others) {
                    tr {
                        td.main { (provider.name) }
                        td {
                            @match &provider.unavailable {
                                None => span.status.completed { "ready" },
                                Some(why) => { span.status { "not available" } " " span.muted.small { (why) } }
                            }
                        }
                        td.number { @match (&provider.unavailable, provider.free_requests) {
                                (Some(_), _) => "–",
                                (None, Some(free)) => (free),
                                (None, None) => "no limit",
                            } }
                    }
                }
            }
        }
        h2 { "MCP servers" }
        @if overview.mcp_servers.is_empty() { p.muted { "No agent uses one." } }
        @else {
            table.list {
                thead { tr { th { "Server" } th { "Agent" } th { "Connection" } } }
                tbody {
                    @for server in &overview.mcp_servers {
                        tr {
                            td.main { (server.name) }
                            td { (server.agent) }
                            td {
                                @if server.is_connected { span.status.completed { "connected" } }
                                @else { span.muted { "not connected; opened by the next run that uses it" } }
                            }
                        }
                    }
                }
            }
        }
    }
}
