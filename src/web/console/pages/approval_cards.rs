//! The calls that wait for approval and the questions that wait for an answer, each a card with its form. A card that is decided stays at its place until the page is
//! left, so that nothing moves below the pointer: see `merge` in `pages.js`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::KeyScope;
use crate::domain::http_placement::push_encoded;
use crate::domain::input::Question;
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
        if let Some(question) = approval.request.question.as_deref() {
            cards.push(question_card(request, approval, question, task(approval)));
            continue;
        }
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

fn question_card(
    request: &ConsoleRequest,
    input: &PendingInput,
    question: &Question,
    task: Option<&str>,
) -> Markup {
    let pending = &input.request;
    let title = question.begun.as_ref().map_or("Question", |it| &it.tool);
    let id = format!("input-{}-{}", input.run_id, pending.tool_call_id);
    html! {
        article.approval id=(id) {
            header {
                h3 { (title) }
                span.muted {
                    "of " a href=(step(request, input.run_id, &question.call_id)) { (input.agent) " " code { (short_id(input.run_id)) } }
                    @if let Some(server) = &question.server { " · of the MCP server " (server) }
                    " · " (format::ago(pending.requested_at, now()))
                    @if let Some(deadline) = pending.deadline { " · until " (format::instant(deadline)) }
                }
            }
            @if let Some(task) = task { p.task { span.muted { "Task: " } (task) } }
            p.question { (question.text) }
            @if let Some(call) = &question.begun {
                p.small { span.muted { "It began at " (format::instant(call.began_at)) " with:" } }
                (parts::json_block(call.arguments.get()))
                @if may_decide(request, input) { (reconcile_form(request, input, question)) }
            } @else if may_decide(request, input) { (answer_form(request, input, question)) }
        }
    }
}

/// Whether a call was done whose end is not known.
fn reconcile_form(request: &ConsoleRequest, input: &PendingInput, question: &Question) -> Markup {
    let mut path = format!("/runs/{}/calls/", input.run_id);
    push_encoded(&mut path, &question.call_id);
    let path = request.shell.api(&path);
    let id = format!("result-{}-{}", input.run_id, input.request.tool_call_id);
    html! {
        form data-post=(path) data-then="decided" {
            label for=(id) { "What it returned, if it was done (the model gets it as the result)" }
            textarea id=(id) name="result" data-for="done" rows="3" {}
            div.actions.needs-scripts {
                button.primary type="submit" name="outcome" value="done" { "It was done" }
                button type="submit" name="outcome" value="not_done" { "It was not done: perform it" }
                button type="submit" name="outcome" value="unknown" { "Unknown" }
                span.error role="alert" {}
            }
        }
    }
}

fn answer_form(request: &ConsoleRequest, input: &PendingInput, question: &Question) -> Markup {
    let mut path = format!("/runs/{}/inputs/", input.run_id);
    push_encoded(&mut path, &input.request.tool_call_id);
    let path = request.shell.api(&path);
    let id = format!("answer-{}-{}", input.run_id, input.request.tool_call_id);
    let schema = question.schema_json();
    let fields = form_fields(&schema);
    html! {
        form data-post=(path) data-then="decided" {
            @match &fields {
                Some(fields) => @for field in fields {
                    @let id = format!("{id}-{}", field.name);
                    label for=(id) { (field.title) @if field.is_required { " (required)" } }
                    (control(&id, &format!("answer.{}", field.name), field.schema))
                    @if let Some(description) = field.schema["description"].as_str() { p.muted.small { (description) } }
                },
                None => {
                    label for=(id) { "Answer" @if !schema.is_null() && !is_simple(&schema) { " as JSON" } }
                    (control(&id, "answer", &schema))
                    @if !schema.is_null() && !is_simple(&schema) { details { summary { "Schema" } (whole_json(&format::pretty_json(&schema.to_string()))) } }
                },
            }
            @if !question.options.is_empty() {
                @let is_text = fields.is_none() && !schema["enum"].is_array() && (schema.is_null() || schema["type"] == "string");
                p.small {
                    span.muted { "Suggestions: " }
                    @for option in &question.options {
                        @if is_text { button.small type="button" data-fill=(id) { (option) } " " } @else { (option) " · " }
                    }
                }
            }
            label for=(format!("decline-{id}")) { "Or why you do not answer (the model reads it)" }
            input id=(format!("decline-{id}")) name="decline" data-for="decline";
            div.actions.needs-scripts {
                button.primary type="submit" value="answer" { "Answer" }
                button type="submit" value="decline" { "Decline" }
                span.error role="alert" {}
            }
        }
    }
}

/// A field of an answer that is an object.
struct FormField<'s> {
    name: &'s str,
    title: &'s str,
    schema: &'s Value,
    is_required: bool,
}

/// The fields of a schema that is a form; `None` if its answer is one field.
fn form_fields(schema: &Value) -> Option<Vec<FormField<'_>>> {
    let properties = schema["properties"].as_object()?;
    let can_be_form = |(name, schema): (&String, &Value)| is_simple(schema) && !name.contains('.');
    if schema["type"] != "object" || !properties.iter().all(can_be_form) {
        return None;
    }
    let required = schema["required"].as_array();
    let fields = properties.iter().map(|(name, schema)| FormField {
        name,
        title: schema["title"].as_str().unwrap_or(name),
        schema,
        is_required: required.is_some_and(|names| names.iter().any(|it| it == name)),
    });
    Some(fields.collect())
}

/// Whether a value of this schema has a control of its own.
fn is_simple(schema: &Value) -> bool {
    let kinds = ["string", "number", "integer", "boolean"];
    schema["enum"].is_array()
        || schema["type"]
            .as_str()
            .is_some_and(|it| kinds.contains(&it))
}

/// The control of a value with this schema; null is a text.
fn control(id: &str, field: &str, schema: &Value) -> Markup {
    let select = |values: &[Value]| {
        html! {
            select id=(id) name="answer" data-field=(field) data-type="json" data-for="answer" {
                option value="" {}
                @for value in values {
                    option value=(value) { @match value.as_str() { Some(text) => (text), None => (value) } }
                }
            }
        }
    };
    if let Some(values) = schema["enum"].as_array() {
        return select(values);
    }
    match schema["type"].as_str() {
        Some("boolean") => select(&[json!(true), json!(false)]),
        Some("number" | "integer") => html! {
            input id=(id) name="answer" data-field=(field) data-type="decimal" data-for="answer" inputmode="decimal";
        },
        Some("string") => {
            html! { input id=(id) name="answer" data-field=(field) data-for="answer"; }
        }
        None if schema.is_null() => html! {
            textarea id=(id) name="answer" data-field=(field) data-for="answer" rows="3" {}
        },
        _ => html! {
            textarea.code id=(id) name="answer" data-field=(field) data-type="json" data-for="answer" rows="5" spellcheck="false" {}
        },
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
