//! Pieces that several pages show.

use jiff::Timestamp;
use maud::{Markup, html};

use crate::config::KeyScope::Cancel;
use crate::domain::attachment::Attachment;
use crate::domain::content::{Content, Part};
use crate::domain::counted::counted;
use crate::domain::message::truncate_to_bytes;
use crate::domain::run::{Run, RunId};
use crate::domain::run_ref::ShortIds;
use crate::domain::score::{RunScores, ScoreSummary};
use crate::web::console::format;
use crate::web::console::request::ConsoleRequest;

/// Characters of a run's input in a list.
const INPUT_CHARS: usize = 110;
/// Characters of a label in a list.
const LABEL_CHARS: usize = 40;
/// Bytes of a text in a page; the API has all of it.
pub const MAX_TEXT_BYTES: usize = 256 << 10;

/// Runs as a table. `selects` adds a box to each run that can be cancelled.
pub fn run_table(request: &ConsoleRequest, runs: &[Run], now: Timestamp, selects: bool) -> Markup {
    let columns = Columns {
        selects: selects && request.may(Cancel),
        has_cost: runs.iter().any(|run| run.tree.usage.cost.is_some()),
        has_error: runs.iter().any(|run| run.error.is_some()),
        has_scores: runs.iter().any(|run| !run.scores.is_empty()),
        ids: ShortIds::new(runs.iter().map(|run| run.id)),
    };
    html! {
        table.list.runs {
            thead {
                tr {
                    @if columns.selects { th.check { span.sr { "Select" } } }
                    th.state { "Status" }
                    th { "Run" }
                    th.agent { "Agent" }
                    @if columns.has_error { th.why { "Error" } }
                    @if columns.has_scores { th.why { "Scores" } }
                    th.number.tokens { "Tokens" }
                    @if columns.has_cost { th.number.cost { "Cost" } }
                    th.number.time { "Duration" }
                    th.number.when { "Accepted" }
                }
            }
            tbody {
                @for run in runs { (run_row(request, run, now, &columns)) }
            }
        }
    }
}

/// The scores of a run, such as `grounded 0.8`.
pub fn scores(scores: &RunScores) -> Markup {
    html! {
        @for (index, (name, summary)) in scores.iter().enumerate() {
            @if index > 0 { ", " }
            (score(name, summary))
        }
    }
}

/// The mean and the labels of the scores of one name.
pub fn score(name: &str, summary: &ScoreSummary) -> Markup {
    html! {
        span.nowrap title=(counted(summary.n(), "score")) {
            (name)
            @if let Some(mean) = summary.numbers.mean() { " " b { ((mean * 1e3).round() / 1e3) } }
            @for (label, count) in &summary.labels { " " b { (label) } @if *count > 1 { " ×" (count) } }
        }
    }
}

struct Columns {
    selects: bool,
    has_cost: bool,
    has_error: bool,
    has_scores: bool,
    ids: ShortIds,
}

fn run_row(request: &ConsoleRequest, run: &Run, now: Timestamp, columns: &Columns) -> Markup {
    let id = run.id.to_string();
    let input = run.task.as_deref().map_or_else(
        || format::excerpt(&run.input.to_plain_text(), INPUT_CHARS),
        |task| format::excerpt(task, INPUT_CHARS),
    );
    html! {
        tr data-row {
            @if columns.selects {
                td.check {
                    @if !run.status.is_terminal() {
                        input type="checkbox" name="run" value=(id) aria-label=(format!("Select {id}"));
                    }
                }
            }
            td.state {
                (format::status(run.status))
                @if let Some(cause) = run.suspended { span.muted.small { (cause.describe()) } }
                @else if let Some(cause) = waiting_for(run) { span.muted.small { (cause) } }
            }
            td.main {
                div {
                    a href=(request.run_href(run.id)) title=(input) { @if input.is_empty() { "(no input)" } @else { (input) } }
                    span.muted.small {
                        code title=(id) { (columns.ids.short(run.id)) }
                        @if let Some(session) = &run.session {
                            " · " a href=(request.href(&format!("/sessions/{session}"))) { (session) }
                        }
                        @for (name, value) in run.labels.iter().take(4) {
                            @let label = format!("{name}={value}");
                            " " span.label title=(label) { (format::excerpt(&label, LABEL_CHARS)) }
                        }
                    }
                }
            }
            td.agent title=(run.agent) { (run.agent) }
            @if columns.has_error {
                td.why { @if let Some(error) = &run.error { span.error title=(format::excerpt(&error.message, 300)) { (error.code) } } }
            }
            @if columns.has_scores { td.why { (scores(&run.scores)) } }
            td.number.tokens title=(format!("{} in, {} out", run.tree.usage.tokens.input, run.tree.usage.tokens.output)) {
                (format::count(run.tree.usage.tokens.total()))
            }
            @if columns.has_cost { td.number.cost { (format::cost(run.tree.usage.cost)) } }
            td.number.time { @if run.started_at.is_some() { (format::duration(run.duration_ms(now))) } @else { "–" } }
            td.number.when { (format::ago(run.created_at, now)) }
        }
    }
}

