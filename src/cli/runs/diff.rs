//! `axed runs diff`: how two runs differ.

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use crate::cli::age::seconds;
use crate::cli::output::{self, FormatArgs};
use crate::cli::runs::view::UNKNOWN_RUN_FORMAT;
use crate::cli::server::DaemonArgs;
use crate::cli::style::{Color, Styled};
use crate::cli::table;
use crate::domain::counted::counted;
use crate::domain::run_ref::RunRef;

/// Lines of a text that are shown; the others are counted.
const MAX_LINES: usize = 12;
/// The width of lines that are not for a terminal.
const USUAL_WIDTH: usize = 80;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Compares two runs and those below them, by the calls that led to each. Lines
with - are of A, lines with + of B.

Examples:
  axed runs diff run_019a2b3c run_019a2b3d
  axed runs diff run_019a2b3c run_019a2b3d -o json | jq .totals"
)]
pub struct Diff {
    /// Id of a run, or its first or last digits
    #[arg(value_name = "A")]
    a: RunRef,
    /// Id of the other run, or its first or last digits
    #[arg(value_name = "B")]
    b: RunRef,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

#[derive(Deserialize)]
struct RunDiff {
    nodes: Vec<Node>,
    totals: Totals,
    #[serde(default)]
    truncated: bool,
}

#[derive(Deserialize)]
struct Node {
    path: String,
    a: Option<String>,
    b: Option<String>,
    changes: Vec<Change>,
    turns: Vec<Turn>,
}

#[derive(Deserialize)]
struct Turn {
    turn: u32,
    changes: Vec<Change>,
}

#[derive(Deserialize)]
struct Change {
    field: String,
    a: Value,
    b: Value,
}

#[derive(Deserialize)]
struct Totals {
    a: TreeTotals,
    b: TreeTotals,
}

#[derive(Deserialize)]
struct TreeTotals {
    runs: u64,
    model_calls: u64,
    tool_calls: u64,
    input_tokens: u64,
    output_tokens: u64,
    cost_usd: Option<f64>,
    duration_ms: u64,
}

pub async fn diff(args: &Diff) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let (a, b) = (
        client.find_run(&args.a).await?,
        client.find_run(&args.b).await?,
    );
    let diff = client.diff(&a, &b).await?;
    if args.format.is_json() {
        return output::print_json(&diff);
    }
    let diff: RunDiff = serde_json::from_value(diff).context(UNKNOWN_RUN_FORMAT)?;
    print(&diff)
}

fn print(diff: &RunDiff) -> anyhow::Result<()> {
    for node in &diff.nodes {
        print_node(node)?;
    }
    if diff.truncated {
        output::print_line(format_args!("There are more differences than these."))?;
    }
    print_totals('-', Color::Red, &diff.totals.a)?;
    print_totals('+', Color::Green, &diff.totals.b)
}

fn print_node(node: &Node) -> anyhow::Result<()> {
    let turns = node.turns.iter().map(ShownTurn::new);
    let turns: Vec<ShownTurn<'_>> = turns.filter(|turn| !turn.is_empty()).collect();
    let note = match (&node.a, &node.b) {
        (Some(_), None) => "  only in A",
        (None, Some(_)) => "  only in B",
        (Some(a), Some(b)) if a == b => "  the same run",
        _ if node.changes.is_empty() && turns.is_empty() => "  equal",
        _ => "",
    };
    let path = Styled::default().colored(Color::Cyan, cut(&node.path, note.len()));
    output::print_styled(&path.colored(Color::Dim, note))?;
    for change in &node.changes {
        print_change(change)?;
    }
    for turn in &turns {
        print_turn(turn)?;
    }
    Ok(())
}

/// The changes of a turn that can be seen when they are printed.
struct ShownTurn<'a> {
    turn: u32,
    numbers: Vec<String>,
    texts: Vec<&'a Change>,
}

impl<'a> ShownTurn<'a> {
    fn new(turn: &'a Turn) -> Self {
        let (numbers, texts): (Vec<&Change>, Vec<&Change>) = turn
            .changes
            .iter()
            .partition(|change| change.a.is_number() || change.b.is_number());
        let numbers = numbers.into_iter().filter_map(describe_numbers);
        Self {
            turn: turn.turn,
            numbers: numbers.collect(),
            texts,
        }
    }

    fn is_empty(&self) -> bool {
        self.numbers.is_empty() && self.texts.is_empty()
    }
}

