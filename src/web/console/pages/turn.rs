//! One turn: its messages as a conversation, or the request as it was sent.

use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope;
use crate::domain::counted::counted;
use crate::domain::message::{Message, ToolCall, ToolResult};
use crate::domain::run::Run;
use crate::engine::history::RecordedConversation;
use crate::record::entry::{self, Entry};
use crate::web::console::format;
use crate::web::console::messages;
use crate::web::console::pages::run_actions;
use crate::web::console::parts::{
    self, MAX_TEXT_BYTES, facts, json_block, query_string, text, text_block,
};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::{Problem, quote};
use crate::web::problem_code::ProblemCode;
use crate::web::response::turns::{TurnDetailView, TurnView};

/// Messages of earlier turns that are shown, the last ones; the API has all.
const MAX_EARLIER: usize = 60;
/// Bytes of the text of each of them.
const MAX_EARLIER_BYTES: usize = 8 << 10;

/// What is shown of a turn.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Show {
    #[default]
    Messages,
    Raw,
}

pub async fn render(
    request: &ConsoleRequest,
    run: &Run,
    number: u32,
    show: Show,
) -> Result<Markup, Problem> {
    let recorded = request.state.runner.store().turn(run.id, number).await?;
    let Some(recorded) = recorded else {
        let is_next = !run.status.is_terminal() && number == run.turns + 1;
        return match is_next {
            true => Ok(html! {
                h3 { "Live" }
                (live_text(request, run, Some(number)))
                p.muted { "The model has not replied yet. The record of the turn follows with its reply." }
            }),
            false => Err(step_not_found(run, &format!("turn {number}"))),
        };
    };
    let detail = TurnDetailView::new(recorded, &request.state.settings.redactor);
    let fork = request.shell.api(&format!("/runs/{}/fork", run.id));
    let content = match show {
        Show::Messages => conversation(request, run, &detail).await?,
        Show::Raw => raw(&detail),
    };
    let href = |show: &str| {
        let turn = number.to_string();
        let query = query_string(&[("turn", &turn), ("show", show)]);
        format!("{}?{query}", request.run_href(run.id))
    };
    let current = |wanted: Show| (show == wanted).then_some("true");
    Ok(html! {
        (turn_facts(&detail.turn))
        div.actions.between {
            nav.choice aria-label="What is shown of the turn" {
                a href=(href("")) aria-current=[current(Show::Messages)] { "Messages" }
                a href=(href("raw")) aria-current=[current(Show::Raw)] { "Raw" }
            }
            @if request.may(KeyScope::Run) && request.principal.can_use_agent(&run.agent) { (run_actions::fork(&fork, Some(number))) }
        }
        @if detail.turn.attempts.len() > 1 || detail.reply.is_none() { (attempts(&detail.turn)) }
        (content)
    })
}

/// The conversation as recorded: what the request has, and the reply.
async fn conversation(
    request: &ConsoleRequest,
    run: &Run,
    detail: &TurnDetailView,
) -> Result<Markup, Problem> {
    let number = detail.turn.turn;
    let steps = entry::steps(request.state.runner.store().entries(run.id).await?);
    let replied = |turn: u32| {
        steps
            .iter()
            .position(|step| matches!(step, Entry::Replied { turn: of, .. } if *of == turn))
    };
    let end = replied(number).unwrap_or(steps.len());
    let before = number.checked_sub(1).and_then(replied).unwrap_or(0);
    let new_from = match before {
        0 => 0,
        before => RecordedConversation::from_steps(steps[..=before].to_vec())
            .messages
            .len(),
    };
    let recorded = RecordedConversation::from_steps(steps[..end].to_vec());
    let redactor = &request.state.settings.redactor;
    let (system, all) = (recorded.system, recorded.messages);
    let new_from = new_from.min(all.len());
    let first = new_from.saturating_sub(MAX_EARLIER);
    let mut shown = Vec::new();
    for (index, message) in all[first..].iter().enumerate() {
        let max = match first + index < new_from {
            true => MAX_EARLIER_BYTES,
            false => MAX_TEXT_BYTES,
        };
        shown.push(message_view(request, run, message, max).await);
    }
    let new = shown.split_off(new_from - first);
    let reply = match &detail.reply {
        None => None,
        Some(reply) => Some(messages::text("assistant", &reply.content).await),
    };
    Ok(html! {
        @if let Some(system) = &system {
            details #system data-keep { summary { "System prompt" } (text_block(&redactor.redact(system))) }
        }
        @if !shown.is_empty() {
            details #earlier data-keep {
                summary { (counted(shown.len(), "earlier message")) }
                @if first > 0 { p.muted.small { (counted(first, "older message")) " not shown; the API has all." } }
                ol.thread { @for message in &shown { (message) } }
            }
        }
        @if number > 1 && !new.is_empty() { p.since { "New since turn " (number - 1) } }
        @if recorded.compaction.as_ref().is_some_and(|it| it.before > 0) {
            p.muted.small { "The request has a summary in place of its oldest messages: see Raw." }
        }
        ol.thread {
            @for message in &new { (message) }
            @match (&detail.reply, &reply) {
                (Some(reply), Some(rendered)) => {
                    li.assistant {
                        (messages::head("assistant", "Reply"))
                        @if let Some(reasoning) = &reply.reasoning {
                            details #reasoning data-keep { summary { "Reasoning" } (text_block(reasoning)) }
                        }
                        (rendered)
                        @for call in &reply.tool_calls { (call_view(request, run, &call.id, &call.name, call.arguments.get())) }
                    }
                }
                _ => li.muted { "There is no reply." },
            }
        }
    })
}

