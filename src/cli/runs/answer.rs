//! `axed runs answer`.

use serde_json::{Value, json};

use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::pending::PendingQuestion;
use crate::cli::runs::view::{explain_wait, parse_run};
use crate::cli::server::DaemonArgs;
use crate::domain::run_ref::RunRef;
use crate::domain::terminal_text::sanitize_line;

#[derive(Debug, clap::Args)]
#[command(
    next_line_help = true,
    after_help = "RUN may also be the root of the run that asks. Without an answer, the questions are printed.

Examples:
  axed runs answer run_019a2b3c
  axed runs answer run_019a2b3c Berlin
  axed runs answer run_019a2b3c --value '{\"city\": \"Berlin\", \"nights\": 2}'
  axed runs answer run_019a2b3c --decline \"ask finance\"
  axed runs answer run_019a2b3c --outcome done --result \"order 17 is paid\"
  axed runs answer run_019a2b3c --outcome not_done"
)]
pub struct Answer {
    /// Id of the run, or its first or last digits
    #[arg(value_name = "RUN")]
    id: RunRef,
    /// Answer, as text
    #[arg(value_name = "TEXT", conflicts_with_all = ["value", "decline"])]
    text: Option<String>,
    /// Answer, as JSON that fits the question's schema
    #[arg(long, value_name = "JSON", conflicts_with = "decline")]
    value: Option<String>,
    /// Do not answer, for this reason; the model gets it
    #[arg(long, value_name = "WHY")]
    decline: Option<String>,
    /// Whether the call was done whose end is not known
    #[arg(long, value_name = "OUTCOME", value_parser = ["done", "not_done", "unknown"], conflicts_with_all = ["text", "value", "decline"])]
    outcome: Option<String>,
    /// What it returned, if it was done
    #[arg(long, value_name = "TEXT", requires = "outcome")]
    result: Option<String>,
    /// Id of the question; needed only if several wait
    #[arg(long, value_name = "ID")]
    input: Option<String>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub async fn answer(args: &Answer) -> anyhow::Result<()> {
    let body = body(args)?;
    let client = args.daemon.client()?;
    let id = client.find_run(&args.id).await?;
    let run = client.get_run(&id, 0).await?;
    let pending = PendingQuestion::all_of(&run)?;
    let Some(body) = body else {
        for question in &pending {
            match args.format.is_json() {
                true => output::print_json_line(&question.json)?,
                false => output::print_line(format_args!("{}", question.text()))?,
            }
            if pending.len() > 1 && !args.format.is_json() {
                output::print_line(format_args!("  --input {}", sanitize_line(&question.id)))?;
            }
        }
        return match pending.is_empty() {
            true => Err(nothing_waits(&id, run)?.into()),
            false => Ok(()),
        };
    };
    let named = |id: &String| pending.iter().find(|it| it.id == *id);
    let question = args.input.as_ref().map_or_else(|| pending.first(), named);
    if args.outcome.is_some() && question.is_some_and(|it| !it.is_about_call()) {
        let why = "--outcome is for a call whose end is not known; answer this question with TEXT or --value";
        return Err(InvalidInput(why.to_owned()).into());
    }
    let (run, input) = match (&args.input, pending.as_slice()) {
        (Some(id_of_question), _) => {
            let found = named(id_of_question);
            // If it does not wait, the daemon explains why it cannot be answered.
            let run = found.map_or(id, |it| it.run_id.to_string());
            (run, id_of_question.clone())
        }
        (None, [only]) => (only.run_id.to_string(), only.id.clone()),
        (None, []) => return Err(nothing_waits(&id, run)?.into()),
        (None, several) => {
            let lines = several.iter();
            let lines = lines.map(|it| format!("\n  {}  {}", sanitize_line(&it.id), it.line()));
            let message = format!(
                "{} questions of {id} wait for an answer; name one with --input:{}",
                several.len(),
                lines.collect::<String>()
            );
            return Err(InvalidInput(message).into());
        }
    };
    let answered = client.answer(&run, &input, &body).await?;
    if args.format.is_json() {
        return output::print_json(&answered);
    }
    let run = parse_run(answered)?;
    let past = if args.decline.is_some() {
        "declined"
    } else {
        "answered"
    };
    output::print_line(format_args!(
        "{} is {}: {} {past}",
        run.id,
        run.status.as_str(),
        sanitize_line(&input)
    ))
}

/// `None` if there is no answer.
fn body(args: &Answer) -> anyhow::Result<Option<Value>> {
    if let Some(outcome) = &args.outcome {
        let mut answer = json!({ "outcome": outcome });
        if let Some(result) = &args.result {
            answer["result"] = json!(result);
        }
        return Ok(Some(json!({ "answer": answer })));
    }
    Ok(match (&args.text, &args.value, &args.decline) {
        (Some(text), ..) => Some(json!({ "answer": text })),
        (_, Some(text), _) => {
            let answer: Value = serde_json::from_str(text)
                .map_err(|error| InvalidInput(format!("--value: is not JSON: {error}")))?;
            Some(json!({ "answer": answer }))
        }
        (_, _, Some(reason)) => Some(json!({ "decline": reason })),
        (None, None, None) => None,
    })
}

fn nothing_waits(id: &str, run: Value) -> anyhow::Result<InvalidInput> {
    let status = sanitize_line(run["status"].as_str().unwrap_or_default());
    let reason = parse_run(run)?.waiting_for.map(explain_wait);
    let reason = reason.map_or_else(String::new, |reason| format!(" {reason}"));
    Ok(InvalidInput(format!(
        "no question of {id} waits for an answer; it is {status}{reason}"
    )))
}
