//! Holds the house against its plan: imports run down the floors, and a crate is named only where its fence is.
//! `docs/ARCHITECTURE.md` draws the same; when the plan changes, both change in one commit.

use std::fs;
use std::path::{Path, PathBuf};

/// Rooms and their floors. A room is the first path segment below `src/`, or the first two where a folder has several.
const FLOORS: &[(&str, u8)] = &[
    ("main", 7),
    ("cli", 6),
    ("app", 5),
    ("web", 4),
    ("engine", 3),
    ("webhooks", 3),
    ("tools", 2),
    ("providers", 2),
    ("store", 2),
    ("catalog", 2),
    ("telemetry", 2),
    ("config", 1),
    ("domain", 1),
    ("fair", 1),
    ("ssrf", 1),
    ("validation", 1),
    ("workdirs", 1),
];

/// Crates that may be named only in these places (a room, or a file without `.rs`).
const FENCES: &[(&str, &[&str])] = &[
    ("axum", &["web", "app"]),
    ("tower", &["web", "app"]),
    ("tower_http", &["web", "app"]),
    ("hyper", &["web", "providers/http_client"]),
    ("hyper_util", &["web", "providers/http_client"]),
    (
        "reqwest",
        &[
            "ssrf/ssrf_client",
            "providers/http_client",
            "telemetry/otlp",
            "webhooks/http",
            "tools/mcp",
            "tools/web",
            "cli",
        ],
    ),
    ("prost", &["telemetry/otlp"]),
    ("rmcp", &["tools/mcp"]),
    ("rusqlite", &["store"]),
    ("anstream", &["cli/output", "tools/shell/supervisor"]),
    ("clap", &["cli"]),
    ("toml", &["config", "catalog", "providers/scripted"]),
    ("anyhow", &["main", "cli", "app"]),
    ("notify", &["catalog"]),
    ("jsonschema", &["domain/json_schema"]),
    ("cap_std", &["tools", "workdirs"]),
    ("cap_fs_ext", &["tools", "workdirs"]),
    ("cap_tempfile", &["tools"]),
    ("html5gum", &["tools/web/html"]),
    ("landlock", &["tools/shell/sandbox"]),
    ("nix", &["tools/shell/sandbox"]),
    ("seccompiler", &["tools/shell/seccomp"]),
    ("libc", &["tools/shell/seccomp"]),
    ("ignore", &["tools/files"]),
    ("grep_regex", &["tools/files"]),
    ("grep_searcher", &["tools/files"]),
    ("notify_debouncer_full", &["catalog"]),
];

/// Rooms that may import a sibling of their own floor: the plan's few exceptions.
const SIBLINGS: &[(&str, &str)] = &[
    ("providers", "config"),
    ("config", "domain"),
    ("config", "ssrf"),
    ("validation", "domain"),
    ("validation", "fair"),
];

#[test]
fn imports_run_down_the_floors() {
    let mut faults = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file);
        let floor = floor(&room, &file);
        for used in paths_after(&text, "crate::") {
            if used == room || SIBLINGS.contains(&(room.as_str(), used.as_str())) {
                continue;
            }
            let below = floor_of(&used).unwrap_or_else(|| {
                panic!("src/{file}.rs names crate::{used}, which has no floor: add it to FLOORS and to docs/ARCHITECTURE.md")
            });
            if below >= floor {
                faults.push(format!(
                    "src/{file}.rs (floor {floor}) imports crate::{used} (floor {below}): imports run to a lower floor \
                     only; hand the thing in from above, or move the code to the floor that needs it"
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_crate_is_named_only_within_its_fence() {
    let mut faults = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file);
        for (name, places) in FENCES {
            let named = paths_before(&text, name);
            let allowed = places.iter().any(|place| {
                *place == room || file == *place || file.starts_with(&format!("{place}/"))
            });
            if named && !allowed {
                faults.push(format!(
                    "src/{file}.rs names {name}, which belongs to {}: ask that room for what you need",
                    places.join(", ")
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn no_room_is_re_exported_and_none_reaches_up_by_super() {
    for (file, text) in sources() {
        assert!(
            !text.contains("pub use "),
            "src/{file}.rs re-exports: import by the full path instead"
        );
        assert!(
            !text.contains("super::super"),
            "src/{file}.rs climbs with super::super: use the full crate:: path"
        );
    }
}

/// Every source file, as its path below `src/` without `.rs`, without comments and without its tests.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&root, &mut files);
    assert!(
        files.len() > 20,
        "the walk found only {} files",
        files.len()
    );
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("a source file");
        let code = text
            .split("#[cfg(test)]\nmod tests")
            .next()
            .unwrap_or_default();
        let code: Vec<&str> = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .collect();
        let name = path
            .strip_prefix(&root)
            .expect("below src")
            .with_extension("");
        (name.to_string_lossy().replace('\\', "/"), code.join("\n"))
    };
    files.into_iter().map(read).collect()
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
}

fn room_of(file: &str) -> String {
    file.split('/').next().unwrap_or(file).to_owned()
}

fn floor_of(room: &str) -> Option<u8> {
    FLOORS
        .iter()
        .find(|(name, _)| *name == room)
        .map(|(_, floor)| *floor)
}

fn floor(room: &str, file: &str) -> u8 {
    match room {
        "lib" => u8::MAX,
        _ => floor_of(room)
            .unwrap_or_else(|| panic!("src/{file}.rs is in no room of the plan: give it a floor")),
    }
}

/// The first segment after each `prefix` in the code, groups like `crate::{a, b}` included.
fn paths_after(text: &str, prefix: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(prefix) {
        let rest = &text[at + prefix.len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let group = group.split('}').next().unwrap_or_default();
            found.extend(
                group
                    .split(',')
                    .map(|part| segment(part.trim()))
                    .filter(|part| !part.is_empty()),
            );
        } else {
            found.push(segment(rest));
        }
    }
    found
}

fn segment(text: &str) -> String {
    text.chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect()
}

/// Whether the code names `krate` as the head of a path.
fn paths_before(text: &str, krate: &str) -> bool {
    let head = format!("{krate}::");
    text.match_indices(&head).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':')
    })
}