fn print_turn(turn: &ShownTurn<'_>) -> anyhow::Result<()> {
    let line = Styled::default().plain(format!("  turn {}", turn.turn));
    output::print_styled(&line)?;
    if !turn.numbers.is_empty() {
        let numbers = format!("    {}", turn.numbers.join(", "));
        output::print_styled(&Styled::default().colored(Color::Dim, numbers))?;
    }
    for change in &turn.texts {
        print_change(change)?;
    }
    Ok(())
}

/// `in 120 → 90`; `None` if both are printed alike, such as times that differ by milliseconds.
fn describe_numbers(change: &Change) -> Option<String> {
    let show = |value: &Value| match (value, change.field.as_str()) {
        (Value::Null, _) => "none".to_owned(),
        (value, "duration_ms") => seconds(value.as_u64().unwrap_or(0)),
        (value, _) => value.to_string(),
    };
    let name = match change.field.as_str() {
        "input_tokens" => "in",
        "output_tokens" => "out",
        "cost_usd" => "USD",
        "duration_ms" => "time",
        field => field,
    };
    let (a, b) = (show(&change.a), show(&change.b));
    (a != b).then(|| format!("{name} {a} → {b}"))
}

fn print_change(change: &Change) -> anyhow::Result<()> {
    let field = Styled::default().plain(format!("    {}", change.field));
    output::print_styled(&field)?;
    let (a, b) = (lines(&change.a), lines(&change.b));
    let prefix = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[prefix..], &b[prefix..]);
    let suffix = a.iter().rev().zip(b.iter().rev());
    let suffix = suffix.take_while(|(a, b)| a == b).count();
    print_lines('-', Color::Red, &a[..a.len() - suffix])?;
    print_lines('+', Color::Green, &b[..b.len() - suffix])
}

/// The lines of a text, or of another value as JSON; none for null.
fn lines(value: &Value) -> Vec<String> {
    match value {
        Value::Null => Vec::new(),
        Value::String(text) => text.lines().map(str::to_owned).collect(),
        value => vec![value.to_string()],
    }
}

fn print_lines(sign: char, color: Color, lines: &[String]) -> anyhow::Result<()> {
    for line in lines.iter().take(MAX_LINES) {
        let line = format!("    {sign} {}", cut(line, 6));
        output::print_styled(&Styled::default().colored(color, line))?;
    }
    let more = lines.len().saturating_sub(MAX_LINES);
    if more > 0 {
        let line = format!(
            "    {sign} … {}; -o json has all",
            counted(more, "more line")
        );
        output::print_styled(&Styled::default().colored(color, line))?;
    }
    Ok(())
}

/// The beginning of a line that fits beside this many columns on a terminal. On a pipe, the whole line.
fn cut(line: &str, other_columns: usize) -> String {
    if !table::is_for_terminal() {
        return line.to_owned();
    }
    let width = output::stdout_width().map_or(USUAL_WIDTH, usize::from);
    let max = width.saturating_sub(other_columns).max(20);
    match line.char_indices().nth(max) {
        Some(_) => line.chars().take(max - 1).chain(['…']).collect(),
        None => line.to_owned(),
    }
}

fn print_totals(sign: char, color: Color, totals: &TreeTotals) -> anyhow::Result<()> {
    let cost = totals.cost_usd.map(|usd| format!(", {usd} USD"));
    let line = format!(
        "{sign} {}, {}, {}, {} in, {} out{}, {}",
        counted(totals.runs, "run"),
        counted(totals.model_calls, "reply"),
        counted(totals.tool_calls, "tool call"),
        totals.input_tokens,
        totals.output_tokens,
        cost.unwrap_or_default(),
        seconds(totals.duration_ms)
    );
    output::print_styled(&Styled::default().colored(color, line))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Change, ShownTurn, Turn};

    fn change(field: &str, a: Value, b: Value) -> Change {
        Change {
            field: field.to_owned(),
            a,
            b,
        }
    }

    #[test]
    fn numbers_that_look_alike_are_left_out() {
        let time = || change("duration_ms", json!(12), json!(14));
        let tokens = change("input_tokens", json!(120), json!(90));
        let turn = |changes| Turn { turn: 1, changes };
        assert!(ShownTurn::new(&turn(vec![time()])).is_empty());
        let some = turn(vec![time(), tokens]);
        assert_eq!(ShownTurn::new(&some).numbers, ["in 120 → 90"]);
        let text = turn(vec![time(), change("content", json!("a"), json!("b"))]);
        let shown = ShownTurn::new(&text);
        assert!(!shown.is_empty() && shown.numbers.is_empty());
    }
}
