//! Attacks on the file tools: what is outside the workdir is neither read nor written, and nothing blocks.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::config::AttachmentLimits;
use crate::tools::files::ground::{Ground, Shared, Stop};
use crate::tools::files::{change, edit, find, grep, list, read, write};
use crate::workdirs::access::Access;
use crate::workdirs::registry::Workdirs;
use crate::workdirs::reserved::Reserved;

/// A workdir `in` beside a directory `out` with a secret in it.
struct House {
    home: TempDir,
    ground: Ground,
}

type Told = Result<String, String>;

impl House {
    fn new() -> Self {
        let home = tempfile::tempdir().expect("a directory");
        for dir in ["in", "out"] {
            fs::create_dir(home.path().join(dir)).expect("a directory");
        }
        fs::write(home.path().join("out/f"), "secret\n").expect("a file");
        let workdirs = Workdirs::new(home.path().join("in"), &[], Reserved::default());
        let workdir = workdirs.open(None, None).expect("a workdir");
        let ground = Ground {
            access: Access::new(workdir),
            stop: Stop::default(),
            shared: Arc::new(Shared::new(256 << 10, AttachmentLimits::default(), &[])),
        };
        Self { home, ground }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.home.path().join("in").join(path)
    }

    fn put(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, content).expect("a file");
    }

    fn get(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("a text")
    }

    fn call(&self, tool: &str, arguments: Value) -> Told {
        let ground = &self.ground;
        match tool {
            "list" => list::list(ground, of(arguments)),
            "read" => read::read(ground, of(arguments)).map(|output| output.text),
            "write" => write::write(ground, of(arguments)),
            "edit" => edit::edit(ground, of(arguments)),
            "find" => find::find(ground, of(arguments)),
            "grep" => grep::grep(ground, of(arguments)),
            "delete" => change::delete(ground, of(arguments)),
            "move" => change::move_(ground, of(arguments)),
            "copy" => change::copy(ground, of(arguments)),
            "create" => change::create(ground, of(arguments)),
            _ => panic!("no tool {tool}"),
        }
    }

    /// Every tool on this path, each with its answer.
    fn all_on(&self, path: &str) -> Vec<(&'static str, Told)> {
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

    fn outside_is_untouched(&self) {
        let out = self.home.path().join("out");
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

fn of<A: serde::de::DeserializeOwned>(arguments: Value) -> A {
    serde_json::from_value(arguments).expect("arguments")
}

fn is_ok(told: Told) -> String {
    told.unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn no_path_and_no_link_leads_out() {
    let house = House::new();
    house.put("mine", "mine\n");
    let out = house.home.path().join("out");
    symlink(&out, house.path("absolute")).expect("a link");
    symlink("../out", house.path("relative")).expect("a link");
    symlink("../out/f", house.path("file")).expect("a link");
    symlink("relative/f", house.path("chain")).expect("a link");
    let absolute = out.join("f").display().to_string();
    for path in [
        &absolute,
        "../out/f",
        "x/../../out/f",
        "absolute/f",
        "relative/f",
        "relative/new/g",
    ] {
        for (tool, told) in house.all_on(path) {
            assert!(told.is_err(), "{tool} of {path}: {told:?}");
        }
    }
    // The link itself may be moved, copied to, deleted: only what it stands for may not be touched.
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
            let told = house.call(tool, arguments);
            assert!(told.is_err(), "{tool} of {path}: {told:?}");
        }
    }
    let found = is_ok(house.call("find", json!({"pattern": "**"})));
    assert_eq!(found, "absolute\nchain\nfile\nmine\nrelative");
    assert_eq!(
        is_ok(house.call("grep", json!({"pattern": "secret"}))),
        "no line matches secret"
    );
    for link in ["absolute", "relative", "file", "chain"] {
        assert_eq!(
            is_ok(house.call("delete", json!({"path": link}))),
            format!("deleted {link}")
        );
    }
    house.outside_is_untouched();
    assert_eq!(is_ok(house.call("list", json!({}))), "mine");
}

#[test]
fn the_workdir_itself_stays() {
    let house = House::new();
    house.put("a/f", "x");
    for (tool, arguments) in [
        ("delete", json!({"path": "."})),
        ("delete", json!({"path": "a/.."})),
        ("move", json!({"from": ".", "to": "b"})),
        ("copy", json!({"from": ".", "to": "b"})),
        ("write", json!({"path": ".", "content": ""})),
    ] {
        assert!(house.call(tool, arguments).is_err(), "{tool}");
    }
    assert_eq!(house.get("a/f"), "x");
}

/// Swaps `in/d` between a directory and a link to `out` while the work is done. Where the work changes things, what it
/// has put in the way is cleared.
fn with_swaps(house: &House, is_changed: bool, work: impl Fn()) {
    house.put("d/f", "inside\n");
    let done = AtomicBool::new(false);
    let d = house.path("d");
    let (aside, link) = (
        house.home.path().join("aside"),
        house.home.path().join("link"),
    );
    symlink("../out", &link).expect("a link");
    let swap = || {
        let _ = fs::rename(&d, &aside);
        let _ = fs::rename(&link, &d);
        let _ = fs::rename(&d, &link);
        let _ = fs::rename(&aside, &d);
    };
    let mend = || {
        let _ = fs::remove_dir_all(&d);
        let _ = fs::remove_dir_all(&aside);
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
                if is_changed {
                    mend();
                }
                swaps += 1;
            }
            swaps
        });
        // The swapper ends also where the work fails.
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&work));
        done.store(true, Ordering::Relaxed);
        worked.unwrap_or_else(|why| std::panic::resume_unwind(why));
        let swaps = swapper.join().expect("swaps");
        assert!(swaps > 10, "it swapped too seldom to mean anything");
    });
    house.outside_is_untouched();
}

