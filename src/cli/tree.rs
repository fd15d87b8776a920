//! Formats a run's tree as a table.

use comfy_table::{CellAlignment, Table, presets};

use crate::cli::client::{TreeNode, UsageView};
use crate::domain::message::shorten;
use crate::domain::terminal_text;

/// One row for each run, indented by depth, parents before children, and a row with the totals.
pub fn table(root: &TreeNode) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "agent",
        "status",
        "turns",
        "tokens in",
        "tokens out",
        "tool calls",
        "time",
    ]);
    let mut runs = 0;
    let mut turns = 0;
    let mut sum = UsageView::default();
    let mut stack = vec![(0, root)];
    while let Some((depth, run)) = stack.pop() {
        // The record of an ad-hoc sub-agent has its caller's agent name.
        let name = run.label.as_ref().map_or_else(
            || terminal_text::sanitize_line(&run.agent),
            // A model chose the label.
            |label| format!("({})", terminal_text::sanitize_line(&shorten(label, 40))),
        );
        let agent = format!("{}{name}", "  ".repeat(depth));
        let status = run.status.as_str();
        table.add_row(row(agent, status, run.turns, run.usage, run.duration_ms));
        runs += 1;
        turns += run.turns;
        sum.input_tokens += run.usage.input_tokens;
        sum.output_tokens += run.usage.output_tokens;
        sum.tool_calls += run.usage.tool_calls;
        stack.extend(run.children.iter().rev().map(|child| (depth + 1, child)));
    }
    let total = match runs {
        1 => "total: 1 run".to_owned(),
        runs => format!("total: {runs} runs"),
    };
    table.add_row(row(total, "", turns, sum, root.duration_ms));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

fn row(agent: String, status: &str, turns: u64, usage: UsageView, duration_ms: u64) -> [String; 7] {
    [
        agent,
        status.to_owned(),
        turns.to_string(),
        usage.input_tokens.to_string(),
        usage.output_tokens.to_string(),
        usage.tool_calls.to_string(),
        seconds(duration_ms),
    ]
}

/// Milliseconds as seconds, for display.
pub fn seconds(milliseconds: u64) -> String {
    format!("{}.{:02} s", milliseconds / 1000, milliseconds % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::table;

    #[test]
    fn an_ad_hoc_run_is_shown_by_its_label_on_one_line() {
        let run = json!({
            "id": "a", "agent": "planner", "label": "look\u{1b}[2J\nup", "status": "completed", "turns": 1,
            "duration_ms": 1, "usage": {"input_tokens": 1, "output_tokens": 1, "tool_calls": 0, "cost_usd": null},
            "children": [],
        });
        let rendered = table(&serde_json::from_value(run).expect("a tree"));
        assert!(rendered.contains("│ (look\u{fffd}[2J up) ┆"), "{rendered}");
    }

    #[test]
    fn runs_are_indented_by_depth_and_summed() {
        let run = |agent: &str, tokens: u64, children: Vec<Value>| {
            json!({
                "id": agent, "agent": agent, "status": "completed", "turns": 2, "duration_ms": tokens + 239,
                "usage": {"input_tokens": tokens, "output_tokens": 7, "tool_calls": 1, "cost_usd": null},
                "children": children,
            })
        };
        let researcher = run("researcher", 200, vec![run("critic", 30, Vec::new())]);
        let planner = run(
            "planner",
            1000,
            vec![researcher, run("writer", 4, Vec::new())],
        );
        let tree = serde_json::from_value(planner).expect("a tree");
        assert_eq!(
            table(&tree),
            "\
┌───────────────┬───────────┬───────┬───────────┬────────────┬────────────┬────────┐
│ agent         ┆ status    ┆ turns ┆ tokens in ┆ tokens out ┆ tool calls ┆   time │
╞═══════════════╪═══════════╪═══════╪═══════════╪════════════╪════════════╪════════╡
│ planner       ┆ completed ┆     2 ┆      1000 ┆          7 ┆          1 ┆ 1.23 s │
│   researcher  ┆ completed ┆     2 ┆       200 ┆          7 ┆          1 ┆ 0.43 s │
│     critic    ┆ completed ┆     2 ┆        30 ┆          7 ┆          1 ┆ 0.26 s │
│   writer      ┆ completed ┆     2 ┆         4 ┆          7 ┆          1 ┆ 0.24 s │
│ total: 4 runs ┆           ┆     8 ┆      1234 ┆         28 ┆          4 ┆ 1.23 s │
└───────────────┴───────────┴───────┴───────────┴────────────┴────────────┴────────┘"
        );
    }
}
