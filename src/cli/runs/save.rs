//! `axed runs save`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cli::exit::InvalidInput;
use crate::cli::output;
use crate::cli::server::DaemonArgs;
use crate::cli::whole_file;
use crate::domain::run_ref::RunRef;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "The file has what the models of the tree were sent and what came back, and what
its tools returned, without keys and headers. Read it before you share it: it
has all texts of the run.

Example:
  axed runs save run_019a2b3c tests/release.toml
  axed test tests/release.toml"
)]
pub struct Save {
    /// Id of a root run that has ended, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// File to write, such as tests/name.toml
    file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn save(args: &Save) -> anyhow::Result<()> {
    let file = &args.file;
    if file.extension().is_none_or(|extension| extension != "toml") {
        return Err(InvalidInput(format!(
            "{} must end in .toml, so that axed test finds it",
            file.display()
        ))
        .into());
    }
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let text = client.get_recording(&id).await?;
    write(file, &text, args.force)?;
    output::print_line(format_args!(
        "{id} is saved in {file}.\nAdd to its [expect] what must hold, then: axed test {file}",
        file = file.display()
    ))
}

fn write(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let context = || format!("could not write {}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(context)?;
    }
    let written = if force {
        whole_file::replace(path, text)
    } else {
        whole_file::create(path, text)
    };
    match written {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let why = format!("{} exists; --force replaces it", path.display());
            Err(InvalidInput(why).into())
        }
        written => written.with_context(context),
    }
}