#[test]
fn a_race_of_links_reads_nothing_outside() {
    let house = House::new();
    with_swaps(&house, false, || {
        let mut seen = 0;
        for _ in 0..5000 {
            for (tool, arguments) in [
                ("read", json!({"path": "d/f"})),
                ("grep", json!({"path": "d", "pattern": "secret|inside"})),
                ("grep", json!({"pattern": "secret|inside"})),
            ] {
                if let Ok(text) = house.call(tool, arguments) {
                    assert!(!text.contains(": secret"), "{tool}: {text}");
                    seen += usize::from(text.contains("inside"));
                }
            }
        }
        assert!(seen > 10, "it read too seldom to mean anything");
    });
}

#[test]
fn a_race_of_links_changes_nothing_outside() {
    let house = House::new();
    house.put("tree/sub/g", "mine");
    with_swaps(&house, true, || {
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
                if let Ok(text) = house.call(tool, arguments) {
                    assert!(!text.contains("secret"), "{tool}: {text}");
                }
            }
        }
    });
}

#[test]
fn pipes_sockets_and_devices_are_neither_read_nor_waited_for() {
    let house = House::new();
    house.put("mine", "mine");
    let made = |program: &str, arguments: &[&str]| {
        let status = Command::new(program)
            .args(arguments)
            .current_dir(house.path("."))
            .status();
        status.is_ok_and(|status| status.success())
    };
    assert!(made("mkfifo", &["special-pipe"]));
    let _socket =
        std::os::unix::net::UnixListener::bind(house.path("special-socket")).expect("a socket");
    // Only root can make one, and not everywhere.
    made("mknod", &["special-zero", "c", "1", "5"]);
    for entry in fs::read_dir(house.path("."))
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
            let told = house.call(tool, arguments).expect_err(tool);
            assert!(told.contains("not a regular file"), "{tool}: {told}");
        }
    }
    assert_eq!(
        is_ok(house.call("grep", json!({"pattern": "m"}))),
        "mine:1: mine"
    );
    is_ok(house.call("copy", json!({"from": "mine", "to": "dir/mine"})));
    assert!(made("mkfifo", &["dir/pipe"]));
    let told = is_ok(house.call("copy", json!({"from": "dir", "to": "dir2"})));
    assert_eq!(
        told,
        "copied dir to dir2 (1 file(s)); left out 1 link(s) and special file(s)"
    );
    is_ok(house.call("delete", json!({"path": "dir"})));
    assert!(!house.path("dir").exists());
}

