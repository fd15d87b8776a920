//! `/ui/evals/{id}`: an evaluation, what it has measured, and its cases page by page.

use maud::{Markup, html};

use crate::config::KeyScope::Cancel;
use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalState, Evaluation};
use crate::domain::run::now;
use crate::web::console::format;
use crate::web::console::layout::Page;
use crate::web::console::pages::{eval_cases, eval_result, evals};
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::extract::query::{Cursor, PageQuery};
use crate::web::routes::evals::{cases_page, visible_eval};

/// Characters at the end of an id that are shown.
const ID_CHARS: usize = 8;

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let query: PageQuery<u32> = request.query()?;
    let start = query.cursor.map_or(0, |Cursor(start)| start);
    let eval = visible_eval(&request.state, &request.principal, request.param("id")).await?;
    let cases = cases_page(&request.state, eval.id, start, eval_cases::PAGE_SIZE).await?;
    let is_active = !eval.state.is_terminal();
    let refresh = if is_active { "1500" } else { "0" };
    let id = eval.id.to_string();
    let body = html! {
        div.head.run-head {
            div {
                h1 {
                    "Evaluation of " a href=(request.href(&format!("/agents/{}", eval.agent))) { (eval.agent) }
                    " " code.muted title=(id) { (&id[id.len() - ID_CHARS..]) }
                }
                dl #state.line data-live=(refresh) { (facts(request, &eval)) }
            }
            div #actions.actions data-live {
                a.button href=(format!("{}?{}", request.href("/evals"), parts::query_string(&[("agent", &eval.agent)]))) { "All of this agent" }
                @if is_active && request.may(Cancel) { (cancel(request, &eval)) }
            }
            @if is_active && request.may(Cancel) { (parts::needs_scripts("Cancelling an evaluation")) }
        }
        div #eval data-live=(refresh) {
            @if is_active {
                progress.wide max=(eval.planned.max(1)) value=(eval.ended) aria-label="Runs that have ended" {}
                p.muted.small { "What it measures is shown when it ends." }
            }
            (why(&eval))
            (scorers(&eval))
            @if let Some(result) = &eval.result { (eval_result::render(request, result)) }
            (eval_cases::render(request, &eval, start, &cases))
        }
    };
    Ok(Page::new(
        "Evaluations",
        format!("Evaluation of {}", eval.agent),
        body,
    ))
}

fn facts(request: &ConsoleRequest, eval: &Evaluation) -> Markup {
    let now = now();
    let end = eval.finished_at.unwrap_or(now);
    let milliseconds = end.as_millisecond() - eval.created_at.as_millisecond();
    let duration = format::duration(u64::try_from(milliseconds).unwrap_or_default());
    let versions = &eval.request.versions;
    let names: &[&str] = match versions.len() {
        1 => &["Version"],
        _ => &["New version", "Old version"],
    };
    let eval_request = &eval.request;
    let estimate = eval_request.estimate.filter(|_| !eval.state.is_terminal());
    html! {
        div { dt { "State" } dd { (evals::state(eval.state)) } }
        @for (name, version) in names.iter().zip(versions) {
            div { dt { (name) } dd { a href=(request.href(&format!("/agents/{}", version.agent))) { (version.agent) } " " (evals::version(version)) } }
        }
        div { dt { "Runs" } dd { (format::thousands(eval.ended)) " of " (format::thousands(eval.planned)) } }
        div { dt { "Spent" } dd { (evals::spent(eval)) } }
        @if let Some(estimate) = estimate { div { dt { "Estimate" } dd { (format::cost(Some(estimate))) } } }
        @if let Some(dataset) = &eval_request.dataset { div { dt { "Dataset" } dd { (dataset) } } }
        @if eval_request.repeat > 1 { div { dt { "Each case" } dd { (eval_request.repeat) " times" } } }
        div { dt { "Tools" } dd { (eval_request.tools.as_str()) } }
        div { dt { "Duration" } dd { (duration) } }
        div { dt { "Accepted" } dd { (format::ago(eval.created_at, now)) } }
    }
}

fn cancel(request: &ConsoleRequest, eval: &Evaluation) -> Markup {
    let path = request.shell.api(&format!("/evals/{}/cancel", eval.id));
    html! {
        details.menu #cancel data-keep {
            summary.button.danger { "Cancel" }
            form.panel data-post=(path) data-then="reload" {
                p { "No more runs start, and those at work are cancelled. The result is that of the others." }
                label for="cancel-reason" { "Why (optional)" }
                input #cancel-reason name="reason" maxlength="1000";
                div.actions { button.danger type="submit" { "Cancel the evaluation" } span.error role="alert" {} }
            }
        }
    }
}

/// Why it has stopped, or is going to.
fn why(eval: &Evaluation) -> Markup {
    html! {
        @if let Some(reason) = &eval.reason {
            @let reason = format::prose(reason);
            @match eval.state {
                EvalState::Failed => div.failure role="status" { b { "Failed" } ": " (reason) },
                EvalState::Stopped => div.warning role="status" { b { "Stopped" } ": " (reason) },
                EvalState::Cancelled => div.warning role="status" { b { "Cancelled" } ": " (reason) },
                _ => div.warning role="status" { b { "Ends" } ": " (reason) },
            }
        }
    }
}

/// Names them until the result has.
fn scorers(eval: &Evaluation) -> Markup {
    let scorers = &eval.request.scorers;
    html! {
        @if scorers.is_empty() { p.muted.small { "No scorer: only what the runs take is measured." } }
        @else if eval.result.is_none() { p.muted.small { (counted(scorers.len(), "scorer")) ": " (scorers.join(", ")) } }
    }
}
