//! `/ui/runs/{id}/dataset`: a run as a line of a dataset, which is a file on the machine of a person.

use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;

use crate::domain::run::{Run, now};
use crate::domain::run_ref::short_id;
use crate::domain::terminal_text;
use crate::web::console::layout::Page;
use crate::web::console::messages::copy_button;
use crate::web::console::parts;
use crate::web::console::request::ConsoleRequest;
use crate::web::error::Problem;
use crate::web::evals::recorded_case::{self, Unsuitable};
use crate::web::response::run::RunView;
use crate::web::routes::runs::require_run;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Form {
    /// Whether the answer is left out.
    input_only: Option<String>,
}

pub async fn page(request: ConsoleRequest) -> Result<Page, Problem> {
    let request = &request;
    let Form { input_only } = request.query()?;
    let expects = input_only.is_none();
    let id = request.visible_run(request.param("id")).await?;
    let run = require_run(&request.state, id).await?;
    let line = line_of(request, &run, expects).await?;
    let body = html! {
        div.head {
            div {
                h1 { "Add to a dataset" }
                p.muted { "The run " a href=(request.run_href(id)) { (run.agent) " " (short_id(id)) } " as a case that evaluations run again." }
            }
        }
        @match &line {
            Err(reason) => { (parts::empty("This run cannot be a case", &format!("Runs {reason} cannot."))) },
            Ok(line) => { (case(request, &run, line, expects)) },
        }
    };
    Ok(Page::new("Runs", "Add to a dataset", body))
}

async fn line_of(
    request: &ConsoleRequest,
    run: &Run,
    expects: bool,
) -> Result<Result<String, Unsuitable>, Problem> {
    if run.parent_id.is_some() {
        return Ok(Err("below other runs"));
    }
    if !run.status.is_terminal() {
        return Ok(Err("that have not ended"));
    }
    let recorded = recorded_case::read(request.state.runner.store().as_ref(), run.id).await?;
    let view = serde_json::to_value(RunView::new(run, "", now()))
        .map_err(|error| Problem::internal(format!("a recorded run: {error}")))?;
    let case = recorded_case::case(&view, recorded, expects);
    Ok(case.map(|case| Value::Object(case).to_string()))
}

fn case(request: &ConsoleRequest, run: &Run, line: &str, expects: bool) -> Markup {
    let address = request.href(&format!("/runs/{}/dataset", run.id));
    let expect = if expects { " --expect" } else { "" };
    let command = format!("axed dataset add NAME --run {}{expect}", run.id);
    html! {
        p {
            @if expects { "The answer of the run is what is expected. " a href=(format!("{address}?input_only=true")) { "Leave it out" } }
            @else { "Nothing is expected. " a href=(address) { "Expect the answer of the run" } }
            "."
        }
        section aria-labelledby="line-title" {
            h2 #line-title { "As a line" }
            p { "Append it to " code { "datasets/NAME.jsonl" } " on the machine where " code { "axed eval" } " runs." }
            pre.text.json #line data-source tabindex="0" { (terminal_text::escape_json(line)) }
            div.actions {
                (copy_button("line"))
                button.needs-scripts type="button" data-save=(format!("{}.jsonl", run.agent)) { "Download" }
            }
        }
        section aria-labelledby="command-title" {
            h2 #command-title { "Or in a terminal" }
            p { "The command reads the run from this server, which " code { "AXED_SERVER" } " names, and skips it if the dataset has it." }
            pre.text data-source tabindex="0" { (command) }
            div.actions { (copy_button("command")) }
        }
    }
}