#[test]
fn a_huge_file_is_not_read_whole() {
    let house = House::new();
    for (name, start) in [("sparse", ""), ("log", "first\nsecond\n")] {
        // Text as far as a first look goes, where there is a start.
        let mut text = start.to_owned();
        if !start.is_empty() {
            text.push_str(&"more text\n".repeat(10_000));
        }
        house.put(name, text);
        let file = fs::OpenOptions::new()
            .write(true)
            .open(house.path(name))
            .expect("open");
        file.set_len(10 << 30).expect("a long file");
    }
    let told = house
        .call("read", json!({"path": "sparse"}))
        .expect_err("binary");
    assert_eq!(
        told,
        "sparse is a binary file of 10737418240 bytes; only text can be read"
    );
    let told = is_ok(house.call("read", json!({"path": "log", "limit": 2})));
    assert_eq!(
        told,
        "1: first\n2: second\n... (more follows; go on with offset 3)"
    );
    let told = house
        .call("read", json!({"path": "log", "offset": 10_003}))
        .expect_err("too long");
    assert!(
        told.contains("line 10003 of log is longer than 16777216 bytes"),
        "{told}"
    );
    assert!(
        house
            .call(
                "edit",
                json!({"path": "log", "old_string": "first", "new_string": "x"})
            )
            .is_err()
    );
    assert!(
        house
            .call("copy", json!({"from": "log", "to": "copy"}))
            .is_err()
    );
    assert_eq!(
        is_ok(house.call("grep", json!({"pattern": "first"}))),
        "no line matches first"
    );
}

#[test]
fn long_lines_and_bytes_that_are_no_text_are_shown_as_well_as_they_can_be() {
    let house = House::new();
    house.put("long", format!("{}é\nnext\r\n", "a".repeat(8191)));
    let told = is_ok(house.call("read", json!({"path": "long"})));
    assert!(
        told.contains("a ... (line cut, it has 8194 bytes)\n2: next"),
        "{}",
        &told[8000..]
    );
    assert!(told.ends_with("2: next"), "{}", &told[8000..]);
    house.put("latin", b"caf\xe9 au lait\n");
    assert_eq!(
        is_ok(house.call("read", json!({"path": "latin"}))),
        "1: caf\u{fffd} au lait"
    );
    let told = house.call(
        "edit",
        json!({"path": "latin", "old_string": "au", "new_string": "x"}),
    );
    assert_eq!(
        told,
        Err("latin is not UTF-8 (at byte 3); editing it would lose what is there".into())
    );
    assert_eq!(
        fs::read(house.path("latin")).expect("a file"),
        b"caf\xe9 au lait\n"
    );
    house.put("empty", "");
    assert_eq!(
        is_ok(house.call("read", json!({"path": "empty"}))),
        "(the file is empty)"
    );
    let told = house.call("read", json!({"path": "long", "offset": 3}));
    assert_eq!(
        told,
        Err("long has only 2 lines; offset 3 is behind its end".into())
    );
    house.put("many", "some line of a long file\n".repeat(50_000));
    let told = is_ok(house.call("read", json!({"path": "many", "limit": 100_000})));
    assert!(told.len() <= 256 << 10);
    let shown = told.lines().count() as u64 - 1;
    assert!(told.ends_with(&format!(
        "... (more follows; go on with offset {})",
        shown + 1
    )));
}

