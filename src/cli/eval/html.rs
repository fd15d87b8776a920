//! The result of an evaluation as one page for a browser, which needs no other file and has no script.

use std::fmt::Write;

use serde_json::Value;

use crate::cli::eval::report::{EvalReport, short, signed};
use crate::cli::test::junit::escape;
use crate::domain::counted::counted;
use crate::domain::evaluation::ScorerResult;

/// The size of the drawing of an interval.
const WIDTH: f64 = 220.0;
const HEIGHT: f64 = 22.0;

const STYLE: &str = "
:root { color-scheme: light dark; --line: #8888; --good: #1a7f4b; --bad: #c0392b; --even: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.held, .good { color: var(--good); } .fell, .bad { color: var(--bad); }
code { font-size: .9em; overflow-wrap: anywhere; }
svg { display: block; }
.axis { stroke: var(--line); } .interval { stroke-width: 3; } .interval.good { stroke: var(--good); }
.interval.bad { stroke: var(--bad); } .interval.even { stroke: var(--even); }
circle.good { fill: var(--good); } circle.bad { fill: var(--bad); } circle.even { fill: var(--even); }
.scroll { overflow-x: auto; }
";

pub fn to_html(report: &EvalReport) -> String {
    let agent = escape(report.text("agent"));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Evaluation of {agent}</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>Evaluation of {agent}</h1>\n"
    );
    write_summary(&mut page, report);
    write_gates(&mut page, report);
    write_scorers(&mut page, report);
    write_amounts(&mut page, report);
    write_flipped(&mut page, report);
    write_cases(&mut page, report);
    page.push_str("</body>\n</html>\n");
    page
}

// Writing to a string cannot fail: results of `write!` are dropped below.

fn write_summary(page: &mut String, report: &EvalReport) {
    let _ = write!(
        page,
        "<p>{} <b>{}</b>",
        escape(report.text("id")),
        report.state.as_str()
    );
    if !report.text("reason").is_empty() {
        let _ = write!(page, ": {}", escape(report.text("reason")));
    }
    let _ = writeln!(page, "<br>{}</p>", escape(report.text("created_at")));
    let versions = [
        ("New version", report.version(0)),
        ("Old version", report.version(1)),
    ];
    for (title, version) in versions {
        if let Some(version) = version {
            let _ = writeln!(page, "<p>{title}: <code>{}</code></p>", escape(&version));
        }
    }
    let cases = counted(report.result.totals.cases, "case");
    let dataset = match report.text("dataset") {
        "" => String::new(),
        name => format!(" of dataset {}", escape(name)),
    };
    let _ = writeln!(
        page,
        "<p>{cases}{dataset} counted: those that ended well in each version.</p>"
    );
}

fn write_gates(page: &mut String, report: &EvalReport) {
    if report.result.gates.is_empty() {
        return;
    }
    page.push_str("<h2>Gates</h2>\n<table>\n");
    for gate in &report.result.gates {
        let verdict = if gate.held { "held" } else { "fell" };
        let _ = writeln!(
            page,
            "<tr><td class=\"{verdict}\">{verdict}</td><td><code>{}</code></td><td>{}</td></tr>",
            escape(&gate.gate),
            escape(&gate.why)
        );
    }
    page.push_str("</table>\n");
}

fn write_scorers(page: &mut String, report: &EvalReport) {
    let scorers = &report.result.scorers;
    if scorers.is_empty() {
        return;
    }
    let has_old = report.result.against.is_some();
    page.push_str("<h2>Scorers</h2>\n<div class=\"scroll\"><table>\n<tr><th>Scorer</th><th class=\"n\">n</th><th class=\"n\">New</th>");
    if has_old {
        page.push_str(
            "<th class=\"n\">Old</th><th class=\"n\">Difference</th><th>95 % interval</th><th class=\"n\">p</th>\
             <th>Wins / losses / ties</th>",
        );
    }
    page.push_str("</tr>\n");
    // All drawings have one scale.
    let ends = scorers
        .values()
        .flat_map(|it| [it.comparison.low, it.comparison.high]);
    let reach = ends
        .flatten()
        .fold(0.0, |reach: f64, end| reach.max(end.abs()));
    for (name, scorer) in scorers {
        write_scorer(page, name, scorer, has_old.then_some(reach));
    }
    page.push_str("</table></div>\n");
    for (name, scorer) in scorers {
        if let Some(needed) = scorer.comparison.needed {
            let needed = counted(needed, "case");
            let _ = writeln!(
                page,
                "<p>{}: this difference would show with {needed}.</p>",
                escape(name)
            );
        }
        for (label, counts) in &scorer.labels {
            let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
            let counts = counts.join(" new, ");
            let _ = writeln!(
                page,
                "<p>{} = {}: {counts}</p>",
                escape(name),
                escape(label)
            );
        }
        for (why, count) in &scorer.errors {
            let _ = writeln!(
                page,
                "<p class=\"bad\">{}: no score of {count}: {}</p>",
                escape(name),
                escape(why)
            );
        }
    }
}

