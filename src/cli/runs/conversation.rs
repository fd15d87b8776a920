//! `axed runs messages`.

use serde_json::{Value, json};

use crate::cli::client::ClientError;
use crate::cli::client::MessagePage;
use crate::cli::output::{self, FormatArgs};
use crate::cli::server::DaemonArgs;
use crate::cli::style::{Color, Styled};
use crate::domain::content::Content;
use crate::domain::message::shorten;
use crate::domain::run_ref::RunRef;
use crate::domain::terminal_text::{escape_json, sanitize_line};

/// Most characters of a result without `-o wide`.
const MAX_RESULT: usize = 1000;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Long results of tools are cut; -o wide prints them whole.

Examples:
  axed runs messages run_019a2b3c
  axed runs messages run_019a2b3c -o json | jq '.data[-1].content'"
)]
pub struct Messages {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn messages(args: &Messages) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let pages = collect(async |after| client.get_messages(&id, after).await);
    print(pages.await?, args.format)
}

/// Reads all pages of a conversation.
pub async fn collect(
    read: impl AsyncFn(u64) -> Result<MessagePage, ClientError>,
) -> Result<MessagePage, ClientError> {
    let mut whole = read(0).await?;
    while let Some(after) = whole.next_after {
        let page = read(after).await?;
        whole.data.extend(page.data);
        whole.next_after = page.next_after;
    }
    Ok(whole)
}

/// Prints a whole conversation.
pub fn print(conversation: MessagePage, format: FormatArgs) -> anyhow::Result<()> {
    let MessagePage {
        system,
        data: messages,
        ..
    } = conversation;
    if format.is_json() {
        return output::print_json(
            &json!({ "system": system, "data": messages, "next_after": null }),
        );
    }
    let max_result = match format.is_wide() {
        true => usize::MAX,
        false => MAX_RESULT,
    };
    if let Some(system) = system {
        print_text("system", &system)?;
    }
    for message in &messages {
        print_message(message, max_result)?;
    }
    Ok(())
}

fn print_message(message: &Value, max_result: usize) -> anyhow::Result<()> {
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let list = |key: &str| message[key].as_array().into_iter().flatten();
    match message["role"].as_str() {
        Some("tool") => {
            for result in list("tool_results") {
                let title = match result["is_error"].as_bool() {
                    Some(true) => "error",
                    _ => "result",
                };
                let call = sanitize_line(&text(result, "call_id"));
                let content = content_text(&result["content"]);
                print_text(
                    &format!("{title} of {call}"),
                    &shorten(&content, max_result),
                )?;
            }
        }
        Some("assistant") => {
            print_text("assistant", &text(message, "content"))?;
            for call in list("tool_calls") {
                let arguments = escape_json(&call["arguments"].to_string());
                let line = Styled::default().colored(
                    Color::Cyan,
                    format!("→ {} {}", text(call, "id"), text(call, "name")),
                );
                output::print_styled(&line.plain(format!(" {}\n", sanitize_line(&arguments))))?;
            }
        }
        role => print_text(
            role.unwrap_or("unknown"),
            &content_text(&message["content"]),
        )?,
    }
    Ok(())
}

/// The text of a message or a result; images and files are named.
fn content_text(content: &Value) -> String {
    match serde_json::from_value::<Content>(content.clone()) {
        Ok(content) => content.to_plain_text().into_owned(),
        Err(_) => content.to_string(),
    }
}

fn print_text(title: &str, text: &str) -> anyhow::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let title = Styled::default().colored(Color::Cyan, format!("{title}:\n"));
    output::print_styled(&title.plain(format!("{}\n", text.trim_end())))
}
