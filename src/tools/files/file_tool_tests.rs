//! What the file tools show and change: text, modes, links, ignore files and large trees.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::json;

use crate::tools::files::test_workdir::{TestWorkdir, expect_ok};

#[test]
fn long_lines_and_invalid_bytes_are_shown_in_part() {
    let workdir = TestWorkdir::new();
    workdir.write_file("long", format!("{}é\nnext\r\n", "a".repeat(8191)));
    let output = expect_ok(workdir.call("read", json!({"path": "long"})));
    assert!(
        output.contains("a ... (line cut, it has 8194 bytes)\n2: next"),
        "{}",
        &output[8000..]
    );
    assert!(output.ends_with("2: next"), "{}", &output[8000..]);
    workdir.write_file("latin", b"caf\xe9 au lait\n");
    assert_eq!(
        expect_ok(workdir.call("read", json!({"path": "latin"}))),
        "1: caf\u{fffd} au lait"
    );
    let result = workdir.call(
        "edit",
        json!({"path": "latin", "old_string": "au", "new_string": "x"}),
    );
    assert_eq!(
        result,
        Err("latin is not UTF-8 (at byte 3); editing it would lose what is there".into())
    );
    assert_eq!(
        fs::read(workdir.path("latin")).expect("a file"),
        b"caf\xe9 au lait\n"
    );
    workdir.write_file("empty", "");
    assert_eq!(
        expect_ok(workdir.call("read", json!({"path": "empty"}))),
        "(the file is empty)"
    );
    let result = workdir.call("read", json!({"path": "long", "offset": 3}));
    assert_eq!(
        result,
        Err("long has only 2 lines; offset 3 is behind its end".into())
    );
    workdir.write_file("many", "some line of a long file\n".repeat(50_000));
    let output = expect_ok(workdir.call("read", json!({"path": "many", "limit": 100_000})));
    assert!(output.len() <= 256 << 10);
    let shown_lines = output.lines().count() as u64 - 1;
    assert!(output.ends_with(&format!(
        "... (more follows; continue with offset {})",
        shown_lines + 1
    )));
}

#[test]
fn a_replaced_file_keeps_its_mode_and_links() {
    let workdir = TestWorkdir::new();
    workdir.write_file("bin/run", "#!/bin/sh\n");
    fs::set_permissions(workdir.path("bin/run"), fs::Permissions::from_mode(0o4755))
        .expect("a mode");
    symlink("bin/run", workdir.path("link")).expect("a link");
    expect_ok(workdir.call(
        "write",
        json!({"path": "link", "content": "#!/bin/sh\nls\n"}),
    ));
    assert!(workdir.path("link").is_symlink());
    assert_eq!(workdir.read_file("bin/run"), "#!/bin/sh\nls\n");
    let mode = |path: &str| {
        fs::metadata(workdir.path(path))
            .expect("it")
            .permissions()
            .mode()
            & 0o7777
    };
    assert_eq!(mode("bin/run"), 0o755, "it runs, but not as its owner");
    expect_ok(workdir.call(
        "edit",
        json!({"path": "link", "old_string": "ls", "new_string": "id"}),
    ));
    assert_eq!(workdir.read_file("bin/run"), "#!/bin/sh\nid\n");
    expect_ok(workdir.call("copy", json!({"from": "bin", "to": "bin2"})));
    assert_eq!(mode("bin2/run"), 0o755);
    symlink("nowhere", workdir.path("dangling")).expect("a link");
    let error = workdir
        .call("write", json!({"path": "dangling", "content": ""}))
        .expect_err("dangling");
    assert!(error.contains("it is a link"), "{error}");
    fs::set_permissions(workdir.path("bin/run"), fs::Permissions::from_mode(0o444))
        .expect("a mode");
    let result = workdir.call("write", json!({"path": "bin/run", "content": ""}));
    assert_eq!(result, Err("bin/run is read-only".into()));
    let names: Vec<_> = fs::read_dir(workdir.path("bin"))
        .expect("it")
        .flatten()
        .map(|it| it.file_name())
        .collect();
    assert_eq!(names, ["run"], "nothing temporary is left");
}

