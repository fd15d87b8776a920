//! The result of an evaluation as one page for a browser, which needs no other file and has no script.

use std::fmt::Write;

use serde_json::Value;

use crate::cli::eval::report::{EvalReport, short, signed};
use crate::cli::test::junit::escape;
use crate::domain::comparison::Comparison;
use crate::domain::counted::counted;
use crate::domain::evaluation::{FlippedCase, ScorerResult};
use crate::domain::run_ref::ShortIds;
use crate::web::console::interval::reach_of;

/// The size of the drawing of an interval.
const WIDTH: f64 = 220.0;
const HEIGHT: f64 = 22.0;

/// Flipped cases that are shown at once; the others unfold.
const MAX_FLIPPED: usize = 25;

/// The look of the console.
const STYLE: &str = "
:root { color-scheme: light dark; --bg: #fafaf8; --panel: #fff; --sunken: #f3f3f0; --line: #e4e4df; --zero: #a9a9a1; --text: #1f2328;
  --muted: #656b73; --good: #166f41; --good-soft: #e2f3e9; --bad: #b42318; --bad-soft: #fbe7e5; }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --panel: #1b1e23; --sunken: #17191d; --line: #2b2f36; --zero: #6b727c;
  --text: #e6e8eb; --muted: #98a0aa; --good: #63cf98; --good-soft: #16301f; --bad: #ff8f84; --bad-soft: #3a1b19; } }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; background: var(--bg); color: var(--text); }
h1 { font-size: 21px; margin: 0 0 .5rem; } h2 { font-size: 15px; margin: 2rem 0 .6rem; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: 0 0 1rem; }
dt { font-size: 12px; color: var(--muted); } dd { margin: 0; }
table { border-collapse: separate; border-spacing: 0; width: 100%; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-size: 12px; font-weight: 520; color: var(--muted); background: var(--sunken); white-space: nowrap; }
tr:last-child > td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.case { min-width: 8rem; overflow-wrap: anywhere; }
code { font-size: 12.5px; white-space: nowrap; }
.note { color: var(--muted); font-size: 12.5px; } td .note { display: block; }
.good { color: var(--good); } .bad { color: var(--bad); }
.badge { font-size: 12px; font-weight: 540; border-radius: 20px; padding: 1px 9px; background: var(--sunken); white-space: nowrap; }
.badge.held, .badge.completed { color: var(--good); background: var(--good-soft); }
.badge.fell, .badge.failed { color: var(--bad); background: var(--bad-soft); }
summary { cursor: pointer; margin: .6rem 0; color: var(--muted); }
svg { display: block; color: var(--muted); } svg.good { color: var(--good); } svg.bad { color: var(--bad); }
.axis { stroke: var(--zero); } .interval { stroke: currentColor; stroke-width: 2; stroke-linecap: round; } circle { fill: currentColor; }
.scroll { overflow-x: auto; }
@media print { body { max-width: none; padding: 0; } }
";

pub fn to_html(report: &EvalReport) -> String {
    let agent = escape(report.text("agent"));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Evaluation of {agent}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Evaluation of {agent}</h1>\n"
    );
    write_summary(&mut page, report);
    write_gates(&mut page, report);
    write_scorers(&mut page, report);
    write_amounts(&mut page, report);
    write_flipped(&mut page, report);
    write_cases(&mut page, report);
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

// Writing to a string cannot fail: results of `write!` are dropped below.

fn write_summary(page: &mut String, report: &EvalReport) {
    let state = report.state.as_str();
    page.push_str("<dl>");
    let mut fact = |name: &str, value: &str| {
        let _ = write!(page, "<div><dt>{name}</dt><dd>{value}</dd></div>");
    };
    fact(
        "State",
        &format!("<span class=\"badge {state}\">{state}</span>"),
    );
    if report.result.against.is_none() {
        fact("Version", &version(report, 0));
    } else {
        fact("New version", &version(report, 0));
        fact("Old version", &version(report, 1));
    }
    let dataset = report.text("dataset");
    if !dataset.is_empty() {
        fact("Dataset", &escape(dataset));
    }
    fact("Cases that count", &report.result.totals.cases.to_string());
    if let Some(spent) = report.eval["spent_usd"].as_f64() {
        fact("Spent", &format!("{} USD", short(spent)));
    }
    let created_at = report.text("created_at");
    fact(
        "Accepted",
        &escape(created_at.split('.').next().unwrap_or_default()).replace('T', " "),
    );
    fact(
        "Evaluation",
        &format!("<code>{}</code>", escape(report.text("id"))),
    );
    page.push_str("</dl>\n");
    if !report.text("reason").is_empty() {
        let _ = writeln!(
            page,
            "<p class=\"bad\">{}</p>",
            escape(report.text("reason"))
        );
    }
}

/// Opens a table that scrolls by itself, also with keys.
fn open_table(page: &mut String, name: &str) {
    let _ = writeln!(
        page,
        "<div class=\"scroll\" role=\"region\" aria-label=\"{name}\" tabindex=\"0\"><table>"
    );
}

fn version(report: &EvalReport, index: usize) -> String {
    let version = report.version(index).unwrap_or_default();
    format!("<code>{}</code>", escape(&version))
}

fn write_gates(page: &mut String, report: &EvalReport) {
    if report.result.gates.is_empty() {
        return;
    }
    page.push_str("<h2>Gates</h2>\n");
    open_table(page, "Gates");
    page.push_str("<tr><th>Gate</th><th>Verdict</th><th>Why</th></tr>\n");
    for gate in &report.result.gates {
        let verdict = if gate.held { "held" } else { "fell" };
        let _ = writeln!(
            page,
            "<tr><td><code>{}</code></td><td><span class=\"badge {verdict}\">{verdict}</span></td><td>{}</td></tr>",
            escape(&gate.gate),
            escape(&gate.why)
        );
    }
    page.push_str("</table></div>\n");
}

fn write_scorers(page: &mut String, report: &EvalReport) {
    let scorers = &report.result.scorers;
    if scorers.is_empty() {
        return;
    }
    let has_old = report.result.against.is_some();
    page.push_str("<h2>Scores</h2>\n");
    open_table(page, "Scores");
    page.push_str("<tr><th>Scorer</th><th class=\"n\">Cases</th>");
    if has_old {
        page.push_str(
            "<th class=\"n\">New mean</th><th class=\"n\">Old mean</th><th class=\"n\">Difference</th>\
             <th>95 % interval of the difference</th><th class=\"n\">Better / worse / same</th><th class=\"n\">p</th>",
        );
    } else {
        page.push_str("<th class=\"n\">Mean</th>");
    }
    page.push_str("</tr>\n");
    let all: Vec<&Comparison> = scorers.values().map(|it| &it.comparison).collect();
    for (name, scorer) in scorers {
        let reach = reach_of(&scorer.comparison, &all);
        write_scorer(page, name, scorer, has_old.then_some(reach));
    }
    page.push_str("</table></div>\n");
    if has_old {
        page.push_str("<p class=\"note\">An interval in color does not contain zero: the difference is hardly chance.</p>\n");
    }
}

/// How many cases it would take, how often each label was given, and why there is no score.
fn notes(scorer: &ScorerResult) -> String {
    let mut notes = String::new();
    let mut note = |class: &str, text: String| {
        let _ = write!(
            notes,
            "<span class=\"note{class}\">{}</span>",
            escape(&text)
        );
    };
    if let Some(needed) = scorer.comparison.needed {
        let needed = counted(needed, "case");
        note("", format!("This difference would show with {needed}."));
    }
    for (label, counts) in &scorer.labels {
        let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
        let old = if counts.len() > 1 { " old" } else { "" };
        note("", format!("{label}: {}{old}", counts.join(" new, ")));
    }
    for (why, count) in &scorer.errors {
        let runs = counted(*count, "run");
        note(" bad", format!("No score of {runs}: {why}"));
    }
    notes
}

fn write_scorer(page: &mut String, name: &str, scorer: &ScorerResult, reach: Option<f64>) {
    let comparison = &scorer.comparison;
    let mean = |index: usize| {
        let mean = scorer.versions.get(index).and_then(|version| version.mean);
        mean.map_or_else(|| "–".to_owned(), short)
    };
    let _ = write!(
        page,
        "<tr><td class=\"case\"><b>{}</b>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>",
        escape(name),
        notes(scorer),
        comparison.n,
        mean(0)
    );
    if let Some(reach) = reach {
        let difference = comparison.difference.map_or_else(|| "–".to_owned(), signed);
        let p = comparison.p.map_or_else(|| "–".to_owned(), short);
        let _ = write!(
            page,
            "<td class=\"n\">{}</td><td class=\"n\"><b class=\"{}\">{difference}</b></td><td>{}</td>\
             <td class=\"n\">{} / {} / {}</td><td class=\"n\">{p}</td>",
            mean(1),
            verdict(comparison),
            interval(scorer, reach),
            comparison.wins,
            comparison.losses,
            comparison.ties
        );
    }
    page.push_str("</tr>\n");
}

/// The interval of the difference as a line, with zero in the middle.
fn interval(scorer: &ScorerResult, reach: f64) -> String {
    let comparison = &scorer.comparison;
    let (Some(difference), Some(low), Some(high)) =
        (comparison.difference, comparison.low, comparison.high)
    else {
        return "–".to_owned();
    };
    let (middle, half) = (HEIGHT / 2.0, WIDTH / 2.0);
    let at = |value: f64| match reach > 0.0 {
        true => half + value / reach * (half - 6.0),
        false => half,
    };
    let class = verdict(comparison);
    let text = format!("from {} to {}", signed(low), signed(high));
    format!(
        "<svg class=\"{class}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"{text}\"><title>{text}</title>\
         <line class=\"axis\" x1=\"{half}\" y1=\"0\" x2=\"{half}\" y2=\"{HEIGHT}\"/>\
         <line class=\"interval\" x1=\"{:.1}\" y1=\"{middle}\" x2=\"{:.1}\" y2=\"{middle}\"/>\
         <circle cx=\"{:.1}\" cy=\"{middle}\" r=\"4.5\"/></svg>",
        at(low),
        at(high),
        at(difference)
    )
}

/// In color only where the interval excludes zero.
fn verdict(comparison: &Comparison) -> &'static str {
    match (comparison.low, comparison.high) {
        (Some(low), _) if low > 0.0 => "good",
        (_, Some(high)) if high < 0.0 => "bad",
        _ => "even",
    }
}

