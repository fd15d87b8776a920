//! The events of a run and those below it: when, who, what.

use maud::{Markup, html};

use serde_json::value::RawValue;

use crate::domain::counted::counted;
use crate::domain::event::{Event, EventKind, EventName, STORED_EVENT_NAMES};
use crate::domain::message::shorten;
use crate::domain::run::Run;
use crate::store::events::{self, EventQuery};
use crate::web::console::format;
use crate::web::console::parts::{json_block, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;

/// Events that are shown at once.
const EVENTS: usize = 100;
/// Events that are read for a page with a filter.
const MAX_READ: usize = 5_000;
/// Characters of a summary.
const SUMMARY_CHARS: usize = 110;

pub async fn render(
    request: &ConsoleRequest,
    run: &Run,
    after: u64,
    name: Option<&str>,
) -> Result<Markup, Problem> {
    let name = name.and_then(EventName::parse);
    let (shown, next) = read(request, run, after, name).await?;
    let start = run.created_at.as_millisecond();
    let next = next.map(|after| {
        let name = name.map_or("", EventName::as_str);
        let after = after.to_string();
        let query = query_string(&[("view", "events"), ("event", name), ("after", &after)]);
        format!("{}?{query}", request.run_href(run.id))
    });
    Ok(html! {
        form.filters method="get" action=(request.run_href(run.id)) data-navigate {
            input type="hidden" name="view" value="events";
            label { span { "Event" }
                select name="event" {
                    option value="" { "Any" }
                    @for known in STORED_EVENT_NAMES {
                        option value=(known) selected[name.is_some_and(|name| name.as_str() == *known)] { (known) }
                    }
                }
            }
            div.actions { button type="submit" { "Filter" } }
        }
        ol.events {
            @for (seq, event, data) in &shown {
                @let after = event.time.as_millisecond() - start;
                li {
                    details id=(format!("event-{seq}")) data-keep {
                        summary {
                            span.muted.number title=(format::instant(event.time)) { "+" (format::duration(after.max(0).unsigned_abs())) }
                            span.who { (event.agent) }
                            span.what { (event.kind.name()) }
                            span.muted.summary { (format::excerpt(&summary(&event.kind), SUMMARY_CHARS)) }
                        }
                        (json_block(data))
                    }
                }
            }
        }
        @if shown.is_empty() && next.is_none() { p.muted { "There are no more such events." } }
        @if let Some(next) = next { nav.pages aria-label="Pages" { a.button href=(next) rel="next" { "Later events" } } }
    })
}

type Shown = Vec<(u64, Event, String)>;

/// The events of a page, and the number after which the next one begins, if there may be one.
async fn read(
    request: &ConsoleRequest,
    run: &Run,
    mut after: u64,
    name: Option<EventName>,
) -> Result<(Shown, Option<u64>), Problem> {
    let mut shown = Vec::new();
    let mut read_count = 0;
    loop {
        let query = EventQuery {
            root: run.root_id,
            run: run.id,
            exclude_descendants: false,
            after,
            limit: EVENTS,
        };
        let page = request.state.runner.store().events(query).await?;
        let is_last = page.len() < EVENTS;
        read_count += page.len();
        for event in page {
            if shown.len() == EVENTS {
                return Ok((shown, Some(after)));
            }
            after = event.seq;
            if name.is_none_or(|name| name == event.name) {
                shown.push((event.seq, events::recorded(&event)?, event.data));
            }
        }
        if is_last {
            return Ok((shown, None));
        }
        if shown.len() == EVENTS || read_count >= MAX_READ {
            return Ok((shown, Some(after)));
        }
    }
}

/// What happened, on one line.
fn summary(kind: &EventKind) -> String {
    match kind {
        EventKind::RunStarted { model, .. } => model.clone(),
        EventKind::RunForked { forked_from, .. } => format!("of {}", forked_from.run),
        EventKind::RunResumed { attempt, .. } => format!("attempt {attempt}"),
        EventKind::RunPaused { by, .. } => by.clone().unwrap_or_default(),
        EventKind::RunCancelling { reason } | EventKind::RunCancelled { reason } => reason.clone(),
        EventKind::RunCompleted { content, .. } => content.clone(),
        EventKind::RunFailed { error } => error.message.clone(),
        EventKind::TurnStarted { turn, .. } => format!("turn {turn}"),
        EventKind::TurnCompleted {
            turn,
            input_tokens,
            output_tokens,
            tool_calls,
            ..
        } => {
            let calls = match tool_calls.len() {
                0 => String::new(),
                count => format!(", {}", counted(count, "tool call")),
            };
            format!("turn {turn}: {input_tokens} tokens in, {output_tokens} out{calls}")
        }
        EventKind::ToolStarted {
            tool, arguments, ..
        }
        | EventKind::ApprovalRequested {
            tool, arguments, ..
        } => format!("{tool} {}", arguments.get()),
        EventKind::ToolCompleted {
            tool,
            is_error,
            result,
            ..
        } => match is_error {
            true => format!("{tool} failed: {result}"),
            false => format!("{tool}: {result}"),
        },
        EventKind::AgentCalled {
            child_agent, task, ..
        } => format!("{child_agent}: {task}"),
        EventKind::AgentReturned {
            child_agent, error, ..
        } => match error {
            Some(error) => format!("{child_agent} failed: {error}"),
            None => child_agent.clone(),
        },
        EventKind::ApprovalDecided {
            decision, reason, ..
        } => match reason {
            Some(reason) => format!("{}: {reason}", decision.as_str()),
            None => decision.as_str().to_owned(),
        },
        EventKind::InputRequested { question, .. } => question.clone(),
        EventKind::InputAnswered {
            outcome,
            answer,
            reason,
            ..
        } => {
            let outcome = outcome.as_str();
            match answer.as_deref().map(RawValue::get).or(reason.as_deref()) {
                Some(text) => format!("{outcome}: {text}"),
                None => outcome.to_owned(),
            }
        }
        EventKind::MessageAdded { content, .. } => content.clone(),
        EventKind::RetryScheduled {
            wait_ms, reason, ..
        } => format!("in {}: {reason}", format::duration(*wait_ms)),
        EventKind::TurnDelayed { until, .. } => match until {
            Some(until) => format!("rate limit, until {}", format::instant(*until)),
            None => "rate limit".to_owned(),
        },
        EventKind::BatchSubmitted { batch_id, .. } => batch_id.clone(),
        EventKind::MemoryWarning { message }
        | EventKind::ToolsWarning { message }
        | EventKind::LoopWarning { message, .. }
        | EventKind::ModelWarning { message, .. } => message.clone(),
        EventKind::ContextCompacted {
            tokens_before,
            tokens_after,
            ..
        } => format!("{tokens_before} tokens became {tokens_after}"),
        EventKind::BudgetAlert { budget, share, .. } => {
            format!("{budget} at {:.0} %", share * 100.0)
        }
        EventKind::ScoreFailed { name, message } => format!("{name}: {message}"),
        EventKind::RolloutStopped { loss, .. } => {
            let of = loss.scorer.as_deref().unwrap_or("runs that do not fail");
            format!("{of}: {:+.3}", loss.difference)
        }
        EventKind::WaitStarted { .. } => kind.waits().unwrap_or_default(),
        EventKind::WaitEnded { data, .. } => match data {
            Some(data) => shorten(data.get(), 200),
            None => "the time has come".to_owned(),
        },
        EventKind::EvalRegressed { eval, scorers, .. } => {
            let names: Vec<&str> = scorers.keys().map(String::as_str).collect();
            format!("{eval}: {}", names.join(", "))
        }
        EventKind::ScoreAdded { name, value, .. } => format!("{name}: {value}"),
        EventKind::RunQueued { .. }
        | EventKind::ReasoningStarted { .. }
        | EventKind::ReasoningDelta { .. }
        | EventKind::TextDelta { .. }
        | EventKind::TextWithdrawn { .. } => String::new(),
    }
}
