//! Commands on a terminal: prompts for approval. The terminal is that of `script`, which every Linux system has.

use std::process::Stdio;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use crate::cli::home::Home;
use crate::support::daemon::AXED;
use crate::support::within_timeout;

/// A command on a terminal, and what it has printed.
struct Terminal {
    child: Child,
    screen: String,
}

impl Terminal {
    fn start(home: &Home, arguments: &str) -> Self {
        Self::start_with(home, arguments, &[])
    }

    fn start_with(home: &Home, arguments: &str, environment: &[(&str, &str)]) -> Self {
        let axed = home.command(&[]);
        let mut command = Command::new("script");
        command
            .args(["--quiet", "--return", "--flush", "--command"])
            .arg(format!("exec {AXED} {arguments}"))
            .arg("/dev/null")
            .current_dir(home.path())
            .env_clear()
            .env("TERM", "xterm")
            .env("SHELL", "/bin/sh")
            .envs(
                axed.as_std()
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        Self {
            child: command.spawn().expect("run script"),
            screen: String::new(),
        }
    }

    /// Waits for a text after what was waited for before.
    async fn wait_for(&mut self, text: &str) {
        let stdout = self.child.stdout.as_mut().expect("stdout");
        let screen = &mut self.screen;
        within_timeout(text, async {
            let mut bytes = [0; 4096];
            while !screen.contains(text) {
                let count = stdout.read(&mut bytes).await.expect("output");
                assert_ne!(count, 0, "the command ended without {text}: {screen}");
                screen.push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        })
        .await;
        let (_, rest) = self.screen.split_once(text).expect("the text");
        self.screen = rest.to_owned();
    }

    async fn type_line(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("stdin");
        let line = format!("{line}\n");
        stdin.write_all(line.as_bytes()).await.expect("a terminal");
    }

    async fn exit_code(&mut self) -> Option<i32> {
        let status = within_timeout("the command's end", self.child.wait()).await;
        status.expect("an end").code()
    }
}

fn careful_home() -> Home {
    let home = Home::new();
    let script = "[[replies]]\n[[replies.tool_calls]]\nname = \"write_file\"\n\
        arguments = { path = \"note.md\", content = \"found\" }\n[[replies]]\ntext = \"On it: {{result.1}}\"\n";
    let agent = "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]";
    home.write("work/.keep", "");
    home.agent("fixer", agent, script);
    home
}

#[tokio::test]
async fn a_person_approves_a_call_at_the_prompt() {
    let home = careful_home();
    let mut terminal = Terminal::start(&home, "run fixer go");
    terminal
        .wait_for("fixer waits for approval of write_file")
        .await;
    terminal.wait_for("note.md").await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    assert!(!home.path().join("work/note.md").exists());
    terminal.type_line("maybe").await;
    terminal
        .wait_for("Type y to approve, n to deny, or e to edit")
        .await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("y").await;
    terminal.wait_for("On it: wrote 5 bytes").await;
    assert_eq!(terminal.exit_code().await, Some(0));
    assert_eq!(home.read("work/note.md"), "found");
}

#[tokio::test]
async fn a_person_denies_a_call_at_the_prompt_with_a_reason() {
    let home = careful_home();
    let mut terminal = Terminal::start(&home, "run fixer go");
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("n").await;
    terminal.wait_for("Reason for the model").await;
    terminal.type_line("not on a Friday").await;
    terminal.wait_for("On it: ").await;
    terminal.wait_for("not on a Friday").await;
    assert_eq!(terminal.exit_code().await, Some(0));
    assert!(!home.path().join("work/note.md").exists());
}

#[tokio::test]
async fn a_person_edits_the_arguments_at_the_prompt() {
    let home = careful_home();
    // An editor that is a script: the first text is no JSON, the second lacks an argument.
    home.write(
        "edit.sh",
        "n=$(cat runs 2>/dev/null | wc -l); echo >>runs\n\
         case $n in\n\
         0) echo 'no JSON' >\"$1\" ;;\n\
         1) echo '{\"path\": \"note.md\"}' >\"$1\" ;;\n\
         *) echo '{\"path\": \"note.md\", \"content\": \"better\"}' >\"$1\" ;;\n\
         esac\n",
    );
    let mut terminal = Terminal::start_with(&home, "run fixer go", &[("EDITOR", "sh edit.sh")]);
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("e").await;
    terminal.wait_for("the arguments are not JSON").await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("e").await;
    terminal.wait_for("With these arguments:").await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("y").await;
    terminal.wait_for("content").await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("e").await;
    terminal.wait_for("better").await;
    terminal.wait_for("Approve? [y/n/e] ").await;
    terminal.type_line("y").await;
    terminal.wait_for("On it: Note: a person changed").await;
    assert_eq!(terminal.exit_code().await, Some(0));
    assert_eq!(home.read("work/note.md"), "better");
}