fn write_amounts(page: &mut String, report: &EvalReport) {
    let has_old = report.result.against.is_some();
    page.push_str("<h2>What it takes</h2>\n");
    open_table(page, "Amounts");
    page.push_str("<tr><th>Amount</th>");
    page.push_str(match has_old {
        true => {
            "<th class=\"n\">New</th><th class=\"n\">Old</th><th class=\"n\">Change</th></tr>\n"
        }
        false => "<th class=\"n\">Sum</th></tr>\n",
    });
    for amount in report.amounts() {
        let _ = write!(
            page,
            "<tr><td>{}</td><td class=\"n\">{}</td>",
            amount.name, amount.new
        );
        if has_old {
            let _ = write!(
                page,
                "<td class=\"n\">{}</td><td class=\"n\">{}</td>",
                amount.old, amount.change
            );
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

fn write_flipped(page: &mut String, report: &EvalReport) {
    let flipped = &report.result.flipped;
    if flipped.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Flipped cases</h2>\n<p class=\"note\">They pass in one version only, or have another label. The command compares \
         their runs.</p>\n",
    );
    let (first, others) = flipped.split_at(flipped.len().min(MAX_FLIPPED));
    write_flipped_table(page, "Flipped cases", first);
    if !others.is_empty() {
        let count = counted(others.len(), "more flipped case");
        let _ = writeln!(page, "<details><summary>{count}</summary>");
        write_flipped_table(page, "More flipped cases", others);
        page.push_str("</details>\n");
    }
}

fn write_flipped_table(page: &mut String, name: &str, cases: &[FlippedCase]) {
    open_table(page, name);
    page.push_str("<tr><th>Case</th><th>Scorers</th><th>Runs</th></tr>\n");
    let ids = ShortIds::new(cases.iter().flat_map(|case| [case.a, case.b]));
    for case in cases {
        let _ = writeln!(
            page,
            "<tr><td class=\"case\">{}</td><td>{}</td><td><code title=\"{} {}\">axed runs diff {} {}</code></td></tr>",
            escape(&case.case),
            escape(&case.scorers.join(", ")),
            case.a,
            case.b,
            ids.short(case.a),
            ids.short(case.b)
        );
    }
    page.push_str("</table></div>\n");
}

fn write_cases(page: &mut String, report: &EvalReport) {
    if report.cases.is_empty() {
        return;
    }
    let count = counted(report.cases.len(), "case");
    let _ = writeln!(
        page,
        "<h2>Cases</h2>\n<details><summary>{count} with their runs</summary>"
    );
    open_table(page, "Cases");
    page.push_str(
        "<tr><th>Case</th><th>Version</th><th>End</th><th>Scores</th><th class=\"n\">Seconds</th><th>Run</th></tr>\n",
    );
    for case in &report.cases {
        let runs = case["runs"].as_array().map_or(&[][..], Vec::as_slice);
        for (index, run) in runs.iter().enumerate() {
            page.push_str("<tr>");
            if index == 0 {
                let name = escape(case["case"].as_str().unwrap_or_default());
                let rows = runs.len();
                let _ = write!(page, "<td class=\"case\" rowspan=\"{rows}\">{name}</td>");
            }
            let version = match run["version"].as_u64() {
                Some(0) => "new",
                _ => "old",
            };
            let seconds = run["duration_ms"].as_f64();
            let seconds = seconds.map_or_else(String::new, |it| short(it / 1e3));
            let _ = writeln!(
                page,
                "<td>{version}</td><td>{}</td><td>{}</td><td class=\"n\">{seconds}</td><td><code>{}</code></td></tr>",
                escape(&ending(run)),
                escape(&scores(&run["scores"])),
                escape(run["run_id"].as_str().unwrap_or_default())
            );
        }
    }
    page.push_str("</table></div></details>\n");
}

fn ending(run: &Value) -> String {
    let outcome = run["outcome"].as_str().unwrap_or("not ended");
    let diverged = &run["diverged"];
    match (run["error"].as_str(), diverged["tool"].as_str()) {
        (_, Some(tool)) => format!(
            "diverged: {} calls {tool} in turn {}",
            diverged["path"].as_str().unwrap_or_default(),
            diverged["turn"]
        ),
        (Some(code), None) => format!("{outcome}: {code}"),
        (None, None) => outcome.to_owned(),
    }
}

fn scores(scores: &Value) -> String {
    let scores = scores.as_object().into_iter().flatten();
    let texts = scores.map(|(name, value)| match value.as_f64() {
        Some(number) => format!("{name} {}", short(number)),
        None => format!("{name} {}", value.as_str().unwrap_or_default()),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{interval, to_html};
    use crate::cli::eval::report::EvalReport;
    use crate::domain::comparison::Comparison;
    use crate::domain::evaluation::ScorerResult;

    #[test]
    fn the_page_needs_nothing_else_and_escapes_texts() {
        let mut report = EvalReport::new(json!({
            "id": "eval_1", "agent": "a<b", "state": "stopped", "reason": "<script>", "versions": [],
            "created_at": "2026-03-01T09:30:00.000Z", "result": null,
        }))
        .expect("a report");
        report.cases = vec![
            json!({"case": "<i>", "runs": [{"version": 0, "outcome": "failed", "error": "timeout"}]}),
        ];
        let page = to_html(&report);
        assert!(page.contains("a&lt;b") && page.contains("&lt;i&gt;"));
        for forbidden in ["<script", "<i>", "http://", "https://", "src=", "@import"] {
            assert!(!page.contains(forbidden), "{forbidden}");
        }
    }

    #[test]
    fn an_interval_is_drawn_around_zero() {
        let scorer = |low: f64, high: f64| ScorerResult {
            comparison: Comparison {
                difference: Some((low + high) / 2.0),
                low: Some(low),
                high: Some(high),
                ..Comparison::default()
            },
            ..ScorerResult::default()
        };
        let drawing = interval(&scorer(-0.1, 0.3), 0.5);
        assert!(
            drawing.contains("x1=\"89.2\"") && drawing.contains("x2=\"172.4\""),
            "{drawing}"
        );
        assert!(drawing.contains("class=\"even\""));
        assert!(interval(&scorer(0.1, 0.3), 0.3).contains("class=\"good\""));
        assert!(interval(&ScorerResult::default(), 0.0).contains('–'));
    }
}
