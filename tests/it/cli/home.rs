//! A directory with agents and configuration, and the commands in it.

use crate::support::daemon::axed_command;
use crate::support::within_timeout;
use std::fs;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;
use tokio::process::Command;

/// A script that repeats the input.
pub const ECHO: &str = "[[replies]]\ntext = \"got: {{input}}\"\n";

/// A directory with agents and scripts, as a user would have them.
pub struct Home(TempDir);

impl Home {
    pub fn new() -> Self {
        let home = Self(tempfile::tempdir().expect("a directory"));
        home.write(
            "config/axed.toml",
            "[providers.scripted]\nscripts = [\"scripts\"]\n",
        );
        home.write("config/scripts/.keep", "");
        home.write("tmp/.keep", "");
        home
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    pub fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path().join(path)).expect("a file")
    }

    /// An agent with a script of its own.
    pub fn agent(&self, name: &str, more: &str, script: &str) {
        let model = format!("scripted/{name}");
        self.write(
            &format!("agents/{name}.toml"),
            &format!("name = \"{name}\"\nmodel = \"{model}\"\n{more}"),
        );
        self.write(&format!("config/scripts/{name}.toml"), script);
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = axed_command(self.path(), arguments);
        command.env("TMPDIR", self.path().join("tmp"));
        command
    }

    pub async fn axed(&self, arguments: &[&str]) -> Ended {
        ended(self.command(arguments)).await
    }
}

/// A command that has ended.
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

pub async fn ended(mut command: Command) -> Ended {
    let output = within_timeout("the command's end", command.output())
        .await
        .expect("run axed");
    Ended::from(output)
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).expect("UTF-8"),
            err: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

impl Ended {
    /// Checks the exit code and returns stdout.
    pub fn with(&self, code: i32) -> &str {
        assert_eq!(
            self.code, code,
            "stdout: {}\nstderr: {}",
            self.out, self.err
        );
        &self.out
    }
}

/// What commands have not removed from the directory for temporary files.
pub fn leftovers(home: &Home) -> Vec<String> {
    let entries = fs::read_dir(home.path().join("tmp")).expect("a directory");
    entries
        .map(|entry| {
            let name = entry.expect("an entry").file_name();
            name.into_string().expect("UTF-8")
        })
        .collect()
}

/// Sends a signal by name.
pub fn signal(child: &tokio::process::Child, name: &str) {
    let pid = child.id().expect("a process that was not waited for");
    let sent = std::process::Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status();
    assert!(sent.expect("run kill").success());
}
