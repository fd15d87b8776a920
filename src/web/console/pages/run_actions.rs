//! What a person can do with a run: cancel, decide, steer, fork, save as a test. The forms send requests to the API.

use maud::{Markup, html};

use crate::config::KeyScope;
use crate::domain::http_placement::push_encoded;
use crate::domain::run::{PendingApproval, Run, RunId, now};
use crate::web::console::format;
use crate::web::console::parts::{self, query_string};
use crate::web::console::request::ConsoleRequest;

/// The buttons above a run: those that its state and the key's scopes allow.
pub fn buttons(request: &ConsoleRequest, run: &Run) -> Markup {
    let path = |rest: &str| request.shell.api(&format!("/runs/{}{rest}", run.id));
    let is_root = run.parent_id.is_none();
    let may = |scope| request.may(scope) && request.principal.can_use_agent(&run.agent);
    let compare = query_string(&[("a", &run.id.to_string())]);
    html! {
        @if !run.status.is_terminal() && may(KeyScope::Run) { (steer(&path("/messages"))) }
        @if may(KeyScope::Run) && run.turns > 0 { (fork(&path("/fork"), None)) }
        @if run.status.is_terminal() && is_root {
            a.button href=(path("/recording")) data-download=(format!("{}.toml", run.id)) download { "Save as test" }
        }
        a.button href=(format!("{}?{compare}", request.href("/compare"))) { "Compare" }
        @if !run.status.is_terminal() && may(KeyScope::Cancel) {
            form.inline.needs-scripts data-post=(path("/cancel")) data-then="reload" {
                button.danger type="submit" { "Cancel" }
                span.error role="alert" {}
            }
        }
    }
}

fn steer(path: &str) -> Markup {
    html! {
        details.menu #steer data-keep {
            summary.button { "Steer" }
            form.panel data-post=(path) data-then="reload" {
                label for="steer-text" { "A message that the next request includes" }
                textarea #steer-text name="content" rows="4" required {}
                div.actions { button.primary type="submit" { "Send" } span.error role="alert" {} }
            }
        }
    }
}

/// Continues from a copy of the record: up to a turn, or with all of it.
pub fn fork(path: &str, turn: Option<u32>) -> Markup {
    let id = turn.map_or("fork".to_owned(), |turn| format!("fork-{turn}"));
    html! {
        details.menu id=(id) data-keep {
            summary.button { @if turn.is_some() { "Fork here" } @else { "Fork" } }
            form.panel data-post=(path) data-then="run" {
                @if let Some(turn) = turn {
                    p { "A new run keeps what came before turn " (turn) ", and requests this turn anew." }
                    input type="hidden" name="at.turn" value=(turn) data-type="number";
                } @else {
                    p { "A new run continues after the last recorded step." }
                }
                label for=(format!("{id}-message")) { "Another user message (optional)" }
                textarea id=(format!("{id}-message")) name="edit.message" rows="3" {}
                label for=(format!("{id}-model")) { "Another model (optional)" }
                input id=(format!("{id}-model")) name="edit.model" placeholder="provider/model";
                label for=(format!("{id}-definition")) { "Definition" }
                select id=(format!("{id}-definition")) name="definition" {
                    option value="" { "as recorded" }
                    option value="current" { "of the agent's file today" }
                }
                div.actions { button.primary type="submit" { "Fork" } span.error role="alert" {} }
            }
        }
    }
}

/// A call that waits for approval, with its decision: only if the page has all of its arguments.
pub fn approval(request: &ConsoleRequest, approval: &PendingApproval) -> Markup {
    let call = &approval.request;
    let now = now();
    let may_decide = (request.may(KeyScope::Run) || request.may(KeyScope::Approve))
        && request.principal.can_use_agent(&approval.agent);
    html! {
        article.approval {
            header {
                h3 { (call.tool) }
                span.muted {
                    "of " a href=(step(request, approval.run_id, &call.tool_call_id)) { (approval.agent) }
                    " · " (format::ago(call.requested_at, now))
                    @if let Some(deadline) = call.deadline { " · denied at " (format::instant(deadline)) }
                }
            }
            @if call.truncated {
                (parts::json_block(call.arguments.get()))
                p.muted.small {
                    "The arguments are too long to decide on them here. Use "
                    code { "axed runs approve " (approval.run_id) } "."
                }
            } @else if may_decide { (decision(request, approval)) }
            @else { (whole_json(&format::pretty_json(call.arguments.get()))) }
        }
    }
}

fn whole_json(json: &str) -> Markup {
    html! { pre.text.json tabindex="0" { (json) } }
}

fn decision(request: &ConsoleRequest, approval: &PendingApproval) -> Markup {
    let call = &approval.request;
    let mut path = format!("/runs/{}/approvals/", approval.run_id);
    push_encoded(&mut path, &call.tool_call_id);
    let path = request.shell.api(&path);
    // Providers give the same id to calls of different runs.
    let id = format!("arguments-{}-{}", approval.run_id, call.tool_call_id);
    let json = format::pretty_json(call.arguments.get());
    html! {
        form data-post=(path) data-then="reload" {
            input type="hidden" name="arguments_hash" value=(call.arguments_hash.0);
            @if request.may(KeyScope::Approve) {
                label for=(id) { "Arguments: change them to approve an edited call" }
                textarea.code id=(id) name="arguments" data-type="json" data-only-if-changed rows=(json.lines().count().clamp(3, 20)) spellcheck="false" data-for="approve" { (json) }
            } @else { (whole_json(&json)) }
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