#[test]
fn concurrent_edits_of_one_file_are_both_applied() {
    let workdir = TestWorkdir::new();
    let tokens: Vec<String> = (0..64).map(|number| format!("<{number}>")).collect();
    workdir.write_file("f", tokens.join("\n"));
    std::thread::scope(|scope| {
        for half in tokens.chunks(32) {
            let workdir = &workdir;
            scope.spawn(move || {
                for token in half {
                    expect_ok(workdir.call(
                        "edit",
                        json!({"path": "f", "old_string": token, "new_string": "done"}),
                    ));
                }
            });
        }
    });
    assert_eq!(workdir.read_file("f").matches("done").count(), 64);
}

#[test]
fn grep_respects_ignore_files() {
    let workdir = TestWorkdir::new();
    for path in [
        "a.rs",
        "b.txt",
        "build/a.rs",
        "deep/build/a.rs",
        "deep/kept.log",
        "deep/x.log",
        ".git/config",
        ".hidden",
    ] {
        workdir.write_file(path, "needle\n");
    }
    workdir.write_file("nul", "needle\n\0");
    workdir.write_file(".gitignore", "/build\n*.log\n[\n");
    workdir.write_file("deep/.ignore", "!kept.log\n");
    let grep = |arguments| expect_ok(workdir.call("grep", arguments));
    assert_eq!(
        grep(json!({"pattern": "needle"})),
        ".hidden:1: needle\na.rs:1: needle\nb.txt:1: needle\ndeep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        grep(json!({"pattern": "needle", "include": "*.rs"})),
        "a.rs:1: needle\ndeep/build/a.rs:1: needle"
    );
    assert_eq!(
        grep(json!({"pattern": "needle", "include": "deep/**"})),
        "deep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        grep(json!({"pattern": "needle", "path": "deep"})),
        "deep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        grep(json!({"pattern": "needle", "path": "build"})),
        "build/a.rs:1: needle",
        "named, so it is meant"
    );
    symlink("deep", workdir.path("link")).expect("a link");
    assert_eq!(
        grep(json!({"pattern": "needle", "path": "link", "include": "*.log"})),
        "deep/kept.log:1: needle"
    );
    assert_eq!(
        expect_ok(workdir.call("find", json!({"pattern": "link/*"}))),
        "nothing matches link/*"
    );
    assert_eq!(
        grep(json!({"pattern": "needle", "path": "deep/x.log"})),
        "deep/x.log:1: needle"
    );
    assert_eq!(
        expect_ok(workdir.call("find", json!({"pattern": "**/*.log"}))),
        "deep/kept.log\ndeep/x.log"
    );
    assert_eq!(
        expect_ok(workdir.call("find", json!({"pattern": "d*"}))),
        "deep/"
    );
}

#[test]
fn a_large_tree_is_searched_fully_and_shown_in_part() {
    let workdir = TestWorkdir::new();
    for number in 0..3000 {
        workdir.write_file(
            &format!("d{}/e{}/f{number}", number % 7, number % 50),
            "one\nneedle\n",
        );
    }
    let output = expect_ok(workdir.call("grep", json!({"pattern": "needle"})));
    assert_eq!(output.lines().count(), 1001);
    assert!(
        output.ends_with("... (stopped at 1000 lines; narrow the pattern, the path or include)")
    );
    let output = expect_ok(workdir.call("grep", json!({"pattern": "needle", "include": "f*7"})));
    assert_eq!(output.lines().count(), 300);
    let output = expect_ok(workdir.call("find", json!({"pattern": "**/f*"})));
    assert_eq!(output.lines().count(), 3000);
}

#[test]
fn a_failed_copy_leaves_nothing() {
    let workdir = TestWorkdir::new();
    workdir.write_file("from/a/b", "small");
    let large = fs::File::create(workdir.path("from/large")).expect("a file");
    large.set_len((1 << 30) + 1).expect("a sparse file");
    workdir.write_file("to/other", "mine");
    let result = workdir.call("copy", json!({"from": "from", "to": "to/copy"}));
    let why = "from: a copy has at most 1073741824 bytes";
    assert_eq!(result, Err(why.to_owned()));
    assert!(!workdir.path("to/copy").exists());
    assert_eq!(workdir.read_file("to/other"), "mine");
    drop(workdir.workdir_fs.stop.cancel_on_drop());
    let result = workdir.call("copy", json!({"from": "from/a", "to": "to/copy"}));
    assert_eq!(result, Err("from/a: stopped".to_owned()));
    assert!(!workdir.path("to/copy").exists());
}
