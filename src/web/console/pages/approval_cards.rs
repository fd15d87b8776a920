//! The calls that wait for approval, each a card with its decision. A card that is decided stays at its place until the page is
//! left, so that nothing moves below the pointer: see `merge` in `pages.js`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use maud::{Markup, html};
use serde::Deserialize;

use crate::config::KeyScope;
use crate::domain::http_placement::push_encoded;
use crate::domain::run::{PendingInput, Run, RunId, now};
use crate::domain::run_ref::short_id;
use crate::web::console::diff;
use crate::web::console::format;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;

/// Characters of a task.
const TASK_CHARS: usize = 240;

/// Of calls of several runs. The pages of the runs are read for their tasks.
pub async fn of_runs(
    request: &ConsoleRequest,
    approvals: &[PendingInput],
) -> Result<Markup, Problem> {
    let mut tasks: HashMap<RunId, String> = HashMap::new();
    for approval in approvals {
        if let Entry::Vacant(unknown) = tasks.entry(approval.run_id) {
            let run = request.state.runner.store().run(approval.run_id).await?;
            unknown.insert(run.as_ref().map(task).unwrap_or_default());
        }
    }
    let task = |approval: &PendingInput| tasks.get(&approval.run_id).map(String::as_str);
    Ok(cards(request, approvals, task).await)
}

/// Of calls of the run that the page is about, and of runs below it.
pub async fn of_run(request: &ConsoleRequest, approvals: &[PendingInput]) -> Markup {
    cards(request, approvals, |_| None).await
}

async fn cards<'t>(
    request: &ConsoleRequest,
    approvals: &[PendingInput],
    task: impl Fn(&PendingInput) -> Option<&'t str>,
) -> Markup {
    let mut cards = Vec::new();
    for approval in approvals {
        let change = file_change(request, approval).await;
        cards.push(card(request, approval, task(approval), change));
    }
    html! { div #approvals data-merge { @for card in &cards { (card) } } }
}

/// What the run is for, on one line.
fn task(run: &Run) -> String {
    match &run.task {
        Some(task) => format::excerpt(task, TASK_CHARS),
        None => format::excerpt(&run.input.to_plain_text(), TASK_CHARS),
    }
}

fn may_decide(request: &ConsoleRequest, approval: &PendingInput) -> bool {
    (request.may(KeyScope::Run) || request.may(KeyScope::Approve))
        && request.principal.can_use_agent(&approval.agent)
}

/// Decides only if the page has all of the arguments.
fn card(
    request: &ConsoleRequest,
    approval: &PendingInput,
    task: Option<&str>,
    change: Option<Markup>,
) -> Markup {
    let call = &approval.request;
    let now = now();
    let id = format!("approval-{}-{}", approval.run_id, call.tool_call_id);
    html! {
        article.approval id=(id) {
            header {
                h3 { (call.tool) }
                span.muted {
                    "of " a href=(step(request, approval.run_id, &call.tool_call_id)) { (approval.agent) " " code { (short_id(approval.run_id)) } }
                    " · " (format::ago(call.requested_at, now))
                    @if let Some(deadline) = call.deadline { " · denied at " (format::instant(deadline)) }
                }
            }
            @if let Some(task) = task { p.task { span.muted { "Task: " } (task) } }
            @if call.truncated {
                (parts::json_block(call.arguments.get()))
                p.muted.small {
                    "The arguments are too long to decide on them here. Use "
                    code { "axed runs approve " (approval.run_id) } "."
                }
            } @else if may_decide(request, approval) { (decision(request, approval, change)) }
            @else { (whole_json(&format::pretty_json(call.arguments.get()))) }
        }
    }
}

fn whole_json(json: &str) -> Markup {
    html! { pre.text.json tabindex="0" { (json) } }
}

/// What the call would do to a file, if it is one that changes a file.
async fn file_change(request: &ConsoleRequest, approval: &PendingInput) -> Option<Markup> {
    #[derive(Deserialize)]
    struct Write {
        path: String,
        content: String,
    }
    #[derive(Deserialize)]
    struct Edit {
        path: String,
        old_string: String,
        new_string: String,
    }
    let call = &approval.request;
    if call.truncated || !may_decide(request, approval) {
        return None;
    }
    let arguments = call.arguments.get();
    match call.tool.as_str() {
        "write_file" => {
            let Write { path, content } = serde_json::from_str(arguments).ok()?;
            let runner = &request.state.runner;
            let current = runner.workdir_text(approval.run_id, path.clone()).await;
            let verb = if current.is_some() {
                "Replaces"
            } else {
                "Writes"
            };
            let lines = diff::lines(current.as_deref().unwrap_or_default(), &content);
            Some(html! { p.small { (verb) " " code { (diff::shown(&path)) } } (lines) })
        }
        "edit_file" => {
            let edit: Edit = serde_json::from_str(arguments).ok()?;
            let lines = diff::lines(&edit.old_string, &edit.new_string);
            Some(html! { p.small { "Changes " code { (diff::shown(&edit.path)) } } (lines) })
        }
        _ => None,
    }
}

fn decision(request: &ConsoleRequest, approval: &PendingInput, change: Option<Markup>) -> Markup {
    let call = &approval.request;
    let mut path = format!("/runs/{}/approvals/", approval.run_id);
    push_encoded(&mut path, &call.tool_call_id);
    let path = request.shell.api(&path);
    // Providers give the same id to calls of different runs.
    let id = format!("arguments-{}-{}", approval.run_id, call.tool_call_id);
    let json = format::pretty_json(call.arguments.get());
    let is_shown = change.is_some();
    let edit = html! {
        label for=(id) { "Arguments: change them to approve an edited call" }
        textarea.code id=(id) name="arguments" data-type="json" data-only-if-changed rows=(json.lines().count().clamp(3, 20)) spellcheck="false" data-for="approve" { (json) }
    };
    html! {
        @if let Some(change) = &change { (change) }
        form data-post=(path) data-then="decided" {
            input type="hidden" name="arguments_hash" value=(call.arguments_hash.0);
            @if !request.may(KeyScope::Approve) { @if !is_shown { (whole_json(&json)) } }
            @else if is_shown { details id=(format!("edit-{id}")) data-keep { summary { "Arguments" } (edit) } }
            @else { (edit) }
            label for=(format!("reason-{id}")) { "Reason (the model reads it if the call is denied)" }
            input id=(format!("reason-{id}")) name="reason";
            div.actions.needs-scripts {
                button.primary type="submit" name="decision" value="approve" { "Approve" }
                button.danger type="submit" name="decision" value="deny" { "Deny" }
                span.error role="alert" {}
            }
        }
    }
}

fn step(request: &ConsoleRequest, run: RunId, call: &str) -> String {
    format!(
        "{}?{}",
        request.run_href(run),
        query_string(&[("call", call)])
    )
}
