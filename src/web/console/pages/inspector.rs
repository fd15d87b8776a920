//! The right side of a run's page: the run, one turn, one tool call, or the raw events.

use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope;
use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::Run;
use crate::record::entry::{self, Entry};
use crate::store::events::EventQuery;
use crate::web::console::format;
use crate::web::console::pages::run_actions;
use crate::web::console::parts::{self, facts, json_block, query_string, text, text_block};
use crate::web::console::request::ConsoleRequest;
use crate::web::console::timeline::StepName;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::response::turns::{TurnDetailView, TurnView};

/// Events that are shown at once.
const EVENTS: usize = 100;

/// What is shown of the run.
pub enum Selection {
    Run,
    Step(StepName),
    /// The events after this number.
    Events(u64),
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunPageQuery {
    turn: Option<u32>,
    call: Option<String>,
    view: Option<View>,
    after: u32,
    /// Whether all of the tree is shown.
    pub open: Option<Opened>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum View {
    Events,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Opened {
    All,
}

impl Selection {
    pub fn new(query: &RunPageQuery) -> Self {
        match (query.turn, &query.call, &query.view) {
            (Some(turn), _, _) => Self::Step(StepName::Turn(turn)),
            (None, Some(call), _) => Self::Step(StepName::Call(call.clone())),
            (None, None, Some(View::Events)) => Self::Events(query.after.into()),
            (None, None, None) => Self::Run,
        }
    }

    pub fn step(&self) -> Option<&StepName> {
        match self {
            Self::Step(step) => Some(step),
            Self::Run | Self::Events(_) => None,
        }
    }
}

pub async fn render(
    request: &ConsoleRequest,
    run: &Run,
    selection: &Selection,
) -> Result<Markup, Problem> {
    let content = match selection {
        Selection::Run => overview(request, run),
        Selection::Step(StepName::Turn(turn)) => turn_view(request, run, *turn).await?,
        Selection::Step(StepName::Call(call)) => call_view(request, run, call).await?,
        Selection::Events(after) => events(request, run, *after).await?,
    };
    let tab = |name: &str, query: &str, is_current: bool| {
        let href = format!("{}{query}", request.run_href(run.id));
        html! { a href=(href) aria-current=[is_current.then_some("true")] { (name) } }
    };
    Ok(html! {
        nav.tabs aria-label="Views of the run" {
            (tab("Run", "", matches!(selection, Selection::Run)))
            (tab("Events", "?view=events", matches!(selection, Selection::Events(_))))
            @match selection.step() {
                Some(StepName::Turn(turn)) => span aria-current="true" { "Turn " (turn) },
                Some(StepName::Call(_)) => span aria-current="true" { "Tool call" },
                None => {}
            }
        }
        (content)
    })
}

fn overview(request: &ConsoleRequest, run: &Run) -> Markup {
    let tokens = &run.tree.usage.tokens;
    let mut list = vec![
        ("Id", html! { code { (run.id) } }),
        ("Model", text(&run.model)),
        ("Turns", text(run.turns)),
        (
            "Tokens",
            text(format!("{} in, {} out", tokens.input, tokens.output)),
        ),
        (
            "From the cache",
            text(format!(
                "{} read, {} written",
                tokens.cache_read, tokens.cache_write
            )),
        ),
        ("Cost", text(format::cost(run.tree.usage.cost))),
        ("Accepted", text(format::instant(run.created_at))),
    ];
    if let Some(session) = &run.session {
        let href = request.href(&format!("/sessions/{session}"));
        list.push(("Session", html! { a href=(href) { (session) } }));
    }
    if let Some(parent) = run.parent_id {
        list.push((
            "Called by",
            html! { a href=(request.run_href(parent)) { code { (parent) } } },
        ));
    }
    if let Some(from) = run.fork.as_ref().and_then(|fork| fork.from) {
        let href = request.run_href(from.run);
        list.push((
            "Forked from",
            html! { a href=(href) { code { (from.run) } } " at turn " (from.turn) },
        ));
    }
    if let Some(reason) = &run.cancel_reason {
        list.push(("Cancelled", text(reason)));
    }
    let output = run.content.as_deref().or(run.partial_content.as_deref());
    html! {
        @for pending in &run.pending_approvals { (run_actions::approval(request, pending)) }
        @if let Some(error) = &run.error {
            div.failure role="alert" { b { (error.code) } p { (error.message) } }
        }
        @for warning in &run.warnings { p.warning { (warning.message) } }
        @if let Some(output) = output {
            h3 { @if run.content.is_some() { "Answer" } @else { "Last text" } }
            @if run.structured { (json_block(output)) } @else { (text_block(output)) }
        }
        @if !run.status.is_terminal() {
            h3 { "Live" }
            (live_text(request, run, None))
        }
        h3 { @if run.task.is_some() { "Task" } @else { "Input" } }
        (parts::message(request, run.id, &run.input))
        h3 { "Run" }
        (facts(&list))
        @if !run.labels.is_empty() {
            p { @for (name, value) in &run.labels { span.label { (name) "=" (value) } " " } }
        }
    }
}

/// What the model has written so far of its reply, or of this turn. The script adds to it, and speaks whole sentences
/// elsewhere: see `layout::frame`.
fn live_text(request: &ConsoleRequest, run: &Run, turn: Option<u32>) -> Markup {
    let reply = request.state.runner.partial_reply(run.id);
    let reply = reply.filter(|reply| turn.is_none_or(|turn| turn == reply.turn));
    let reply = reply.unwrap_or_default();
    html! {
        pre.text.live #live-text data-live-text=(reply.turn) role="region" aria-label="Live text" aria-live="off" tabindex="0" { (format::prose(&reply.text)) }
    }
}

async fn turn_view(request: &ConsoleRequest, run: &Run, turn: u32) -> Result<Markup, Problem> {
    let recorded = request.state.runner.store().turn(run.id, turn).await?;
    let Some(recorded) = recorded else {
        let is_next = !run.status.is_terminal() && turn == run.turns + 1;
        return match is_next {
            true => Ok(html! {
                h3 { "Live" }
                (live_text(request, run, Some(turn)))
                p.muted { "The model has not replied yet. The record of the turn follows with its reply." }
            }),
            false => Err(step_not_found(run, &format!("turn {turn}"))),
        };
    };
    let detail = TurnDetailView::new(recorded, &request.state.settings.redactor);
    let fork = request.shell.api(&format!("/runs/{}/fork", run.id));
    Ok(html! {
        @if request.may(KeyScope::Run) && request.principal.can_use_agent(&run.agent) { div.actions { (run_actions::fork(&fork, Some(turn))) } }
        (turn_facts(&detail.turn))
        (reply(request, run, &detail))
        @if detail.turn.attempts.len() > 1 || detail.reply.is_none() { (attempts(&detail.turn)) }
        h3 { "Request as sent" }
        @match &detail.request {
            None => p.muted { "The server does not record requests, or the turn sent none." },
            Some(sent) => {
                @if let Some(url) = &sent.url {
                    p { code.wrap { (sent.method.as_deref().unwrap_or_default()) " " (url) } }
                }
                @if detail.turn.redacted { p.muted.small { "Some of it is redacted, as the configuration says." } }
                @if !sent.headers.is_empty() {
                    details #headers data-keep {
                        summary { (sent.headers.len()) " headers" }
                        dl.facts { @for (name, value) in &sent.headers { div { dt { (name) } dd { code.wrap { (value) } } } } }
                    }
                }
                (json_block(sent.body.get()))
            }
        }
    })
}

fn turn_facts(turn: &TurnView) -> Markup {
    let mut list = vec![
        ("Model", text(format!("{}/{}", turn.provider, turn.model))),
        ("Took", text(format::duration(turn.duration_ms))),
    ];
    if let Some(first) = turn.first_token_ms {
        list.push(("First text after", text(format::duration(first))));
    }
    if let Some(usage) = &turn.usage {
        list.push(("Input", text(format!("{} tokens", usage.input_tokens))));
        let cache = format!(
            "{} read, {} written",
            usage.cache_read_tokens, usage.cache_write_tokens
        );
        list.push(("Of it from the cache", text(cache)));
        let reasoning = match usage.reasoning_tokens {
            0 => String::new(),
            tokens => format!(", {tokens} of them reasoning"),
        };
        list.push((
            "Output",
            text(format!("{} tokens{reasoning}", usage.output_tokens)),
        ));
    }
    list.push(("Cost", text(format::usd(turn.cost_usd))));
    if let Some(reason) = &turn.stop_reason {
        list.push(("Stopped", text(reason)));
    }
    if turn.copied {
        list.push(("Copied", text("from the forked run")));
    }
    facts(&list)
}

fn reply(request: &ConsoleRequest, run: &Run, detail: &TurnDetailView) -> Markup {
    html! {
        h3 { "Reply" }
        @match &detail.reply {
            None => p.muted { "There is none." },
            Some(reply) => {
                @if let Some(reasoning) = &reply.reasoning {
                    details #reasoning data-keep { summary { "Reasoning" } (text_block(reasoning)) }
                }
                @if !reply.content.is_empty() { (text_block(&reply.content)) }
                @for call in &reply.tool_calls {
                    @let query = query_string(&[("call", &call.id)]);
                    p.call { a href=(format!("{}?{query}", request.run_href(run.id))) { (call.name) } }
                    (json_block(call.arguments.get()))
                }
            }
        }
    }
}

fn attempts(turn: &TurnView) -> Markup {
    html! {
        h3 { "Attempts" }
        div.scroll role="region" aria-label="Attempts" tabindex="0" {
            table.list {
                thead { tr { th { "Model" } th.number { "Status" } th.number { "Took" } th { "Error" } } }
                tbody {
                    @for attempt in &turn.attempts {
                        tr {
                            td { (attempt.provider) "/" (attempt.model) }
                            td.number { @if let Some(status) = attempt.status { (status) } @else { "–" } }
                            td.number { (format::duration(attempt.duration_ms)) }
                            td { (attempt.error.as_deref().unwrap_or_default()) }
                        }
                    }
                }
            }
        }
    }
}

async fn call_view(request: &ConsoleRequest, run: &Run, id: &str) -> Result<Markup, Problem> {
    let store = request.state.runner.store();
    let steps = entry::steps(store.entries(run.id).await?);
    let Some(call) = find_call(&steps, id) else {
        return Err(step_not_found(run, "such tool call"));
    };
    let children = store.child_calls(run.id).await?;
    let child = children
        .iter()
        .find(|(_, call)| call.as_deref() == Some(id));
    let pending = run
        .pending_approvals
        .iter()
        .find(|it| it.request.tool_call_id == id);
    let redactor = &request.state.settings.redactor;
    let json = |json: &str| {
        redactor
            .redact_json(json)
            .unwrap_or_else(|| json.to_owned())
    };
    Ok(html! {
        @if let Some(pending) = pending { (run_actions::approval(request, pending)) }
        @else {
            h3 { (call.call.name) }
            p.muted.small { "Turn " (call.turn) " · " code { (id) } }
            h4 { "Arguments" }
            (json_block(&json(call.call.arguments_json().get())))
        }
        @if let Some(changed) = call.changed {
            h4 { "Arguments that a person approved instead" }
            (json_block(&json(changed)))
        }
        @if let Some((child, _)) = child { p { a.button href=(request.run_href(*child)) { "Open the child run" } } }
        @match call.result {
            None => p.muted { "There is no result yet." },
            Some(result) => {
                h4 { @if result.is_error { span.error { "Error" } } @else { "Result" } }
                (text_block(&redactor.redact(&result.content)))
                @for attachment in &result.attachments { (parts::attached(request, run.id, attachment)) }
            }
        }
    })
}

/// A tool call in a run's record.
struct RecordedCall<'a> {
    turn: u32,
    call: &'a ToolCall,
    /// The arguments that a person approved in place of the model's.
    changed: Option<&'a str>,
    result: Option<&'a ToolResult>,
}

fn find_call<'a>(steps: &'a [Entry], id: &str) -> Option<RecordedCall<'a>> {
    let (turn, call) = steps.iter().find_map(|step| match step {
        Entry::Replied { turn, message, .. } => {
            let call = message.tool_calls.iter().find(|call| call.id == id)?;
            Some((*turn, call))
        }
        _ => None,
    })?;
    let changed = steps.iter().find_map(|step| match step {
        Entry::CallDecided {
            call_id,
            arguments: Some(arguments),
            ..
        } if call_id == id => Some(arguments.get()),
        _ => None,
    });
    let result = steps.iter().find_map(|step| match step {
        Entry::CallCompleted { result, .. } if result.call_id == id => Some(result),
        _ => None,
    });
    Some(RecordedCall {
        turn,
        call,
        changed,
        result,
    })
}

