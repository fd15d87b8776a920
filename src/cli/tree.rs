//! Prints a run's tree as a table.

use crate::cli::age::seconds;
use crate::cli::client::{TreeNode, UsageView};
use crate::cli::output;
use crate::cli::style::{Color, Styled, status_color};
use crate::cli::table::{self, Cell, Column, Table};
use crate::domain::counted::counted;
use crate::domain::message::shorten;
use crate::domain::terminal_text::sanitize_line;

/// What a tree's table shows of each run, besides its agent and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Details {
    /// For runs that nobody can look up.
    Usage,
    Ids,
    /// All there is; also on a pipe.
    Wide,
}

/// One row for each run, indented by depth, parents before children, and a row with the totals. Errors follow the table
/// if it has no column for them.
pub fn print(root: &TreeNode, details: Details) -> anyhow::Result<()> {
    let details = match details {
        Details::Ids if !table::is_for_terminal() => Details::Wide,
        details => details,
    };
    build(root, details).print()?;
    if details == Details::Wide {
        return Ok(());
    }
    for (_, run) in in_order(root) {
        if let Some(failure) = &run.error {
            let line = Styled::default().plain(format!("\n{} {}: ", run.id, name(run)));
            output::print_styled(&line.colored(Color::Red, sanitize_line(&failure.message)))?;
        }
    }
    Ok(())
}

fn build(root: &TreeNode, details: Details) -> Table {
    let mut columns = vec![Column::flexible("agent")];
    if details != Details::Usage {
        columns.push(Column::text("run"));
    }
    columns.push(Column::text("status"));
    match details {
        Details::Ids => columns.push(Column::number("tokens")),
        Details::Usage | Details::Wide => {
            columns.extend(["turns", "in", "out", "calls"].map(Column::number));
        }
    }
    columns.push(Column::number("time"));
    if details == Details::Wide {
        columns.extend(["task", "error"].map(Column::flexible));
    }
    let mut table = Table::new(columns).keep_rows();
    let mut turns = 0;
    let mut sum = UsageView::default();
    let runs = in_order(root);
    for (depth, run) in &runs {
        let mut cells = vec![Cell::new(format!("{}{}", "  ".repeat(*depth), name(run)))];
        match details {
            Details::Usage => {}
            Details::Ids => cells.push(Cell::run(run.id)),
            Details::Wide => cells.push(Cell::new(run.id)),
        }
        cells.push(Cell::new(run.status.as_str()).colored(status_color(run.status)));
        cells.extend(usage_cells(details, run.turns, run.usage, run.duration_ms));
        if details == Details::Wide {
            let error = run.error.as_ref().map(|failure| failure.message.as_str());
            cells.extend([
                Cell::new(run.task.as_deref().unwrap_or_default()),
                Cell::new(error.unwrap_or_default()).colored(Color::Red),
            ]);
        }
        table.row(cells);
        turns += run.turns;
        sum.input_tokens += run.usage.input_tokens;
        sum.output_tokens += run.usage.output_tokens;
        sum.tool_calls += run.usage.tool_calls;
    }
    let total = format!("total: {}", counted(runs.len(), "run"));
    let mut cells = vec![Cell::new(total), Cell::default()];
    if details != Details::Usage {
        cells.push(Cell::default());
    }
    cells.extend(usage_cells(details, turns, sum, root.duration_ms));
    if details == Details::Wide {
        cells.extend([Cell::default(), Cell::default()]);
    }
    table.row(cells);
    table
}

fn usage_cells(details: Details, turns: u64, usage: UsageView, duration_ms: u64) -> Vec<Cell> {
    let mut cells = match details {
        Details::Ids => vec![Cell::new(usage.input_tokens + usage.output_tokens)],
        Details::Usage | Details::Wide => vec![
            Cell::new(turns),
            Cell::new(usage.input_tokens),
            Cell::new(usage.output_tokens),
            Cell::new(usage.tool_calls),
        ],
    };
    cells.push(Cell::new(seconds(duration_ms)));
    cells
}

/// Every run with its depth below the first, parents before children.
fn in_order(root: &TreeNode) -> Vec<(usize, &TreeNode)> {
    let mut runs = Vec::new();
    let mut stack = vec![(0, root)];
    while let Some((depth, run)) = stack.pop() {
        runs.push((depth, run));
        stack.extend(run.children.iter().rev().map(|child| (depth + 1, child)));
    }
    runs
}

/// The record of an ad-hoc sub-agent has its caller's agent name, so its label names it. A model chose the label.
fn name(run: &TreeNode) -> String {
    match &run.label {
        Some(label) => format!("({})", sanitize_line(&shorten(label, 40))),
        None => sanitize_line(&run.agent),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Details, build};
    use crate::cli::client::TreeNode;

    fn run(number: u8, agent: &str, tokens: u64, children: Vec<Value>) -> Value {
        json!({
            "id": format!("run_01980000-0000-7000-8000-0000000000{number:02x}"), "agent": agent, "status": "completed",
            "turns": 2, "duration_ms": tokens + 239, "task": "look", "error": null, "children": children,
            "usage": {"input_tokens": tokens, "output_tokens": 7, "tool_calls": 1, "cost_usd": null},
        })
    }

    fn node(run: Value) -> TreeNode {
        serde_json::from_value(run).expect("a tree")
    }

    #[test]
    fn an_ad_hoc_run_is_shown_by_its_label_on_one_line() {
        let mut run = run(1, "planner", 1, Vec::new());
        run["label"] = json!("look\u{1b}[2J\nup");
        let text = build(&node(run), Details::Wide).for_pipe();
        assert!(text.contains("\n(look\u{fffd}[2J up)\trun_"), "{text}");
    }

    #[test]
    fn runs_are_indented_by_depth_and_summed() {
        let researcher = run(2, "researcher", 200, vec![run(3, "critic", 30, Vec::new())]);
        let writer = run(4, "writer", 4, Vec::new());
        let tree = node(run(1, "planner", 1000, vec![researcher, writer]));
        let plain = |details| {
            let text = build(&tree, details).for_terminal(80);
            anstream::adapter::strip_str(&text).to_string()
        };
        assert_eq!(
            plain(Details::Usage),
            "\
agent          status     turns    in  out  calls    time
planner        completed      2  1000    7      1  1.23 s
  researcher   completed      2   200    7      1  0.43 s
    critic     completed      2    30    7      1  0.26 s
  writer       completed      2     4    7      1  0.24 s
total: 4 runs                 8  1234   28      4  1.23 s
"
        );
        assert_eq!(
            plain(Details::Ids),
            "\
agent          run       status     tokens    time
planner        00000001  completed    1007  1.23 s
  researcher   00000002  completed     207  0.43 s
    critic     00000003  completed      37  0.26 s
  writer       00000004  completed      11  0.24 s
total: 4 runs                         1262  1.23 s
"
        );
    }
}
