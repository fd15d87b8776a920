//! What a person can do with a run: cancel, decide, steer, fork, save as a test. The forms send requests to the API.

use maud::{Markup, html};

use crate::config::KeyScope;
use crate::domain::counted::counted;
use crate::domain::run::{Run, Status};
use crate::domain::run_ref::short_id;
use crate::domain::waiting_for::WaitingFor;
use crate::web::console::format;
use crate::web::console::parts::query_string;
use crate::web::console::request::ConsoleRequest;

/// The buttons above a run: those that its state and the key's scopes allow.
pub fn buttons(request: &ConsoleRequest, run: &Run) -> Markup {
    let path = |rest: &str| request.shell.api(&format!("/runs/{}{rest}", run.id));
    let is_root = run.parent_id.is_none();
    let is_active = !run.status.is_terminal();
    let may = |scope| request.may(scope) && request.principal.can_use_agent(&run.agent);
    let compare = query_string(&[("a", &run.id.to_string())]);
    html! {
        @if is_active && may(KeyScope::Run) {
            (steer(&path("/messages")))
            @if run.waiting_for != Some(WaitingFor::Resume) { (post_button("Pause", &path("/pause"), "")) }
        }
        @if !is_active && is_root && may(KeyScope::Run) {
            (run_again(&path("/fork")))
            a.button href=(edit_and_run(request, run)) { "Edit and run" }
        }
        @if !is_active && may(KeyScope::Run) { (score(&path("/scores"))) }
        @if may(KeyScope::Run) && run.turns > 0 { (fork(&path("/fork"), None)) }
        @if !is_active && is_root {
            (save_as_test(&path("/recording"), run))
            a.button href=(request.href(&format!("/runs/{}/dataset", run.id))) { "Add to dataset" }
        }
        a.button href=(format!("{}?{compare}", request.href("/compare"))) { "Compare" }
        @if is_active && may(KeyScope::Cancel) { (cancel(&path("/cancel"), run)) }
    }
}

/// What a run waits for, with the button that ends the wait.
pub fn wait_notice(request: &ConsoleRequest, run: &Run) -> Markup {
    let path = |rest: &str| request.shell.api(&format!("/runs/{}{rest}", run.id));
    let may_run = request.may(KeyScope::Run) && request.principal.can_use_agent(&run.agent);
    let load = request.state.runner.gauges();
    html! {
        @match (run.status, run.waiting_for) {
            (Status::Queued, _) => div.wait {
                "Queued: " (counted(load.running, "run")) " running, " (load.queued) " waiting for a slot. It starts by itself."
            },
            (status, _) if status.is_terminal() => {},
            (_, Some(WaitingFor::Approval | WaitingFor::Input | WaitingFor::Reconcile)) => {
                @for pending in run.pending_inputs.iter().take(1) {
                    @let is_question = pending.request.question.is_some();
                    div.wait {
                        @if is_question { "A question of " (pending.agent) " waits for an answer" }
                        @else { b { (pending.request.tool) } " of " (pending.agent) " waits for a decision" }
                        @if let Some(deadline) = pending.request.deadline { ", until " (format::instant(deadline)) }
                        "."
                        @let others = run.pending_inputs.len() - 1;
                        @if others > 0 { " " (others) " more wait for a person." }
                        " " a.button href=(request.run_href(run.id)) { @if is_question { "Answer" } @else { "Decide" } }
                    }
                }
            },
            (_, Some(WaitingFor::Resume)) => div.wait {
                "Paused: its time limit stands still. "
                @if may_run { (post_button("Resume", &path("/resume"), "primary")) }
            },
            (_, Some(WaitingFor::ClientTools)) => div.wait {
                "Waits for the results of tools of its client, which sends them with its next request. Cancel the run to end the wait."
            },
            (_, Some(WaitingFor::Batch)) => div.wait {
                "Waits for a batch of the provider, which can take hours. Cancel the run to end the wait."
            },
            (_, Some(WaitingFor::Event | WaitingFor::Sleep)) => {
                @if let Some(wait) = run.wait() {
                    div.wait {
                        @match wait.event {
                            Some(waited) => { "Waits for the event " b { (waited.event) } " of " code { (waited.key) } },
                            None => "Sleeps",
                        }
                        @if let Some(until) = wait.until { " until " (format::instant(until)) }
                        ". Its time limit stands still."
                    }
                }
            },
            (_, Some(WaitingFor::Agents)) => div.wait { "Waits for agents that it has started in the background." },
            _ => {},
        }
    }
}

fn post_button(name: &str, path: &str, class: &str) -> Markup {
    html! {
        form.inline.needs-scripts data-post=(path) data-then="reload" {
            button class=(class) type="submit" { (name) }
            span.error role="alert" {}
        }
    }
}

fn cancel(path: &str, run: &Run) -> Markup {
    html! {
        details.menu #cancel data-keep {
            summary.button.danger { "Cancel" }
            form.panel data-post=(path) data-then="reload" {
                p {
                    "The run ends at its next step"
                    @if run.tree.runs > 1 { ", and so do the runs below it" }
                    ". What is recorded stays."
                }
                div.actions { button.danger type="submit" { "Cancel the run" } span.error role="alert" {} }
            }
        }
    }
}

/// The recorded request once more, with the agent of today.
fn run_again(path: &str) -> Markup {
    html! {
        form.inline.needs-scripts data-post=(path) data-then="run" {
            input type="hidden" name="at.turn" value="0" data-type="number";
            input type="hidden" name="definition" value="current";
            input type="hidden" name="memory" value="true" data-type="json";
            button type="submit" title="The same input, with the agent of today" { "Run again" }
            span.error role="alert" {}
        }
    }
}

/// The address of the agent's form, filled from the run.
fn edit_and_run(request: &ConsoleRequest, run: &Run) -> String {
    let query = query_string(&[("from", &run.id.to_string())]);
    request.href(&format!("/agents/{}?{query}#start-title", run.agent))
}

fn save_as_test(path: &str, run: &Run) -> Markup {
    let name = format!("{}.toml", run.agent);
    html! {
        details.menu #save data-keep {
            summary.button { "Save as test" }
            div.panel {
                p { "Your browser downloads " code { (name) } ". Put it into " code { "tests/" } " beside the directory of your agents; then " code { "axed test" } " runs it, offline." }
                p.muted.small { "Or in a terminal: " code { "axed runs save " (short_id(run.id)) " tests/" (name) } }
                div.actions { a.button.primary href=(path) data-download=(name) download { "Download" } }
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

/// A thumb, or a score of any name.
fn score(path: &str) -> Markup {
    html! {
        form.inline.needs-scripts data-post=(path) data-then="reload" {
            input type="hidden" name="name" value="thumbs";
            button type="submit" name="value" value="true" data-type="json" title="A thumb up: the score thumbs is 1" { "Good" }
            button type="submit" name="value" value="false" data-type="json" title="A thumb down: the score thumbs is 0" { "Bad" }
            span.error role="alert" {}
        }
        details.menu #score data-keep {
            summary.button { "Score" }
            form.panel data-post=(path) data-then="reload" {
                label for="score-name" { "What is scored" }
                input #score-name name="name" required maxlength="64" placeholder="grounded";
                label for="score-value" { "A number or a label" }
                input #score-value name="value" required maxlength="64" data-type="score" placeholder="0.8";
                label for="score-comment" { "Why (optional)" }
                textarea #score-comment name="comment" rows="3" maxlength="2000" {}
                div.actions { button.primary type="submit" { "Score" } span.error role="alert" {} }
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
