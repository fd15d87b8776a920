//! `axed runs message`.

use std::path::PathBuf;

use serde_json::Value;

use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::run_input;
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The run reads the message before its next request to the model. It does not
end before that, unless it has no turn left.

Examples:
  axed runs message run_019a2b3c \"only the first quarter\"
  axed runs message run_019a2b3c - < notes.md
  axed runs message run_019a2b3c \"like this\" --file sketch.png"
)]
pub struct Message {
    /// Id of the run, or its first or last digits; also of a child run
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// The message; - or nothing reads stdin
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// Add an image or a PDF; may be repeated
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn message(args: &Message) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let text = run_input::read_text(args.text.as_deref())?;
    let content: Value = match (text, args.files.as_slice()) {
        (None, []) => {
            let message = "the message is empty; name a text, or a file with --file";
            return Err(InvalidInput(message.to_owned()).into());
        }
        (Some(text), []) => text.into(),
        (text, files) => run_input::with_files(text, files)?,
    };
    let id = client.find_run(&args.id).await?;
    let added = client.add_message(&id, &content).await?;
    if args.format.is_json() {
        return output::print_json(&added);
    }
    output::print_line(format_args!(
        "{id} has message {}; its next request includes it",
        added["number"]
    ))
}
