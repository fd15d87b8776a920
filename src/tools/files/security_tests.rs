//! Attacks on the file tools: nothing outside the workdir is read or written, and no call blocks.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::tools::files::test_workdir::{TestWorkdir, expect_ok};
use crate::tools::files::workdir_fs::StopToken;

#[test]
fn no_path_and_no_link_leads_out() {
    let workdir = TestWorkdir::new();
    workdir.write_file("mine", "mine\n");
    let out = workdir.root.path().join("out");
    symlink(&out, workdir.path("absolute")).expect("a link");
    symlink("../out", workdir.path("relative")).expect("a link");
    symlink("../out/f", workdir.path("file")).expect("a link");
    symlink("relative/f", workdir.path("chain")).expect("a link");
    let absolute = out.join("f").display().to_string();
    for path in [
        &absolute,
        "../out/f",
        "x/../../out/f",
        "absolute/f",
        "relative/f",
        "relative/new/g",
    ] {
        for (tool, result) in workdir.call_all(path) {
            assert!(result.is_err(), "{tool} of {path}: {result:?}");
        }
    }
    // The link itself may be moved, replaced or deleted, but its target must not change.
    for path in ["file", "chain", "absolute", "relative"] {
        for (tool, arguments) in [
            ("list", json!({"path": path})),
            ("read", json!({"path": path})),
            ("write", json!({"path": path, "content": "broken"})),
            (
                "edit",
                json!({"path": path, "old_string": "secret", "new_string": "broken"}),
            ),
            ("grep", json!({"path": path, "pattern": "secret"})),
            ("copy", json!({"from": path, "to": "stolen"})),
            ("create", json!({"path": format!("{path}/x")})),
        ] {
            let result = workdir.call(tool, arguments);
            assert!(result.is_err(), "{tool} of {path}: {result:?}");
        }
    }
    let output = expect_ok(workdir.call("find", json!({"pattern": "**"})));
    assert_eq!(output, "absolute\nchain\nfile\nmine\nrelative");
    assert_eq!(
        expect_ok(workdir.call("grep", json!({"pattern": "secret"}))),
        "no line matches secret"
    );
    for link in ["absolute", "relative", "file", "chain"] {
        assert_eq!(
            expect_ok(workdir.call("delete", json!({"path": link}))),
            format!("deleted {link}")
        );
    }
    workdir.assert_outside_untouched();
    assert_eq!(expect_ok(workdir.call("list", json!({}))), "mine");
}

#[test]
fn the_workdir_itself_cannot_be_changed() {
    let workdir = TestWorkdir::new();
    workdir.write_file("a/f", "x");
    for (tool, arguments) in [
        ("delete", json!({"path": "."})),
        ("delete", json!({"path": "a/.."})),
        ("move", json!({"from": ".", "to": "b"})),
        ("copy", json!({"from": ".", "to": "b"})),
        ("write", json!({"path": ".", "content": ""})),
    ] {
        assert!(workdir.call(tool, arguments).is_err(), "{tool}");
    }
    assert_eq!(workdir.read_file("a/f"), "x");
}

/// Swaps `in/d` between a directory and a link to `out` while `work` runs. If the work is mutating, also removes what
/// it put in the way.
fn with_swaps(workdir: &TestWorkdir, is_mutating: bool, work: impl Fn()) {
    workdir.write_file("d/f", "inside\n");
    let done = AtomicBool::new(false);
    let d = workdir.path("d");
    let (parked, link) = (
        workdir.root.path().join("aside"),
        workdir.root.path().join("link"),
    );
    symlink("../out", &link).expect("a link");
    let swap = || {
        let _ = fs::rename(&d, &parked);
        let _ = fs::rename(&link, &d);
        let _ = fs::rename(&d, &link);
        let _ = fs::rename(&parked, &d);
    };
    let restore = || {
        let _ = fs::remove_dir_all(&d);
        let _ = fs::remove_dir_all(&parked);
        let _ = fs::remove_dir_all(&link);
        let _ = symlink("../out", &link);
        let _ = fs::create_dir(&d);
        let _ = fs::write(d.join("f"), "inside\n");
    };
    std::thread::scope(|scope| {
        let swapper = scope.spawn(|| {
            let mut swaps = 0;
            while !done.load(Ordering::Relaxed) {
                swap();
                if is_mutating {
                    restore();
                }
                swaps += 1;
            }
            swaps
        });
        // The swapper must end even if the work fails.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&work));
        done.store(true, Ordering::Relaxed);
        outcome.unwrap_or_else(|why| std::panic::resume_unwind(why));
        let swaps = swapper.join().expect("swaps");
        assert!(swaps > 10, "too few swaps for a meaningful test");
    });
    workdir.assert_outside_untouched();
}

