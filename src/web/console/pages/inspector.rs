//! The right side of a run's page: the run, one turn, one tool call, or the raw events.

use maud::{Markup, html};
use serde::Deserialize;

use crate::domain::message::{ToolCall, ToolResult};
use crate::domain::run::Run;
use crate::record::entry::{self, Entry};
use crate::web::console::format;
use crate::web::console::messages;
use crate::web::console::pages::{approval_cards, run_events, turn};
use crate::web::console::parts::{self, facts, json_block, text, text_block};
use crate::web::console::request::ConsoleRequest;
use crate::web::console::timeline::StepName;
use crate::web::error::Problem;

/// What is shown of the run.
pub enum Selection {
    Run,
    Step(StepName),
    Events,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunPageQuery {
    turn: Option<u32>,
    call: Option<String>,
    view: Option<View>,
    show: turn::Show,
    /// The name of the events that are shown.
    event: Option<String>,
    /// Only events after this number.
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
            (None, None, Some(View::Events)) => Self::Events,
            (None, None, None) => Self::Run,
        }
    }

    pub fn step(&self) -> Option<&StepName> {
        match self {
            Self::Step(step) => Some(step),
            Self::Run | Self::Events => None,
        }
    }
}

pub async fn render(
    request: &ConsoleRequest,
    run: &Run,
    query: &RunPageQuery,
    selection: &Selection,
) -> Result<Markup, Problem> {
    let content = match selection {
        Selection::Run => overview(request, run).await,
        Selection::Step(StepName::Turn(number)) => {
            turn::render(request, run, *number, query.show).await?
        }
        Selection::Step(StepName::Call(call)) => call_view(request, run, call).await?,
        Selection::Events => {
            run_events::render(request, run, query.after.into(), query.event.as_deref()).await?
        }
    };
    let tab = |name: &str, query: &str, is_current: bool| {
        let href = format!("{}{query}", request.run_href(run.id));
        html! { a href=(href) aria-current=[is_current.then_some("true")] { (name) } }
    };
    Ok(html! {
        nav.tabs aria-label="Views of the run" {
            (tab("Run", "", matches!(selection, Selection::Run)))
            (tab("Events", "?view=events", matches!(selection, Selection::Events)))
            @match selection.step() {
                Some(StepName::Turn(turn)) => span aria-current="true" { "Turn " (turn) },
                Some(StepName::Call(_)) => span aria-current="true" { "Tool call" },
                None => {}
            }
        }
        (content)
    })
}

async fn overview(request: &ConsoleRequest, run: &Run) -> Markup {
    let approvals = approval_cards::of_run(request, &run.pending_inputs).await;
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
    let answer = match output {
        Some(json) if run.structured => json_block(json),
        text => messages::text("assistant", text.unwrap_or_default()).await,
    };
    html! {
        (approvals)
        @if let Some(error) = &run.error {
            div.failure role="alert" { b { (error.code) } p { (error.message) } }
        }
        @for warning in &run.warnings { p.warning { (warning.message) } }
        @if output.is_some() {
            section.answer {
                header { h3 { @if run.content.is_some() { "Answer" } @else { "Last text" } } (messages::copy_button("answer")) }
                (answer)
            }
        }
        @if !run.status.is_terminal() {
            h3 { "Live" }
            (turn::live_text(request, run, None))
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

async fn call_view(request: &ConsoleRequest, run: &Run, id: &str) -> Result<Markup, Problem> {
    let store = request.state.runner.store();
    let steps = entry::steps(store.entries(run.id).await?);
    let Some(call) = find_call(&steps, id) else {
        return Err(turn::step_not_found(run, "such tool call"));
    };
    let children = store.child_calls(run.id).await?;
    let child = children
        .iter()
        .find(|(_, call)| call.as_deref() == Some(id));
    let pending = run
        .pending_inputs
        .iter()
        .find(|it| match it.request.question.as_deref() {
            Some(question) => it.run_id == run.id && question.call_id == id,
            None => it.request.tool_call_id == id,
        });
    let card = match pending {
        Some(pending) => Some(approval_cards::of_run(request, std::slice::from_ref(pending)).await),
        None => None,
    };
    let redactor = &request.state.settings.redactor;
    let json = |json: &str| {
        redactor
            .redact_json(json)
            .unwrap_or_else(|| json.to_owned())
    };
    Ok(html! {
        @if let Some(card) = card { (card) }
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