#[test]
fn no_pattern_takes_for_ever() {
    let house = House::new();
    house.put("a", format!("{}!\n", "a".repeat(1 << 20)));
    assert_eq!(
        is_ok(house.call("grep", json!({"pattern": "^(a+)+$"}))),
        "no line matches ^(a+)+$"
    );
    let told = house
        .call("grep", json!({"pattern": r"((\w{1000}){1000}){1000}"}))
        .expect_err("too big");
    assert!(told.starts_with("the pattern cannot be used: "), "{told}");
    let told = house
        .call("grep", json!({"pattern": "a(b"}))
        .expect_err("no pattern");
    assert!(told.contains("unclosed group"), "{told}");
    assert!(house.call("find", json!({"pattern": "{a,b"})).is_err());
    is_ok(house.call("find", json!({"pattern": "*a".repeat(400)})));
}

#[test]
fn a_call_whose_time_is_up_says_what_it_has() {
    let mut house = House::new();
    house.put("a", "needle\n");
    house.ground.stop = Stop::default().within(Duration::ZERO);
    let found = |path| is_ok(house.call("grep", json!({"pattern": "needle", "path": path})));
    for path in ["a", "."] {
        let found = found(path);
        let notice = "... (stopped after 0 seconds, and not everything was searched";
        assert!(found.contains(notice), "{found}");
    }
    let found = is_ok(house.call("find", json!({"pattern": "**"})));
    assert!(found.contains("... (stopped after 0 seconds"), "{found}");
    let read = house.call("read", json!({"path": "a"})).expect_err("late");
    assert_eq!(read, "a: stopped, as it takes longer than 0 seconds");
}

#[test]
fn a_line_that_is_too_long_for_a_pattern_is_not_matched_against_it() {
    let house = House::new();
    house.put("long", "x".repeat(100 << 10));
    house.put("short", "xxxx\n");
    let found = is_ok(house.call("grep", json!({"pattern": r"x\w{3,20}"})));
    assert_eq!(
        found,
        "short:1: xxxx\n... (1 file(s) could not be searched: they cannot be read, or have a line of more than 32768 \
         bytes, the most for this pattern)"
    );
    let found = is_ok(house.call("grep", json!({"pattern": "xxxx"})));
    assert!(found.starts_with("long:1: xxxx"), "{found}");
}

#[test]
fn what_is_replaced_keeps_its_mode_and_a_link_stays_one() {
    let house = House::new();
    house.put("bin/run", "#!/bin/sh\n");
    fs::set_permissions(house.path("bin/run"), fs::Permissions::from_mode(0o4755)).expect("a mode");
    symlink("bin/run", house.path("link")).expect("a link");
    is_ok(house.call(
        "write",
        json!({"path": "link", "content": "#!/bin/sh\nls\n"}),
    ));
    assert!(house.path("link").is_symlink());
    assert_eq!(house.get("bin/run"), "#!/bin/sh\nls\n");
    let mode = |path: &str| {
        fs::metadata(house.path(path))
            .expect("it")
            .permissions()
            .mode()
            & 0o7777
    };
    assert_eq!(mode("bin/run"), 0o755, "it runs, but not as its owner");
    is_ok(house.call(
        "edit",
        json!({"path": "link", "old_string": "ls", "new_string": "id"}),
    ));
    assert_eq!(house.get("bin/run"), "#!/bin/sh\nid\n");
    is_ok(house.call("copy", json!({"from": "bin", "to": "bin2"})));
    assert_eq!(mode("bin2/run"), 0o755);
    symlink("nowhere", house.path("dangling")).expect("a link");
    let told = house
        .call("write", json!({"path": "dangling", "content": ""}))
        .expect_err("dangling");
    assert!(told.contains("it is a link"), "{told}");
    fs::set_permissions(house.path("bin/run"), fs::Permissions::from_mode(0o444)).expect("a mode");
    let told = house.call("write", json!({"path": "bin/run", "content": ""}));
    assert_eq!(told, Err("bin/run is read-only".into()));
    let names: Vec<_> = fs::read_dir(house.path("bin"))
        .expect("it")
        .flatten()
        .map(|it| it.file_name())
        .collect();
    assert_eq!(names, ["run"], "nothing temporary is left");
}