#[test]
fn racing_links_read_nothing_outside() {
    let workdir = TestWorkdir::new();
    with_swaps(&workdir, false, || {
        let mut seen = 0;
        for _ in 0..5000 {
            for (tool, arguments) in [
                ("read", json!({"path": "d/f"})),
                ("grep", json!({"path": "d", "pattern": "secret|inside"})),
                ("grep", json!({"pattern": "secret|inside"})),
            ] {
                if let Ok(text) = workdir.call(tool, arguments) {
                    assert!(!text.contains(": secret"), "{tool}: {text}");
                    seen += usize::from(text.contains("inside"));
                }
            }
        }
        assert!(seen > 10, "too few reads for a meaningful test");
    });
}

#[test]
fn racing_links_change_nothing_outside() {
    let workdir = TestWorkdir::new();
    workdir.write_file("tree/sub/g", "mine");
    with_swaps(&workdir, true, || {
        for round in 0..700 {
            let new = format!("d/new{round}");
            let calls = [
                ("write", json!({"path": "d/f", "content": "broken"})),
                ("write", json!({"path": new, "content": "broken"})),
                (
                    "edit",
                    json!({"path": "d/f", "old_string": "s", "new_string": "broken", "replace_all": true}),
                ),
                ("create", json!({"path": format!("d/x{round}/y")})),
                ("copy", json!({"from": "tree", "to": format!("d/t{round}")})),
                ("move", json!({"from": new, "to": "moved"})),
                ("delete", json!({"path": "moved"})),
                ("delete", json!({"path": "d/f"})),
                ("delete", json!({"path": "d"})),
            ];
            for (tool, arguments) in calls {
                if let Ok(text) = workdir.call(tool, arguments) {
                    assert!(!text.contains("secret"), "{tool}: {text}");
                }
            }
        }
    });
}

#[test]
fn special_files_are_not_read_and_block_nothing() {
    let workdir = TestWorkdir::new();
    workdir.write_file("mine", "mine");
    let run_program = |program: &str, arguments: &[&str]| {
        let status = Command::new(program)
            .args(arguments)
            .current_dir(workdir.path("."))
            .status();
        status.is_ok_and(|status| status.success())
    };
    assert!(run_program("mkfifo", &["special-pipe"]));
    let _socket =
        std::os::unix::net::UnixListener::bind(workdir.path("special-socket")).expect("a socket");
    // Only root can create a device, and not on every system.
    run_program("mknod", &["special-zero", "c", "1", "5"]);
    for entry in fs::read_dir(workdir.path("."))
        .expect("a directory")
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("special") {
            continue;
        }
        for tool in ["read", "write", "edit", "copy"] {
            let arguments = match tool {
                "write" => json!({"path": name, "content": "x"}),
                "edit" => json!({"path": name, "old_string": "x", "new_string": "y"}),
                "copy" => json!({"from": name, "to": "there"}),
                _ => json!({"path": name}),
            };
            let error = workdir.call(tool, arguments).expect_err(tool);
            assert!(error.contains("not a regular file"), "{tool}: {error}");
        }
    }
    assert_eq!(
        expect_ok(workdir.call("grep", json!({"pattern": "m"}))),
        "mine:1: mine"
    );
    expect_ok(workdir.call("copy", json!({"from": "mine", "to": "dir/mine"})));
    assert!(run_program("mkfifo", &["dir/pipe"]));
    let output = expect_ok(workdir.call("copy", json!({"from": "dir", "to": "dir2"})));
    assert_eq!(
        output,
        "copied dir to dir2 (1 file(s)); left out 1 link(s) and special file(s)"
    );
    expect_ok(workdir.call("delete", json!({"path": "dir"})));
    assert!(!workdir.path("dir").exists());
}

