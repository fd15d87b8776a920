//! `/ui/system`: the queue and the store, and for the scope `admin` limits, providers and MCP servers.

use maud::{Markup, html};

use crate::config::KeyScope::Admin;
use crate::domain::counted::counted;
use crate::domain::rate_limit::{RateStatus, UNITS};
use crate::engine::overview::{LoginOverview, McpServerOverview, Overview, ProviderOverview};
use crate::tools::mcp::ConnectionState;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::parts::{facts, text};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::NoParameters;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    request.query::<NoParameters>()?;
    let runner = &request.state.runner;
    let is_store_fine = runner.store().check().await.is_ok() && runner.store_error().is_none();
    let gauges = runner.gauges();
    let agents = runner.catalog().current();
    let invalid = agents
        .entries
        .values()
        .filter(|it| it.error.is_some())
        .count();
    let differing = runner.differing_nodes().map(|nodes| {
        text(match nodes.is_empty() {
            true => "none".to_owned(),
            false => nodes.join("; "),
        })
    });
    let state = |is_fine: bool, fine: &str, bad: &str| {
        html! { span class=(if is_fine { "status completed" } else { "status failed" }) { (if is_fine { fine } else { bad }) } }
    };
    let mut now = vec![
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
        (
            "Commits since the start",
            text(runner.store().commits().count()),
        ),
        (
            "Agents",
            text(match invalid {
                0 => format!("{}, all valid", agents.entries.len()),
                invalid => format!("{}, {invalid} invalid", agents.entries.len()),
            }),
        ),
        ("Version", text(env!("CARGO_PKG_VERSION"))),
    ];
    if let Some(node) = runner.node() {
        now.insert(0, ("This node", text(node)));
    }
    now.extend(differing.map(|nodes| ("Nodes that differ", nodes)));
    let overview = match request.may(Admin) && request.principal.can_see_all_runs() {
        true => Some(runner.overview().await),
        false => None,
    };
    let body = html! {
        div.head { h1 { "System" } }
        div #list data-live="3000" {
            h2 { "Now" }
            (facts(&now))
            @if let Some(overview) = &overview { (operator(overview)) }
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
        p.muted.small { "Requests and failures since the start of the daemon, without batches. A failed request may be sent again." }
        (providers(&overview.providers))
        @if !overview.rate_limits.is_empty() {
            h2 { "Rate limits" }
            p.muted.small { "What providers allow in a minute, as far as it is known, and what was used of it in the last one." }
            (rate_limits(&overview.rate_limits))
        }
        h2 { "MCP servers" }
        @if overview.mcp_servers.is_empty() { p.muted { "No agent uses one." } }
        @else { (mcp_servers(&overview.mcp_servers)) }
    }
}

fn providers(providers: &[ProviderOverview]) -> Markup {
    let (ready, others): (Vec<_>, Vec<_>) = providers
        .iter()
        .partition(|provider| provider.unavailable.is_none());
    let table = |providers: &[&ProviderOverview]| {
        html! {
            div.scroll role="region" aria-label="Providers" tabindex="0" {
                table.list {
                    thead {
                        tr {
                            th { "Provider" } th { "State" } th.number { "Requests" } th.number { "Failed" } th.number { "Mean time" }
                            th.number { "Free requests" }
                        }
                    }
                    tbody { @for provider in providers { (provider_row(provider)) } }
                }
            }
        }
    };
    html! {
        @if ready.is_empty() { p.muted { "None is configured: set the key of one, such as ANTHROPIC_API_KEY, and start the daemon again." } }
        @else { (table(&ready)) }
        @if !others.is_empty() {
            details #other-providers data-keep {
                summary { (counted(others.len(), "other provider")) ", not configured" }
                (table(&others))
            }
        }
    }
}

fn provider_row(provider: &ProviderOverview) -> Markup {
    let requests = &provider.requests;
    let sent = requests.completed + requests.failed;
    let mean = requests
        .mean_duration
        .map(|mean| u64::try_from(mean.as_millis()).unwrap_or(u64::MAX));
    html! {
        tr {
            td.main { (provider.name) }
            td {
                @match &provider.unavailable {
                    Some(why) => { span.status { "not available" } " " span.muted.small { (why) } }
                    None if requests.failed > 0 && requests.completed == 0 => span.status.failed { "fails" },
                    None => span.status.completed { "ready" },
                }
            }
            td.number { @if sent > 0 { (format::count(sent)) } @else { "–" } }
            td.number { @if sent > 0 { (format::count(requests.failed)) " (" (format::percent(requests.failed, sent)) ")" } @else { "–" } }
            td.number { (mean.map_or_else(|| "–".to_owned(), format::duration)) }
            td.number {
                @match (&provider.unavailable, provider.free_requests) {
                    (Some(_), _) => "–",
                    (None, Some(free)) => (free),
                    (None, None) => "no limit",
                }
            }
        }
    }
}

fn rate_limits(limits: &[RateStatus]) -> Markup {
    let amount = |limit: &RateStatus, unit: usize| {
        limit.limits[unit].map(|allowed| {
            let used = limit.used[unit];
            format!("{} of {}", format::count(used), format::count(allowed))
        })
    };
    html! {
        div.scroll role="region" aria-label="Rate limits" tabindex="0" {
            table.list {
                thead {
                    tr {
                        th { "Provider" } th { "Model" }
                        @for unit in UNITS { th.number { (unit.replace('_', " ")) } }
                        th.number { "Waiting" } th { "State" }
                    }
                }
                tbody {
                    @for limit in limits {
                        tr {
                            td.main { (limit.provider) }
                            td { (limit.model) }
                            @for unit in 0..UNITS.len() { td.number { (amount(limit, unit).unwrap_or_else(|| "–".to_owned())) } }
                            td.number { (format::thousands(limit.waiting as u64)) }
                            td {
                                @match limit.paused_ms {
                                    0 => span.status.completed { "open" },
                                    pause => span.status.running { "paused for " (format::duration(pause)) },
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn mcp_servers(servers: &[McpServerOverview]) -> Markup {
    html! {
        div.scroll role="region" aria-label="MCP servers" tabindex="0" {
            table.list {
                thead { tr { th { "Server" } th { "Agent" } th { "Connection" } th { "Login" } th.number { "Tools" } } }
                tbody {
                    @for server in servers {
                        tr {
                            td.main { (server.name) }
                            td { (server.agent) }
                            td {
                                @match &server.state {
                                    ConnectionState::Open => span.status.completed { "connected" },
                                    ConnectionState::Opening => span.status.running { "connecting" },
                                    ConnectionState::Closed => span.muted { "not connected; opened by the next run that uses it" },
                                    ConnectionState::Failed(why) => { span.status.failed { "failed" } " " span.muted.small { (why) } }
                                }
                            }
                            td { (login(server.login.as_ref())) }
                            td.number { @if let Some(tools) = server.tools { (tools) } @else { "–" } }
                        }
                    }
                }
            }
        }
    }
}

fn login(login: Option<&LoginOverview>) -> Markup {
    html! {
        @match login {
            None => "–",
            Some(LoginOverview::Missing(command)) => { span.status.failed { "none" } " " code { (command) } }
            Some(LoginOverview::Renewed) => "renewed by axed",
            Some(LoginOverview::Until(None)) => "without an end",
            Some(LoginOverview::Until(Some(end))) => { "until " (format::instant(*end)) }
            Some(LoginOverview::Unreadable(why)) => { span.status.failed { "not readable" } " " span.muted.small { (why) } }
        }
    }
}
