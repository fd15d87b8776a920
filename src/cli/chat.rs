//! `axed chat`: a conversation with an agent in the terminal. Each line is a run of one session.

use std::cell::{Cell, RefCell};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cli::age::parse_seconds;
use crate::cli::approval_prompt::ApprovalPrompt;
use crate::cli::chat_input::{ChatInput, Typed};
use crate::cli::chat_view::ChatView;
use crate::cli::client::{Client, ClientError, ReceivedEvent, RunView};
use crate::cli::reconnects::Reconnects;
use crate::cli::server::OptionalDaemonArgs;
use crate::cli::signals::Signals;
use crate::cli::sources::Sources;
use crate::cli::style::{Color, Styled};
use crate::cli::{in_process, output, run};
use crate::domain::chat_session;
use crate::domain::run::Status;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Ctrl-C cancels the run, Ctrl-D ends the chat. On a pipe, each line of stdin is a
message. Without --server or AXED_SERVER the agent runs in this process;
--data DIR keeps the conversation.

Examples:
  axed chat helper
  axed chat helper --data ./data --session notes
  axed chat helper --server http://127.0.0.1:8080 --session notes"
)]
pub struct Args {
    /// Name of the agent; axed agents list shows them
    agent: String,
    /// Session to continue or to begin [default: a new one]
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
    /// Use this model instead of the agent's own
    #[arg(long, value_name = "PROVIDER/MODEL")]
    model: Option<String>,
    /// Deadline of each run, such as 90s or 2m
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<u64>,
    /// Print turns and results of tools, too
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    daemon: OptionalDaemonArgs,
    #[command(flatten)]
    sources: Sources,
    /// Keep the conversation and the agents' memory in this directory
    /// [default: keep neither]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

pub async fn chat(args: Args) -> anyhow::Result<ExitCode> {
    let has_local_flags = args.data.is_some() || args.sources.are_given();
    if let Some(client) = args.daemon.client(has_local_flags)? {
        return Chat::new(&client, &args, true).run().await;
    }
    let (config, temp_dir) = in_process::private_config(args.sources.clone(), args.data.clone())?;
    in_process::with_daemon(config, async |client| {
        if temp_dir.is_some() {
            in_process::warn_of_lost_memory(client, &args.agent).await;
        }
        Chat::new(client, &args, temp_dir.is_none()).run().await
    })
    .await
}

struct Chat<'a> {
    client: &'a Client,
    args: &'a Args,
    session: String,
    /// Whether another chat can continue the session.
    is_kept: bool,
    is_interactive: bool,
}

/// How a run of the chat ended.
enum Turn {
    Ended(ExitCode),
    /// A signal ends the whole chat.
    Stopped,
}

impl<'a> Chat<'a> {
    fn new(client: &'a Client, args: &'a Args, is_kept: bool) -> Self {
        Self {
            client,
            args,
            session: args.session.clone().unwrap_or_else(chat_session::new_name),
            is_kept,
            is_interactive: std::io::stdin().is_terminal(),
        }
    }

    async fn run(&self) -> anyhow::Result<ExitCode> {
        // An agent that does not exist is an error before the first message.
        let agent = self.client.get_agent(&self.args.agent).await?;
        let mut signals = Signals::new()?;
        let mut input = ChatInput::new(self.is_interactive)?;
        if self.is_interactive {
            let model = self.args.model.as_deref().or(agent["model"].as_str());
            let text = format!(
                "{} ({}). Ctrl-C cancels a run, Ctrl-D ends the chat.",
                self.args.agent,
                model.unwrap_or_default()
            );
            output::eprint_styled(&Styled::default().colored(Color::Dim, text));
        }
        let mut code = ExitCode::SUCCESS;
        let mut runs = 0;
        loop {
            let typed = tokio::select! {
                typed = input.next() => typed?,
                () = signals.wait_for_stop() => break,
            };
            let message = match typed {
                Typed::Message(message) if message.trim().is_empty() => continue,
                Typed::Message(message) => message,
                Typed::Interrupt => {
                    output::eprint_line(format_args!("Ctrl-D ends the chat."));
                    continue;
                }
                Typed::End => break,
            };
            runs += 1;
            match self.turn(&message, &mut signals).await? {
                Turn::Ended(ended) if !self.is_interactive && ended != ExitCode::SUCCESS => {
                    code = ended
                }
                Turn::Ended(_) => {}
                Turn::Stopped => break,
            }
        }
        if runs > 0 && self.is_kept && self.is_interactive {
            output::eprint_line(format_args!(
                "axed: to continue: axed chat {} --session {}{}",
                self.args.agent,
                self.session,
                match &self.args.data {
                    Some(dir) => format!(" --data {}", dir.display()),
                    None => String::new(),
                }
            ));
        }
        Ok(code)
    }

