//! `axed runs score`.

use serde_json::{Value, json};

use crate::cli::output::{self, FormatArgs};
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "A run that has ended has one score of each name and key; another one replaces it.

Examples:
  axed runs score run_019a2b3c thumbs true
  axed runs score run_019a2b3c grounded 0.4 --comment 'cites no page' --turn 3
  axed runs score run_019a2b3c tone friendly"
)]
pub struct Score {
    /// Id of the run, or its first or last digits; also of a child run
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// What is scored, such as grounded
    name: String,
    /// A number, true, false, or a label
    #[arg(allow_negative_numbers = true)]
    value: String,
    /// Why
    #[arg(long, value_name = "TEXT")]
    comment: Option<String>,
    /// The turn that the score is about
    #[arg(long, value_name = "N")]
    turn: Option<u32>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn score(args: &Score) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let value = match args.value.as_str() {
        text @ ("true" | "false") => json!(text == "true"),
        text => match text.parse::<f64>() {
            Ok(number) if number.is_finite() => json!(number),
            _ => Value::from(text),
        },
    };
    let body = json!({
        "name": args.name, "value": value, "comment": args.comment, "turn": args.turn,
    });
    let id = client.find_run(&args.id).await?;
    let score = client.add_score(&id, &body).await?;
    if args.format.is_json() {
        return output::print_json(&score);
    }
    output::print_line(format_args!(
        "{id} has the score {} {}",
        args.name, args.value
    ))
}
