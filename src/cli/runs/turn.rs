//! `axed runs turn`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::cli::age::seconds;
use crate::cli::client::Client;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::server::DaemonArgs;
use crate::cli::style::{Color, Styled};
use crate::cli::table::{Cell, Column, Table};
use crate::domain::request_head::REDACTED;
use crate::domain::run_ref::RunRef;
use crate::domain::terminal_text::{escape_json, sanitize_line};

const COLUMNS: [Column; 8] = [
    Column::number("turn"),
    Column::flexible("model"),
    Column::text("status"),
    Column::number("tries"),
    Column::number("in"),
    Column::number("out"),
    Column::number("calls"),
    Column::number("time"),
];

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "Without N, a table of the run's turns.

Examples:
  axed runs turn run_019a2b3c
  axed runs turn run_019a2b3c 3
  axed runs turn run_019a2b3c 3 --request | jq .messages
  axed runs turn run_019a2b3c 3 --curl | sh"
)]
pub struct Turn {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Number of the turn, from 1
    #[arg(value_name = "N")]
    turn: Option<u32>,
    /// Print only the body of the request, as it was sent
    #[arg(long, requires = "turn", group = "part")]
    request: bool,
    /// Print only the reply, as JSON
    #[arg(long, requires = "turn", group = "part")]
    reply: bool,
    /// Print a command that sends the request again, with the key from the provider's environment variable
    #[arg(long, requires = "turn", group = "part")]
    curl: bool,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn turn(args: &Turn) -> anyhow::Result<()> {
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let Some(number) = args.turn else {
        return print_turns(&client, &id, args.format).await;
    };
    // As the daemon sent it: the bytes of the request's body count.
    let path = ["runs", &id, "turns", &number.to_string()];
    let text: Box<RawValue> = client.read(client.get(&path)).await?;
    let turn: TurnDetail = serde_json::from_str(text.get())?;
    if args.request {
        let body = turn.request(&id)?.body.get();
        return output::print_line(format_args!("{}", escape_json(body)));
    }
    if args.reply {
        let reply = turn.reply.ok_or_else(|| no_reply(&id, number))?;
        return output::print_json(&reply);
    }
    if args.curl {
        let command = curl_command(&turn, &id)?;
        return output::print_line(format_args!("{}", command.trim_end()));
    }
    if args.format.is_json() {
        return output::print_json(&serde_json::from_str(text.get())?);
    }
    print_turn(&turn, &serde_json::from_str(text.get())?)
}

async fn print_turns(client: &Client, id: &str, format: FormatArgs) -> anyhow::Result<()> {
    let list: Value = client.read(client.get(&["runs", id, "turns"])).await?;
    if format.is_json() {
        return output::print_json(&list);
    }
    let turns = list["data"].as_array().map_or(&[][..], Vec::as_slice);
    if turns.is_empty() {
        output::eprint_line(format_args!("axed: no turn of {id} is recorded"));
        return Ok(());
    }
    let mut table = Table::new(COLUMNS);
    for turn in turns {
        table.row(row(turn));
    }
    table.print()
}

fn row(turn: &Value) -> Vec<Cell> {
    let text = |key: &str| turn[key].as_str().unwrap_or_default();
    let count = |value: &Value| {
        value
            .as_u64()
            .map_or("-".to_owned(), |count| count.to_string())
    };
    let status = text("status");
    vec![
        Cell::new(count(&turn["turn"])),
        Cell::new(format!("{}/{}", text("provider"), text("model"))),
        Cell::new(status).colored((status == "failed").then_some(Color::Red)),
        Cell::new(turn["attempts"].as_array().map_or(0, Vec::len)),
        Cell::new(count(&turn["usage"]["input_tokens"])),
        Cell::new(count(&turn["usage"]["output_tokens"])),
        Cell::new(count(&turn["tool_calls"])),
        Cell::new(seconds(turn["duration_ms"].as_u64().unwrap_or(0))),
    ]
}

#[derive(Deserialize)]
struct TurnDetail {
    turn: u32,
    redacted: bool,
    provider: String,
    request: Option<Request>,
    reply: Option<Value>,
}

#[derive(Deserialize)]
struct Request {
    method: Option<String>,
    url: Option<String>,
    headers: BTreeMap<String, String>,
    key_variable: Option<String>,
    body: Box<RawValue>,
}

impl TurnDetail {
    fn request(&self, run: &str) -> Result<&Request, InvalidInput> {
        self.request.as_ref().ok_or_else(|| {
            InvalidInput(format!(
                "the request of turn {} of {run} is not recorded: [data] requests was off",
                self.turn
            ))
        })
    }
}

fn no_reply(run: &str, turn: u32) -> InvalidInput {
    InvalidInput(format!(
        "turn {turn} of {run} has no reply; axed runs turn {run} {turn} shows why"
    ))
}

fn print_turn(turn: &TurnDetail, whole: &Value) -> anyhow::Result<()> {
    let mut table = Table::new(COLUMNS);
    table.row(row(whole));
    table.print()?;
    for attempt in whole["attempts"].as_array().into_iter().flatten() {
        if let Some(error) = attempt["error"].as_str() {
            let model = format!(
                "{}/{}",
                text_of(attempt, "provider"),
                text_of(attempt, "model")
            );
            let line = format!("attempt of {model}: {error}");
            output::print_styled(&Styled::default().colored(Color::Red, sanitize_line(&line)))?;
        }
    }
    if let Some(request) = &turn.request {
        let target = [request.method.as_deref(), request.url.as_deref()];
        let target: Vec<_> = target.into_iter().flatten().collect();
        print_title("request", &target.join(" "))?;
        for (name, value) in &request.headers {
            output::print_line(format_args!("{name}: {value}"))?;
        }
        output::print_json(&serde_json::from_str(request.body.get())?)?;
    }
    if let Some(reply) = &turn.reply {
        print_title("reply", "")?;
        output::print_json(reply)?;
    }
    Ok(())
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn print_title(title: &str, rest: &str) -> anyhow::Result<()> {
    let title = Styled::default().colored(Color::Cyan, format!("{title}:"));
    output::print_styled(&title.plain(sanitize_line(&format!(" {rest}"))))
}

/// A command for a POSIX shell.
fn curl_command(turn: &TurnDetail, run: &str) -> Result<String, InvalidInput> {
    let request = turn.request(run)?;
    if turn.redacted {
        return Err(InvalidInput(format!(
            "parts of turn {} of {run} are redacted, so that it cannot be sent again; --request prints the rest",
            turn.turn
        )));
    }
    let (Some(method), Some(url)) = (&request.method, &request.url) else {
        return Err(InvalidInput(format!(
            "the provider {} is not reached over HTTP; --request prints what it got",
            turn.provider
        )));
    };
    let mut lines = vec![format!("curl -sS -X {} {}", quoted(method), quoted(url))];
    for (name, value) in &request.headers {
        lines.push(format!(
            "-H {}",
            header(name, value, request.key_variable.as_deref())
        ));
    }
    // As a document within the command: an argument may have 128 KiB at most.
    let body = escape_json(request.body.get());
    let mut end = "END_OF_BODY".to_owned();
    while body.lines().any(|line| line == end) {
        end.push('_');
    }
    lines.push(format!("--data-binary @- <<'{end}'"));
    Ok(format!("{}\n{body}\n{end}\n", lines.join(" \\\n  ")))
}

/// A header as an argument. A secret value is read from a variable.
fn header(name: &str, value: &str, key_variable: Option<&str>) -> String {
    let Some((before, after)) = value.split_once(REDACTED) else {
        return quoted(&format!("{name}: {value}"));
    };
    let is_key = matches!(
        name,
        "authorization" | "x-api-key" | "api-key" | "x-goog-api-key"
    );
    let own = || name.to_ascii_uppercase();
    let variable = key_variable
        .filter(|_| is_key)
        .map_or_else(own, str::to_owned);
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let variable: String = variable
        .replace('-', "_")
        .chars()
        .filter(is_plain)
        .collect();
    // If the variable is not set, the shell says so and sends nothing.
    format!(
        "{}\"${{{variable}:?}}\"{}",
        quoted(&format!("{name}: {before}")),
        if after.is_empty() {
            String::new()
        } else {
            quoted(after)
        }
    )
}

/// One argument for a POSIX shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", sanitize_line(text).replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{TurnDetail, curl_command};

    fn turn(overrides: serde_json::Value) -> TurnDetail {
        let mut turn = json!({
            "turn": 2, "redacted": false, "provider": "anthropic", "reply": null,
            "request": {
                "method": "POST", "url": "https://models.example.com/v1/messages?a=b&c=it's",
                "headers": {
                    "content-type": "application/json", "x-api-key": "[redacted]",
                    "authorization": "Bearer [redacted]", "x-tenant": "[redacted]",
                },
                "key_variable": "ANTHROPIC_API_KEY",
                "body": {"text": "it's $HOME `date` \u{1b}[31m \\ \u{202e}"},
            },
        });
        for (key, value) in overrides.as_object().expect("an object") {
            turn[key] = value.clone();
        }
        serde_json::from_value(turn).expect("a turn")
    }

    #[test]
    fn a_command_has_no_secret_and_is_quoted() {
        let command = curl_command(&turn(json!({})), "run_1").expect("a command");
        let expected = r#"curl -sS -X POST 'https://models.example.com/v1/messages?a=b&c=it'\''s' \
  -H 'authorization: Bearer '"${ANTHROPIC_API_KEY:?}" \
  -H 'content-type: application/json' \
  -H 'x-api-key: '"${ANTHROPIC_API_KEY:?}" \
  -H 'x-tenant: '"${X_TENANT:?}" \
  --data-binary @- <<'END_OF_BODY'
{"text":"it's $HOME `date` \u001b[31m \\ \u202e"}
END_OF_BODY
"#;
        assert_eq!(command, expected);
    }

    #[test]
    fn a_request_that_is_not_whole_has_no_command() {
        for (overrides, expected) in [
            (json!({"redacted": true}), "are redacted"),
            (json!({"request": null}), "[data] requests was off"),
            (
                json!({"request": {"method": null, "url": null, "headers": {}, "key_variable": null, "body": {}}}),
                "is not reached over HTTP",
            ),
        ] {
            let error = curl_command(&turn(overrides), "run_1").expect_err("no command");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
