//! The result of an evaluation as tables for a terminal.

use crate::cli::eval::report::{EvalReport, short, signed};
use crate::cli::output;
use crate::cli::table::{Cell, Column, Table};
use crate::domain::counted::counted;
use crate::domain::evaluation::{EvalState, ScorerResult};

/// Cases that are named.
const MAX_FLIPPED: usize = 10;

pub fn print(report: &EvalReport) -> anyhow::Result<()> {
    let has_old = report.result.against.is_some();
    if report.state != EvalState::Completed {
        let reason = report.text("reason");
        output::print_line(format_args!("{}: {reason}", report.state.as_str()))?;
    }
    if let Some(new) = report.version(0) {
        output::print_line(format_args!("new  {new}"))?;
    }
    if let Some(old) = report.version(1) {
        output::print_line(format_args!("old  {old}"))?;
    }
    output::print_line(format_args!(
        "{} counted\n",
        counted(report.result.totals.cases, "case")
    ))?;
    print_scorers(report, has_old)?;
    print_amounts(report, has_old)?;
    print_gates(report)?;
    print_flipped(report)
}

fn print_scorers(report: &EvalReport, has_old: bool) -> anyhow::Result<()> {
    if report.result.scorers.is_empty() {
        return Ok(());
    }
    let mut columns = vec![
        Column::flexible("scorer"),
        Column::number("n"),
        Column::number("new"),
    ];
    if has_old {
        columns.extend(["old", "diff", "low", "high", "p", "W/L/T"].map(Column::number));
    }
    let mut table = Table::new(columns).keep_rows();
    for (name, scorer) in &report.result.scorers {
        table.row(scorer_cells(name, scorer, has_old));
    }
    table.print()?;
    for (name, scorer) in &report.result.scorers {
        let comparison = &scorer.comparison;
        if let Some(needed) = comparison.needed {
            let cases = counted(needed, "case");
            output::print_line(format_args!(
                "{name}: this difference would show with {cases}"
            ))?;
        }
        for (label, counts) in &scorer.labels {
            let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
            output::print_line(format_args!("{name} = {label}: {}", counts.join(" new, ")))?;
        }
        for (why, count) in &scorer.errors {
            output::print_line(format_args!("{name}: no score of {count}: {why}"))?;
        }
    }
    output::print_line(format_args!(""))
}

fn scorer_cells(name: &str, scorer: &ScorerResult, has_old: bool) -> Vec<Cell> {
    let comparison = &scorer.comparison;
    let mean = |index: usize| {
        let mean = scorer.versions.get(index).and_then(|version| version.mean);
        Cell::new(mean.map_or_else(|| "-".to_owned(), short))
    };
    let difference = |number: Option<f64>| Cell::new(number.map_or_else(|| "-".to_owned(), signed));
    let mut cells = vec![Cell::new(name), Cell::new(comparison.n), mean(0)];
    if has_old {
        let p = comparison.p.map_or_else(|| "-".to_owned(), short);
        let counts = format!(
            "{}/{}/{}",
            comparison.wins, comparison.losses, comparison.ties
        );
        cells.extend([
            mean(1),
            difference(comparison.difference),
            difference(comparison.low),
            difference(comparison.high),
            Cell::new(p),
            Cell::new(counts),
        ]);
    }
    cells
}

fn print_amounts(report: &EvalReport, has_old: bool) -> anyhow::Result<()> {
    let mut columns = vec![Column::text("measure"), Column::number("new")];
    if has_old {
        columns.extend(["old", "change"].map(Column::number));
    }
    let mut table = Table::new(columns);
    for amount in report.amounts() {
        let mut cells = vec![Cell::new(amount.name), Cell::new(amount.new)];
        if has_old {
            cells.extend([Cell::new(amount.old), Cell::new(amount.change)]);
        }
        table.row(cells);
    }
    table.print()?;
    for (version, totals) in [
        ("new", Some(&report.result.totals)),
        ("old", report.result.against.as_ref()),
    ] {
        let errors = totals.iter().flat_map(|totals| &totals.errors);
        for (code, count) in errors {
            output::print_line(format_args!(
                "{version}: {} failed with {code}",
                counted(*count, "run")
            ))?;
        }
    }
    Ok(())
}

fn print_gates(report: &EvalReport) -> anyhow::Result<()> {
    if !report.result.gates.is_empty() {
        output::print_line(format_args!(""))?;
    }
    for gate in &report.result.gates {
        let verdict = if gate.held { "held" } else { "fell" };
        output::print_line(format_args!("{verdict}  {}: {}", gate.gate, gate.why))?;
    }
    Ok(())
}

fn print_flipped(report: &EvalReport) -> anyhow::Result<()> {
    let flipped = &report.result.flipped;
    if flipped.is_empty() {
        return Ok(());
    }
    output::print_line(format_args!(
        "\n{} flipped",
        counted(flipped.len() as u64, "case")
    ))?;
    for case in flipped.iter().take(MAX_FLIPPED) {
        let scorers = case.scorers.join(", ");
        output::print_line(format_args!("{} ({scorers})", case.case))?;
        output::print_line(format_args!("  axed runs diff {} {}", case.a, case.b))?;
    }
    Ok(())
}
