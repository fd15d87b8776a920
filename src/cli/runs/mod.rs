//! `axed runs`: lists, shows, follows and changes the runs of a daemon over HTTP.

use std::process::ExitCode;

mod answer;
mod change;
pub mod conversation;
mod decide;
mod diff;
mod follow;
mod fork;
pub mod list;
mod message;
mod pause;
mod rerun;
mod save;
mod score;
mod show;
mod turn;
pub mod view;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  axed runs list --status failed
  axed runs show run_019a2b3c
  axed runs watch run_019a2b3c
  axed runs list -o json | jq -r .id

RUN is the id of a run, or its first or last digits if no other run has them.
AXED_SERVER and AXED_KEY name the daemon and the key.

Exit codes:
  0  done; watch and wait: the run completed
  1  invalid response; watch and wait: as for axed run
  2  run not found, or invalid argument
  3  daemon not reachable, or key missing or not permitted")]
pub enum Command {
    /// List runs, newest first
    List(list::List),
    /// Print a run: its status, input and final text
    Show(show::Show),
    /// Print a run with all its descendants
    Tree(show::Show),
    /// Print what a run does until it ends, then its final text
    Watch(follow::Watch),
    /// Wait until a run has ended
    Wait(follow::Wait),
    /// Print the recorded events of a run and its descendants
    Events(follow::Events),
    /// Print the conversation of a run
    Messages(conversation::Messages),
    /// Start a new run that continues from a part of another one
    Fork(Box<fork::Fork>),
    /// Print how two runs differ, with those below them
    Diff(diff::Diff),
    /// Print what a turn sent and what came back
    Turn(turn::Turn),
    /// Start a new run with the request of another one
    Rerun(rerun::Rerun),
    /// Send a message to a run that has not ended
    Message(message::Message),
    /// Score a run that has ended
    Score(score::Score),
    /// Write a run with its descendants to a file for axed test
    Save(save::Save),
    /// Pause a run and its descendants at their next step
    Pause(pause::Pause),
    /// Resume a paused run
    Resume(pause::Resume),
    /// Cancel a run and its descendants
    Cancel(change::Cancel),
    /// Delete runs that have ended, with their descendants
    Delete(change::Delete),
    /// Approve a tool call that waits for approval
    Approve(decide::Approve),
    /// Deny a tool call that waits for approval
    Deny(decide::Deny),
    /// Answer a question of a run, or print it
    Answer(answer::Answer),
}

pub async fn runs(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::List(args) => list::list(&args).await?,
        Command::Show(args) => show::show(&args).await?,
        Command::Tree(args) => show::tree(&args).await?,
        Command::Watch(args) => return follow::watch(&args).await,
        Command::Wait(args) => return follow::wait(&args).await,
        Command::Events(args) => follow::events(&args).await?,
        Command::Messages(args) => conversation::messages(&args).await?,
        Command::Fork(args) => return fork::fork(&args).await,
        Command::Diff(args) => diff::diff(&args).await?,
        Command::Turn(args) => turn::turn(&args).await?,
        Command::Rerun(args) => return rerun::rerun(&args).await,
        Command::Message(args) => message::message(&args).await?,
        Command::Score(args) => score::score(&args).await?,
        Command::Save(args) => save::save(&args).await?,
        Command::Pause(args) => pause::pause(&args).await?,
        Command::Resume(args) => pause::resume(&args).await?,
        Command::Cancel(args) => change::cancel(&args).await?,
        Command::Delete(args) => change::delete(&args).await?,
        Command::Approve(args) => decide::approve(&args).await?,
        Command::Deny(args) => decide::deny(&args).await?,
        Command::Answer(args) => answer::answer(&args).await?,
    }
    Ok(ExitCode::SUCCESS)
}
