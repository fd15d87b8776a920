//! `axed completions` and `axed man`: shell completions and manual pages, generated from the commands.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap_complete::Shell;

use crate::cli::output;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Examples:
  axed completions bash > ~/.local/share/bash-completion/completions/axed
  axed completions zsh > \"${fpath[1]}/_axed\"
  axed completions fish > ~/.config/fish/completions/axed.fish"
)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: SupportedShell,
}

/// The shells whose scripts are tested.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum SupportedShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Example:
  axed man ~/.local/share/man/man1 && man axed-run"
)]
pub struct Man {
    /// Directory for the pages, one for each command
    dir: PathBuf,
}

pub fn completions(args: &Completions, mut command: clap::Command) -> anyhow::Result<ExitCode> {
    let shell = match args.shell {
        SupportedShell::Bash => Shell::Bash,
        SupportedShell::Zsh => Shell::Zsh,
        SupportedShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "axed", &mut script);
    output::print_document(&String::from_utf8(script).context("the script is not UTF-8")?)?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(args: &Man, command: clap::Command) -> anyhow::Result<ExitCode> {
    let dir = &args.dir;
    std::fs::create_dir_all(dir).with_context(|| format!("could not make {}", dir.display()))?;
    clap_mangen::generate_to(command.disable_help_subcommand(true), dir)
        .with_context(|| format!("could not write the pages to {}", dir.display()))?;
    output::print_line(format_args!("The manual pages are in {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}