#[test]
fn two_edits_of_one_file_at_once_are_both_made() {
    let house = House::new();
    let words: Vec<String> = (0..64).map(|number| format!("<{number}>")).collect();
    house.put("f", words.join("\n"));
    std::thread::scope(|scope| {
        for half in words.chunks(32) {
            let house = &house;
            scope.spawn(move || {
                for word in half {
                    is_ok(house.call(
                        "edit",
                        json!({"path": "f", "old_string": word, "new_string": "done"}),
                    ));
                }
            });
        }
    });
    assert_eq!(house.get("f").matches("done").count(), 64);
}

#[test]
fn a_search_leaves_out_what_ignore_files_say() {
    let house = House::new();
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
        house.put(path, "needle\n");
    }
    house.put("nul", "needle\n\0");
    house.put(".gitignore", "/build\n*.log\n[\n");
    house.put("deep/.ignore", "!kept.log\n");
    let found = |arguments| is_ok(house.call("grep", arguments));
    assert_eq!(
        found(json!({"pattern": "needle"})),
        ".hidden:1: needle\na.rs:1: needle\nb.txt:1: needle\ndeep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        found(json!({"pattern": "needle", "include": "*.rs"})),
        "a.rs:1: needle\ndeep/build/a.rs:1: needle"
    );
    assert_eq!(
        found(json!({"pattern": "needle", "include": "deep/**"})),
        "deep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        found(json!({"pattern": "needle", "path": "deep"})),
        "deep/build/a.rs:1: needle\ndeep/kept.log:1: needle"
    );
    assert_eq!(
        found(json!({"pattern": "needle", "path": "build"})),
        "build/a.rs:1: needle",
        "named, so it is meant"
    );
    symlink("deep", house.path("link")).expect("a link");
    assert_eq!(
        found(json!({"pattern": "needle", "path": "link", "include": "*.log"})),
        "deep/kept.log:1: needle"
    );
    assert_eq!(
        is_ok(house.call("find", json!({"pattern": "link/*"}))),
        "nothing matches link/*"
    );
    assert_eq!(
        found(json!({"pattern": "needle", "path": "deep/x.log"})),
        "deep/x.log:1: needle"
    );
    assert_eq!(
        is_ok(house.call("find", json!({"pattern": "**/*.log"}))),
        "deep/kept.log\ndeep/x.log"
    );
    assert_eq!(is_ok(house.call("find", json!({"pattern": "d*"}))), "deep/");
}

#[test]
fn a_large_tree_is_searched_whole_and_shown_in_part() {
    let house = House::new();
    for number in 0..3000 {
        house.put(
            &format!("d{}/e{}/f{number}", number % 7, number % 50),
            "one\nneedle\n",
        );
    }
    let found = is_ok(house.call("grep", json!({"pattern": "needle"})));
    assert_eq!(found.lines().count(), 1001);
    assert!(
        found.ends_with("... (stopped at 1000 lines; narrow the pattern, the path or include)")
    );
    let all = is_ok(house.call("grep", json!({"pattern": "needle", "include": "f*7"})));
    assert_eq!(all.lines().count(), 300);
    let found = is_ok(house.call("find", json!({"pattern": "**/f*"})));
    assert_eq!(found.lines().count(), 3000);
}

#[test]
fn a_call_that_nobody_waits_for_does_nothing_more() {
    let house = House::new();
    house.put("f", "old\n");
    drop(house.ground.stop.set_on_drop());
    for (tool, told) in house.all_on("f") {
        // What is one step is made or not; the rest ends before its next one.
        if ["read", "write", "edit", "grep", "copy"].contains(&tool) {
            assert!(told.is_err(), "{tool}: {told:?}");
        }
    }
    assert!(!Path::new(&house.path("stolen")).is_file() || !house.path("f").exists());
}
