//! Lets the user change the arguments of a tool call in an editor.

use std::fs;
use std::os::unix::process::ExitStatusExt;

use anyhow::Context;
use serde_json::Value;
use tokio::process::Command;

use crate::cli::temp_dir::TempDir;
use crate::config::environment;

/// The editor if the environment names none, as for other programs.
const DEFAULT_EDITOR: &str = "vi";

/// Opens the text in the user's editor, and returns it when the editor has ended.
///
/// # Errors
/// A message for the user, who may try again.
pub async fn edit(text: &str) -> Result<String, String> {
    let editor = environment::editor().unwrap_or_else(|| DEFAULT_EDITOR.to_owned());
    let edited = async {
        let dir = TempDir::new()?;
        let file = dir.path().join("arguments.json");
        fs::write(&file, text).context("could not write the arguments to a file")?;
        // The variable may hold arguments too, as for other programs.
        let status = Command::new("sh")
            .arg("-c")
            .arg(format!("{editor} \"$1\""))
            .arg("sh")
            .arg(&file)
            .status()
            .await
            .with_context(|| format!("could not start {editor}"))?;
        if let Some(signal) = status.signal() {
            anyhow::bail!("{editor} was ended by signal {signal}");
        }
        if !status.success() {
            anyhow::bail!("{editor} failed; the variable EDITOR chooses another");
        }
        fs::read_to_string(&file).context("could not read the edited arguments")
    };
    edited.await.map_err(|error| format!("{error:#}"))
}

/// The arguments that an edited text has.
///
/// # Errors
/// A message for the user, who may try again.
pub fn parse(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(arguments @ Value::Object(_)) => Ok(arguments),
        Ok(_) => Err("the arguments are not a JSON object".to_owned()),
        Err(error) => Err(format!("the arguments are not JSON: {error}")),
    }
}
