//! What the user of a chat types: lines with editing and history on a terminal, otherwise the lines of stdin.

use std::io::BufRead;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tokio::task::spawn_blocking;

const PROMPT: &str = "> ";

pub enum ChatInput {
    /// `None` while a line is read.
    Terminal(Option<Box<DefaultEditor>>),
    Pipe,
}

pub enum Typed {
    Message(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D, or the end of stdin.
    End,
}

impl ChatInput {
    pub fn new(is_interactive: bool) -> anyhow::Result<Self> {
        Ok(match is_interactive {
            true => Self::Terminal(Some(Box::new(DefaultEditor::new()?))),
            false => Self::Pipe,
        })
    }

    /// Reads the next message.
    pub async fn next(&mut self) -> anyhow::Result<Typed> {
        let editor = match self {
            Self::Pipe => return spawn_blocking(read_line).await?,
            Self::Terminal(editor) => editor,
        };
        let mut own = match editor.take() {
            Some(editor) => editor,
            None => Box::new(DefaultEditor::new()?),
        };
        let (own, typed) = spawn_blocking(move || {
            let typed = own.readline(PROMPT);
            if let Ok(line) = &typed {
                // A history that is full is no failure.
                let _ = own.add_history_entry(line);
            }
            (own, typed)
        })
        .await?;
        *editor = Some(own);
        match typed {
            Ok(line) => Ok(Typed::Message(line)),
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupt),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(error.into()),
        }
    }
}

fn read_line() -> anyhow::Result<Typed> {
    let mut line = String::new();
    let bytes = std::io::stdin().lock().read_line(&mut line)?;
    Ok(match bytes {
        0 => Typed::End,
        _ => Typed::Message(line.trim_end_matches(['\r', '\n']).to_owned()),
    })
}