#[test]
fn a_huge_file_is_not_read_whole() {
    let workdir = TestWorkdir::new();
    for (name, start) in [("sparse", ""), ("log", "first\nsecond\n")] {
        // With a start, the part that is sniffed is text.
        let mut text = start.to_owned();
        if !start.is_empty() {
            text.push_str(&"more text\n".repeat(10_000));
        }
        workdir.write_file(name, text);
        let file = fs::OpenOptions::new()
            .write(true)
            .open(workdir.path(name))
            .expect("open");
        file.set_len(10 << 30).expect("a long file");
    }
    let error = workdir
        .call("read", json!({"path": "sparse"}))
        .expect_err("binary");
    assert_eq!(
        error,
        "sparse is a binary file of 10737418240 bytes; only text can be read"
    );
    let output = expect_ok(workdir.call("read", json!({"path": "log", "limit": 2})));
    assert_eq!(
        output,
        "1: first\n2: second\n... (more follows; continue with offset 3)"
    );
    let error = workdir
        .call("read", json!({"path": "log", "offset": 10_003}))
        .expect_err("too long");
    assert!(
        error.contains("line 10003 of log is longer than 16777216 bytes"),
        "{error}"
    );
    assert!(
        workdir
            .call(
                "edit",
                json!({"path": "log", "old_string": "first", "new_string": "x"})
            )
            .is_err()
    );
    assert!(
        workdir
            .call("copy", json!({"from": "log", "to": "copy"}))
            .is_err()
    );
    assert_eq!(
        expect_ok(workdir.call("grep", json!({"pattern": "first"}))),
        "no line matches first"
    );
}

#[test]
fn hostile_patterns_are_bounded() {
    let workdir = TestWorkdir::new();
    workdir.write_file("a", format!("{}!\n", "a".repeat(1 << 20)));
    assert_eq!(
        expect_ok(workdir.call("grep", json!({"pattern": "^(a+)+$"}))),
        "no line matches ^(a+)+$"
    );
    let error = workdir
        .call("grep", json!({"pattern": r"((\w{1000}){1000}){1000}"}))
        .expect_err("too big");
    assert!(error.starts_with("the pattern cannot be used: "), "{error}");
    let error = workdir
        .call("grep", json!({"pattern": "a(b"}))
        .expect_err("no pattern");
    assert!(error.contains("unclosed group"), "{error}");
    assert!(workdir.call("find", json!({"pattern": "{a,b"})).is_err());
    expect_ok(workdir.call("find", json!({"pattern": "*a".repeat(400)})));
}

#[test]
fn a_timed_out_call_returns_partial_results() {
    let mut workdir = TestWorkdir::new();
    workdir.write_file("a", "needle\n");
    workdir.workdir_fs.stop = StopToken::default().with_timeout(Duration::ZERO);
    let grep = |path| expect_ok(workdir.call("grep", json!({"pattern": "needle", "path": path})));
    for path in ["a", "."] {
        let output = grep(path);
        let notice = "... (stopped after 0 seconds, and not everything was searched";
        assert!(output.contains(notice), "{output}");
    }
    let output = expect_ok(workdir.call("find", json!({"pattern": "**"})));
    assert!(output.contains("... (stopped after 0 seconds"), "{output}");
    let error = workdir
        .call("read", json!({"path": "a"}))
        .expect_err("late");
    assert_eq!(error, "a: stopped, as it takes longer than 0 seconds");
}

#[test]
fn a_line_too_long_for_a_pattern_is_skipped() {
    let workdir = TestWorkdir::new();
    workdir.write_file("long", "x".repeat(100 << 10));
    workdir.write_file("short", "xxxx\n");
    let output = expect_ok(workdir.call("grep", json!({"pattern": r"x\w{3,20}"})));
    assert_eq!(
        output,
        "short:1: xxxx\n... (1 file(s) could not be searched: they cannot be read, or have a line of more than 32768 \
         bytes, the most for this pattern)"
    );
    let output = expect_ok(workdir.call("grep", json!({"pattern": "xxxx"})));
    assert!(output.starts_with("long:1: xxxx"), "{output}");
}

#[test]
fn a_cancelled_call_stops() {
    let workdir = TestWorkdir::new();
    workdir.write_file("f", "old\n");
    drop(workdir.workdir_fs.stop.cancel_on_drop());
    for (tool, result) in workdir.call_all("f") {
        // An atomic operation is done or not; the others stop before their next step.
        if ["read", "write", "edit", "grep", "copy"].contains(&tool) {
            assert!(result.is_err(), "{tool}: {result:?}");
        }
    }
    assert!(!Path::new(&workdir.path("stolen")).is_file() || !workdir.path("f").exists());
}