fn write_scorer(page: &mut String, name: &str, scorer: &ScorerResult, reach: Option<f64>) {
    let comparison = &scorer.comparison;
    let mean = |index: usize| {
        let mean = scorer.versions.get(index).and_then(|version| version.mean);
        mean.map_or_else(|| "–".to_owned(), short)
    };
    let _ = write!(
        page,
        "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>",
        escape(name),
        comparison.n,
        mean(0)
    );
    if let Some(reach) = reach {
        let difference = comparison.difference.map_or_else(|| "–".to_owned(), signed);
        let p = comparison.p.map_or_else(|| "–".to_owned(), short);
        let _ = write!(
            page,
            "<td class=\"n\">{}</td><td class=\"n\">{difference}</td><td>{}</td><td class=\"n\">{p}</td><td>{} / {} / {}</td>",
            mean(1),
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
    let class = match () {
        () if low > 0.0 => "good",
        () if high < 0.0 => "bad",
        () => "even",
    };
    let text = format!("from {} to {}", signed(low), signed(high));
    format!(
        "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"{text}\"><title>{text}</title>\
         <line class=\"axis\" x1=\"{half}\" y1=\"0\" x2=\"{half}\" y2=\"{HEIGHT}\"/>\
         <line class=\"interval {class}\" x1=\"{:.1}\" y1=\"{middle}\" x2=\"{:.1}\" y2=\"{middle}\"/>\
         <circle class=\"{class}\" cx=\"{:.1}\" cy=\"{middle}\" r=\"4\"/></svg>",
        at(low),
        at(high),
        at(difference)
    )
}

fn write_amounts(page: &mut String, report: &EvalReport) {
    let has_old = report.result.against.is_some();
    page.push_str("<h2>What it takes</h2>\n<table>\n<tr><th></th><th class=\"n\">New</th>");
    if has_old {
        page.push_str("<th class=\"n\">Old</th><th class=\"n\">Change</th>");
    }
    page.push_str("</tr>\n");
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
    page.push_str("</table>\n");
}

fn write_flipped(page: &mut String, report: &EvalReport) {
    if report.result.flipped.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Flipped cases</h2>\n<table>\n<tr><th>Case</th><th>Scorers</th><th>Runs</th></tr>\n",
    );
    for case in &report.result.flipped {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td><code>axed runs diff {} {}</code></td></tr>",
            escape(&case.case),
            escape(&case.scorers.join(", ")),
            case.a,
            case.b
        );
    }
    page.push_str("</table>\n");
}

fn write_cases(page: &mut String, report: &EvalReport) {
    if report.cases.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Cases</h2>\n<div class=\"scroll\"><table>\n<tr><th>Case</th><th>Version</th><th>End</th><th>Scores</th>\
         <th class=\"n\">Seconds</th><th>Run</th></tr>\n",
    );
    for case in &report.cases {
        let runs = case["runs"].as_array();
        for run in runs.into_iter().flatten() {
            let version = match run["version"].as_u64() {
                Some(0) => "new",
                _ => "old",
            };
            let seconds = run["duration_ms"].as_f64();
            let seconds = seconds.map_or_else(String::new, |it| short(it / 1e3));
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td>{version}</td><td>{}</td><td>{}</td><td class=\"n\">{seconds}</td><td><code>{}</code></td></tr>",
                escape(case["case"].as_str().unwrap_or_default()),
                escape(&ending(run)),
                escape(&scores(&run["scores"])),
                escape(run["run_id"].as_str().unwrap_or_default())
            );
        }
    }
    page.push_str("</table></div>\n");
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
        assert!(drawing.contains("interval even"));
        assert!(interval(&scorer(0.1, 0.3), 0.3).contains("interval good"));
        assert!(interval(&ScorerResult::default(), 0.0).contains('–'));
    }
}