async fn events(request: &ConsoleRequest, run: &Run, after: u64) -> Result<Markup, Problem> {
    let query = EventQuery {
        root: run.root_id,
        run: run.id,
        exclude_descendants: false,
        after,
        limit: EVENTS,
    };
    let mut events = request.state.runner.store().events(query).await?;
    let has_more = events.len() > EVENTS || events.len() == EVENTS;
    events.truncate(EVENTS);
    let next = events.last().filter(|_| has_more).map(|last| {
        let query = query_string(&[("view", "events"), ("after", &last.seq.to_string())]);
        format!("{}?{query}", request.run_href(run.id))
    });
    Ok(html! {
        ol.events {
            @for event in &events {
                li {
                    details id=(format!("event-{}", event.seq)) data-keep {
                        summary { span.muted.number { (event.seq) } " " (event.name) }
                        (json_block(&event.data))
                    }
                }
            }
        }
        @if events.is_empty() { p.muted { "There are no events after this one." } }
        @if let Some(next) = next { nav.pages aria-label="Pages" { a.button href=(next) rel="next" { "Later events" } } }
    })
}

fn step_not_found(run: &Run, step: &str) -> Problem {
    Problem::new(
        ProblemCode::TurnNotFound,
        format!("{} has no {}", run.id, quote(step)),
    )
}