/// In place of what only scripts can send.
pub fn needs_scripts(what: &str) -> Markup {
    html! {
        noscript {
            p.warning { (what) " from this page needs scripts. Without them, send a request to the API." }
        }
    }
}

/// What a run that waits is waiting for.
pub fn waiting_for(run: &Run) -> Option<String> {
    let waiting_for = run
        .waiting_for
        .as_ref()
        .filter(|_| !run.status.is_terminal())?;
    let name = serde_json::to_value(waiting_for).ok()?;
    Some(format!("for {}", name.as_str()?.replace('_', " ")))
}

/// A text in its own box, cut if it is very long.
pub fn text_block(text: &str) -> Markup {
    boxed("text", text)
}

fn boxed(class: &str, text: &str) -> Markup {
    let shown = truncate_to_bytes(text, MAX_TEXT_BYTES);
    html! {
        pre class=(class) data-source tabindex="0" { (format::prose(shown)) }
        @if shown.len() < text.len() {
            p.muted.small { "The first " (MAX_TEXT_BYTES / 1024) " KiB of " (text.len() / 1024) " KiB." }
        }
    }
}

/// The content of a user message: its texts, its pictures, the names of its files.
pub fn message(request: &ConsoleRequest, run: RunId, content: &Content) -> Markup {
    let Some(parts) = content.parts() else {
        return text_block(&content.to_plain_text());
    };
    let texts = parts.iter().filter(|part| part.attachment().is_none());
    let texts: Vec<_> = texts.map(Part::to_plain_text).collect();
    html! {
        @if !texts.is_empty() { (text_block(&texts.join("\n\n"))) }
        @for attachment in content.attachments() { (attached(request, run, attachment)) }
    }
}

/// A picture, or the name of a file, that is recorded of this run.
pub fn attached(request: &ConsoleRequest, run: RunId, attachment: &Attachment) -> Markup {
    let name = attachment.name.as_deref();
    let kind = attachment.media_type;
    let about = format!("{kind}, {}", format::bytes(attachment.bytes));
    let href = format!("{}/pictures/{}", request.run_href(run), attachment.sha256);
    // A browser does not send the key with a picture: the script does.
    let (direct, by_script) = match request.shell.has_keys() {
        true => (None, Some(href)),
        false => (Some(href), None),
    };
    html! {
        figure.attached {
            @if kind.is_image() { img src=[direct] data-picture=[by_script] alt=(name.unwrap_or("Picture")) loading="lazy"; }
            figcaption.muted.small { @if let Some(name) = name { (name) ", " } (about) }
        }
    }
}

/// JSON in its own box.
pub fn json_block(json: &str) -> Markup {
    boxed("text json", &format::pretty_json(json))
}

/// Names and values.
pub fn facts(facts: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
        }
    }
}

pub fn text(text: impl std::fmt::Display) -> Markup {
    html! { (text.to_string()) }
}

/// The link to the next page of a list.
pub fn next_page(href: Option<String>) -> Markup {
    html! {
        @if let Some(href) = href {
            nav.pages aria-label="Pages" { a.button href=(href) rel="next" { "Older" } }
        }
    }
}

/// A message in place of an empty list.
pub fn empty(title: &str, hint: &str) -> Markup {
    html! { div.empty { h2 { (title) } p { (hint) } } }
}

/// As [`empty`], with a command that helps.
pub fn empty_with(title: &str, hint: &str, command: &str) -> Markup {
    html! {
        section.empty {
            h2 { (title) }
            p { (hint) }
            p.command {
                code data-source { (command) }
                button.quiet.needs-scripts type="button" data-copy aria-label="Copy the command" { "Copy" }
            }
        }
    }
}

/// A query string; pairs with an empty value are left out.
pub fn query_string(pairs: &[(&str, &str)]) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        query.append_pair(name, value);
    }
    query.finish()
}
