//! A workdir for the file tools' tests, beside a directory that no tool may reach.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::config::AttachmentLimits;
use crate::tools::files::workdir_fs::{SharedState, StopToken, WorkdirFs};
use crate::tools::files::{edit, file_ops, find, grep, list, read, write};
use crate::workdirs::handle::WorkdirHandle;
use crate::workdirs::registry::Workdirs;
use crate::workdirs::reserved::ReservedPaths;

/// A workdir `in` beside a directory `out` that contains a secret.
pub struct TestWorkdir {
    pub root: TempDir,
    pub workdir_fs: WorkdirFs,
}

pub type CallResult = Result<String, String>;

impl TestWorkdir {
    pub fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        for dir in ["in", "out"] {
            fs::create_dir(root.path().join(dir)).expect("a directory");
        }
        fs::write(root.path().join("out/f"), "secret\n").expect("a file");
        let workdirs = Workdirs::new(root.path().join("in"), &[], ReservedPaths::default());
        let workdir = workdirs.open(None, None).expect("a workdir");
        let workdir_fs = WorkdirFs {
            access: WorkdirHandle::new(workdir),
            stop: StopToken::default(),
            shared: Arc::new(SharedState::new(
                256 << 10,
                AttachmentLimits::default(),
                &[],
            )),
        };
        Self { root, workdir_fs }
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.root.path().join("in").join(path)
    }

    pub fn write_file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, content).expect("a file");
    }

    pub fn read_file(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("a text")
    }

    pub fn call(&self, tool: &str, arguments: Value) -> CallResult {
        let workdir_fs = &self.workdir_fs;
        match tool {
            "list" => list::list_directory(workdir_fs, parse(arguments)),
            "read" => read::read_file(workdir_fs, parse(arguments)).map(|output| output.text),
            "write" => write::write_file(workdir_fs, parse(arguments)),
            "edit" => edit::edit_file(workdir_fs, parse(arguments)),
            "find" => find::find_path(workdir_fs, parse(arguments)),
            "grep" => grep::grep(workdir_fs, parse(arguments)),
            "delete" => file_ops::delete_path(workdir_fs, parse(arguments)),
            "move" => file_ops::move_path(workdir_fs, parse(arguments)),
            "copy" => file_ops::copy_path(workdir_fs, parse(arguments)),
            "create" => file_ops::create_directory(workdir_fs, parse(arguments)),
            _ => panic!("no tool {tool}"),
        }
    }

    /// Calls every tool with this path, and returns the results.
    pub fn call_all(&self, path: &str) -> Vec<(&'static str, CallResult)> {
        let calls = [
            ("list", json!({"path": path})),
            ("read", json!({"path": path})),
            ("write", json!({"path": path, "content": "broken"})),
            (
                "edit",
                json!({"path": path, "old_string": "secret", "new_string": "broken"}),
            ),
            ("grep", json!({"path": path, "pattern": "secret"})),
            ("copy", json!({"from": path, "to": "stolen"})),
            ("copy", json!({"from": "mine", "to": path})),
            ("move", json!({"from": path, "to": "stolen"})),
            ("move", json!({"from": "mine", "to": path})),
            ("create", json!({"path": path})),
            ("delete", json!({"path": path})),
        ];
        calls
            .map(|(tool, arguments)| (tool, self.call(tool, arguments)))
            .into()
    }

    pub fn assert_outside_untouched(&self) {
        let out = self.root.path().join("out");
        let names: Vec<_> = fs::read_dir(&out)
            .expect("a directory")
            .flatten()
            .map(|it| it.file_name())
            .collect();
        assert_eq!(names, ["f"]);
        assert_eq!(
            fs::read_to_string(out.join("f")).expect("a file"),
            "secret\n"
        );
    }
}

fn parse<A: serde::de::DeserializeOwned>(arguments: Value) -> A {
    serde_json::from_value(arguments).expect("arguments")
}

pub fn expect_ok(result: CallResult) -> String {
    result.unwrap_or_else(|why| panic!("{why}"))
}
