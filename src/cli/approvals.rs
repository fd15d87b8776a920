//! `axed approvals`: lists the tool calls of a daemon that wait for approval.

use std::process::ExitCode;

use jiff::Timestamp;

use crate::cli::age::ago;
use crate::cli::output::{self, FormatArgs};
use crate::cli::pending::PendingCall;
use crate::cli::server::DaemonArgs;
use crate::cli::table::{Cell, Column, Table};

/// Most calls of one page, as in the API.
const MAX_PAGE: usize = 200;

const COLUMNS: [Column; 5] = [
    Column::text("run"),
    Column::flexible("call"),
    Column::flexible("tool"),
    Column::number("age"),
    Column::flexible("arguments"),
];
/// With `-o wide`.
const WIDE_COLUMN: Column = Column::flexible("agent");

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "With -o json each call is one line.

Examples:
  axed approvals
  axed runs approve run_019a2b3c
  axed runs deny run_019a2b3c --reason \"not on a Friday\""
)]
pub struct Args {
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn approvals(args: &Args) -> anyhow::Result<ExitCode> {
    let client = args.daemon.client()?;
    let more = args.format.is_wide().then_some(WIDE_COLUMN);
    let mut table = Table::new(COLUMNS.into_iter().chain(more));
    let now = Timestamp::now();
    let mut is_empty = true;
    let mut cursor: Option<String> = None;
    loop {
        let page = client.list_approvals(MAX_PAGE, cursor.as_deref()).await?;
        is_empty &= page.data.is_empty();
        let mut calls = Vec::with_capacity(page.data.len());
        for approval in page.data {
            match args.format.is_json() {
                true => output::print_json_line(&approval)?,
                false => calls.push(PendingCall::load(&client, approval).await?),
            }
        }
        for call in &calls {
            table.row(row(call, now, args.format.is_wide()));
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    if args.format.is_json() {
        return Ok(ExitCode::SUCCESS);
    }
    match is_empty {
        true => output::eprint_line(format_args!(
            "axed: nothing waits for approval at {}",
            client.base()
        )),
        false => table.print()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn row(call: &PendingCall, now: Timestamp, wide: bool) -> Vec<Cell> {
    let mut cells = vec![
        Cell::run(call.run_id),
        Cell::new(&call.tool_call_id),
        Cell::new(&call.tool),
        Cell::new(ago(call.requested_at, now)),
        Cell::new(call.arguments_line()),
    ];
    if wide {
        cells.push(Cell::new(&call.agent));
    }
    cells
}