    /// Sends a message, shows the run, and waits for its end. A signal cancels the run.
    async fn turn(&self, message: &str, signals: &mut Signals) -> anyhow::Result<Turn> {
        let mut body = json!({ "input": message, "session": self.session, "stream": true });
        if let Some(model) = &self.args.model {
            body["model"] = model.as_str().into();
        }
        if let Some(timeout) = self.args.timeout {
            body["timeout"] = timeout.into();
        }
        let view = RefCell::new(ChatView::new(self.args.verbose));
        let is_asking = Cell::new(false);
        let mut prompt = ApprovalPrompt::new(self.client, &is_asking);
        let (started, mut id) = watch::channel(None);
        let mut stream = pin!(self.show_run(&body, &view, &started));
        let mut is_stopped = false;
        let streamed = tokio::select! {
            streamed = wait_for_end(&mut prompt, id.clone(), stream.as_mut()) => streamed?,
            is_interrupt = signals.wait_for_interrupt() => {
                is_stopped = !is_interrupt;
                tokio::select! {
                    streamed = &mut stream => streamed,
                    cancelled = self.cancel(id.clone()) => {
                        cancelled?;
                        wait_for_end(&mut prompt, id.clone(), stream).await?
                    }
                }
            }
        };
        let Some(id) = id.borrow_and_update().clone() else {
            return match streamed {
                // Another message may fare better.
                Err(error) if self.is_interactive => {
                    output::eprint_line(format_args!("axed: {error}"));
                    Ok(Turn::Ended(ExitCode::FAILURE))
                }
                Err(error) => Err(error.into()),
                Ok(()) => anyhow::bail!("the daemon sent no events of the run"),
            };
        };
        // The run ends also if nothing of it can be shown.
        let run = prompt.wait_until_finished(&id).await?;
        prompt.release_stdin().await;
        view.borrow_mut().finish(run["content"].as_str())?;
        let run: RunView = serde_json::from_value(run)?;
        if run.status != Status::Completed {
            output::eprint_line(format_args!("axed: {}", run.outcome()));
        }
        Ok(match is_stopped {
            true => Turn::Stopped,
            false => Turn::Ended(run::exit_code(&run)),
        })
    }

    /// Starts a run and shows its events until the last one. Opens a stream that breaks off again.
    async fn show_run(
        &self,
        body: &Value,
        view: &RefCell<ChatView>,
        started: &watch::Sender<Option<String>>,
    ) -> Result<(), ClientError> {
        let (last, has_ended) = (Cell::new(0), Cell::new(false));
        let on_event = |received: &ReceivedEvent| {
            last.set(received.number().unwrap_or(last.get()));
            let Some(event) = &received.event else {
                return;
            };
            if started.borrow().is_none() {
                started.send_replace(Some(event.run_id.to_string()));
            }
            let is_end = event.depth == 0 && event.kind.name().is_terminal();
            has_ended.set(has_ended.get() || is_end);
            view.borrow_mut().on_event(event);
        };
        let agent = &self.args.agent;
        let streamed = self.client.create_streamed_run(agent, body, on_event).await;
        let id = started.borrow().clone();
        if let Some(id) = id
            && !has_ended.get()
        {
            view.borrow_mut().begin_text_again();
            // Who waits for the run reports an error.
            let mut reconnects = Reconnects::silent();
            let _ = reconnects
                .follow(self.client, &id, last.get(), on_event)
                .await;
        }
        streamed
    }

    /// Cancels the run as soon as its id is known.
    async fn cancel(&self, mut id: watch::Receiver<Option<String>>) -> anyhow::Result<()> {
        // If the request failed, there is no run to cancel.
        if let Ok(id) = id.wait_for(Option::is_some).await
            && let Some(id) = &*id
        {
            let reason = "interrupted in axed chat";
            self.client.cancel(id, reason).await?;
        }
        Ok(())
    }
}

/// Waits for the end of a run, and for that of its stream; meanwhile has its calls decided.
async fn wait_for_end(
    prompt: &mut ApprovalPrompt<'_>,
    id: watch::Receiver<Option<String>>,
    mut stream: Pin<&mut impl Future<Output = Result<(), ClientError>>>,
) -> anyhow::Result<Result<(), ClientError>> {
    tokio::select! {
        streamed = stream.as_mut() => Ok(streamed),
        decided = decide_calls(prompt, id) => {
            decided?;
            let streamed = tokio::time::timeout(run::LAST_EVENTS_TIMEOUT, stream).await;
            Ok(streamed.unwrap_or(Ok(())))
        }
    }
}

/// Has the calls of the run decided that wait for approval, until the run ends.
async fn decide_calls(
    prompt: &mut ApprovalPrompt<'_>,
    mut id: watch::Receiver<Option<String>>,
) -> anyhow::Result<()> {
    let id = id.wait_for(Option::is_some).await?.clone();
    prompt
        .wait_until_finished(&id.unwrap_or_default())
        .await
        .map(drop)
}