async fn message_view(
    request: &ConsoleRequest,
    run: &Run,
    message: &Message,
    max: usize,
) -> Markup {
    let redactor = &request.state.settings.redactor;
    match message {
        Message::User { content } => {
            let plain = content.to_plain_text();
            let text = redactor.redact(&plain);
            let text = messages::cut_text("user", &text, max).await;
            html! {
                li.user {
                    (messages::head("user", "User"))
                    (text)
                    @for attachment in content.attachments() { (parts::attached(request, run.id, attachment)) }
                }
            }
        }
        Message::Assistant(reply) => {
            let text = redactor.redact(&reply.content);
            let text = messages::cut_text("assistant", &text, max).await;
            html! {
                li.assistant {
                    (messages::head("assistant", "Assistant"))
                    (text)
                    @for call in &reply.tool_calls { (recorded_call(request, run, call)) }
                }
            }
        }
        Message::Tool { tool_results } => {
            let mut results = Vec::new();
            for result in tool_results {
                results.push(result_view(request, run, result, max).await);
            }
            html! { @for result in &results { (result) } }
        }
    }
}

async fn result_view(
    request: &ConsoleRequest,
    run: &Run,
    result: &ToolResult,
    max: usize,
) -> Markup {
    let redactor = &request.state.settings.redactor;
    let text = messages::cut_text("tool", &redactor.redact(&result.content), max).await;
    html! {
        li.tool {
            (messages::head("tool", if result.is_error { "Tool error" } else { "Tool result" }))
            (text)
            @for attachment in &result.attachments { (parts::attached(request, run.id, attachment)) }
        }
    }
}

fn recorded_call(request: &ConsoleRequest, run: &Run, call: &ToolCall) -> Markup {
    let json = call.arguments_json();
    let redactor = &request.state.settings.redactor;
    let redacted = redactor.redact_json(json.get());
    call_view(
        request,
        run,
        &call.id,
        &call.name,
        redacted.as_deref().unwrap_or(json.get()),
    )
}

fn call_view(request: &ConsoleRequest, run: &Run, id: &str, name: &str, json: &str) -> Markup {
    let query = query_string(&[("call", id)]);
    html! {
        p.call { "Calls " a href=(format!("{}?{query}", request.run_href(run.id))) { (name) } }
        (json_block(json))
    }
}

fn raw(detail: &TurnDetailView) -> Markup {
    html! {
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
                        summary { (counted(sent.headers.len(), "header")) }
                        dl.facts { @for (name, value) in &sent.headers { div { dt { (name) } dd { code.wrap { (value) } } } } }
                    }
                }
                (json_block(sent.body.get()))
            }
        }
        h3 { "Reply" }
        @match &detail.reply {
            None => p.muted { "There is none." },
            Some(reply) => {
                @if let Some(reasoning) = &reply.reasoning { h4 { "Reasoning" } (text_block(reasoning)) }
                @if !reply.content.is_empty() { (text_block(&reply.content)) }
                @for call in &reply.tool_calls { h4 { (call.name) } (json_block(call.arguments.get())) }
            }
        }
    }
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
        list.push(("Cached input", text(cache)));
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

/// What the model has written so far of its reply, or of this turn. The script adds to it, and speaks whole sentences
/// elsewhere: see `layout::frame`.
pub fn live_text(request: &ConsoleRequest, run: &Run, turn: Option<u32>) -> Markup {
    let reply = request.state.runner.partial_reply(run.id);
    let reply = reply.filter(|reply| turn.is_none_or(|turn| turn == reply.turn));
    let reply = reply.unwrap_or_default();
    html! {
        pre.text.live #live-text data-live-text=(reply.turn) role="region" aria-label="Live text" aria-live="off" tabindex="0" { (format::prose(&reply.text)) }
    }
}

pub fn step_not_found(run: &Run, step: &str) -> Problem {
    Problem::new(
        ProblemCode::TurnNotFound,
        format!("{} has no {}", run.id, quote(step)),
    )
}
