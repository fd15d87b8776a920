//! Checks the code against `docs/ARCHITECTURE.md`: layers, circles of files, crates, words. If the plan changes,
//! the page and the tables here change in one commit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules below `src/` and their layers.
const LAYERS: &[(&str, u8)] = &[
    ("main", 7),
    ("cli", 6),
    ("app", 5),
    ("web", 4),
    ("engine", 3),
    ("webhooks", 3),
    ("tools", 2),
    ("providers", 2),
    ("signed_http", 2),
    ("store", 2),
    ("catalog", 2),
    ("telemetry", 2),
    ("record", 1),
    ("config", 1),
    ("domain", 1),
    ("fair", 1),
    ("instruments", 1),
    ("ssrf", 1),
    ("standing_task", 1),
    ("validation", 1),
    ("workdirs", 1),
    ("settings", 0),
];

/// Crates that may be named only in these modules (a path below `src/` without `.rs`).
const CRATES: &[(&str, &[&str])] = &[
    ("axum", &["web", "app"]),
    ("tower", &["web", "app", "providers/http_client"]),
    ("tower_http", &["web", "app"]),
    ("hyper", &["web", "providers/http_client"]),
    ("hyper_rustls", &["providers/http_client"]),
    ("hyper_util", &["web", "providers/http_client"]),
    (
        "reqwest",
        &[
            "ssrf/ssrf_client",
            "catalog/document_fetch",
            "telemetry/otlp",
            "signed_http/client",
            "tools/mcp",
            "tools/web",
            "cli",
        ],
    ),
    (
        "aws_lc_rs",
        &[
            "tools/mcp/oauth/logins/cipher",
            "store/postgres/tls",
            "providers/http_client/connector",
        ],
    ),
    ("maud", &["web/console"]),
    ("pulldown_cmark", &["web/console/markdown"]),
    ("prost", &["telemetry/otlp"]),
    ("rmcp", &["tools/mcp", "web/clients/mcp"]),
    ("rusqlite", &["store"]),
    ("tokio_postgres", &["store"]),
    ("deadpool_postgres", &["store/postgres"]),
    ("tokio_postgres_rustls", &["store/postgres"]),
    ("rustls", &["store/postgres", "providers/http_client"]),
    (
        "rustls_platform_verifier",
        &["store/postgres", "providers/http_client"],
    ),
    ("memchr", &["record/stored", "store/request_delta"]),
    (
        "anstream",
        &["cli/output", "cli/style", "tools/shell/supervisor"],
    ),
    ("clap", &["cli"]),
    ("sd_notify", &["cli/service_manager"]),
    ("mimalloc", &["main"]),
    ("clap_complete", &["cli/completions"]),
    ("clap_mangen", &["cli/completions"]),
    ("comfy_table", &["cli/table"]),
    ("rustyline", &["cli/chat_input"]),
    ("tempfile", &["cli", "tools/files/test_workdir"]),
    ("terminal_size", &["cli/output"]),
    ("thread_priority", &["cli/runtime"]),
    (
        "toml",
        &["settings", "config", "catalog", "providers/scripted"],
    ),
    ("toml_edit", &["engine/recording"]),
    ("similar", &["domain/text_diff", "cli/test", "web/console"]),
    (
        "regex",
        &[
            "domain/ignore",
            "domain/redaction",
            "domain/search_text",
            "engine/recording",
            "cli/test",
        ],
    ),
    ("anyhow", &["main", "cli", "app"]),
    ("notify", &["catalog"]),
    ("serde_saphyr", &["domain/yaml"]),
    ("jsonschema", &["domain/json_schema"]),
    ("cap_std", &["tools", "workdirs"]),
    ("cap_fs_ext", &["tools", "workdirs"]),
    ("cap_tempfile", &["tools"]),
    ("html5gum", &["tools/web/html", "tools/web/html_reader"]),
    ("landlock", &["tools/shell/sandbox"]),
    ("nix", &["tools/shell/namespaces", "tools/shell/sandbox"]),
    ("seccompiler", &["tools/shell/seccomp"]),
    ("libc", &["tools/shell/seccomp"]),
    ("ignore", &["tools/files"]),
    ("grep_regex", &["tools/files"]),
    ("grep_searcher", &["tools/files"]),
    ("notify_debouncer_full", &["catalog"]),
];

/// Modules that may import another one of their own layer.
const SIBLINGS: &[(&str, &str)] = &[
    ("providers", "config"),
    ("config", "domain"),
    ("record", "domain"),
    ("config", "ssrf"),
    ("domain", "ssrf"),
    ("validation", "domain"),
    ("validation", "fair"),
];

/// Folders whose direct children, files and folders, import each other in no circle.
const FOLDERS_WITHOUT_CIRCLES: &[&str] = &["engine", "web"];

/// How a circle is undone.
const UNTIE: &str = "move what two of them need to a file below both";

/// Words of this project's former private language, which no other project uses for these things.
const WORDS: &[&str] = &[
    "told",
    "asked",
    "heard",
    "whisper",
    "whispered",
    "bell",
    "seat",
    "shelf",
    "desk",
    "parcel",
    "keeper",
    "blame",
    "whoever",
    "house",
    "room",
];

#[test]
fn imports_go_to_lower_layers() {
    let mut faults = Vec::new();
    for source in sources() {
        let module = source.module();
        let layer = layer_of(module).unwrap_or_else(|| {
            panic!("src/{module} has no layer: add it to LAYERS and to docs/ARCHITECTURE.md")
        });
        for path in &source.imports {
            let used = path[0].as_str();
            if used == module || SIBLINGS.contains(&(module, used)) {
                continue;
            }
            let Some(below) = layer_of(used) else {
                continue;
            };
            if below >= layer {
                faults.push(format!(
                    "src/{} (layer {layer}) imports crate::{used} (layer {below}): take it as a parameter, or move \
                     the code to the layer that needs it",
                    source.name
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let sources = sources();
    let files: BTreeMap<Vec<String>, &String> = sources
        .iter()
        .map(|source| (source.path(), &source.name))
        .collect();
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in &sources {
        let targets = source.imports.iter().filter_map(|path| {
            let lengths = (1..=path.len()).rev();
            lengths
                .map(|length| &path[..length])
                .find_map(|prefix| files.get(prefix).copied())
        });
        edges.insert(source.name.clone(), targets.cloned().collect());
    }
    if let Some(circle) = find_circle(edges) {
        panic!("these files import each other in a circle: {circle}; {UNTIE}");
    }
}

#[test]
fn no_children_of_a_folder_import_each_other_in_a_circle() {
    let sources = sources();
    for folder in FOLDERS_WITHOUT_CIRCLES {
        let folder_path: Vec<String> = folder.split('/').map(str::to_owned).collect();
        let child_of = |path: &[String]| path.strip_prefix(&*folder_path)?.first().cloned();
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for source in &sources {
            if let Some(child) = child_of(&source.path()) {
                let imports = source.imports.iter().filter_map(|path| child_of(path));
                edges.entry(child).or_default().extend(imports);
            }
        }
        assert!(!edges.is_empty(), "src/{folder} has no files");
        if let Some(circle) = find_circle(edges) {
            panic!(
                "these children of src/{folder} import each other in a circle: {circle}; {UNTIE}"
            );
        }
    }
}

#[test]
fn a_crate_is_named_only_in_its_modules() {
    let mut faults = Vec::new();
    for source in sources() {
        for (name, modules) in CRATES {
            let is_allowed = modules.iter().any(|module| {
                source.name == *module || source.name.starts_with(&format!("{module}/"))
            });
            if !is_allowed && names_crate(&source.code, name) {
                faults.push(format!(
                    "src/{} names the crate {name}, which belongs to {}: use what that module offers",
                    source.name,
                    modules.join(", ")
                ));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn nothing_is_re_exported_and_paths_are_full() {
    for source in sources() {
        let name = &source.name;
        assert!(
            !source
                .code
                .lines()
                .any(|line| line.trim_start().starts_with("pub use ")),
            "src/{name} re-exports: import from where it is defined"
        );
        assert!(
            !source.code.contains("super::super"),
            "src/{name} uses super::super: use the full crate:: path"
        );
    }
}

#[test]
fn words_are_those_that_other_projects_use() {
    let mut faults = Vec::new();
    let roots = [
        "src",
        "tests",
        "benches",
        "docs",
        "config",
        "agents",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ];
    for (file, text) in texts(&roots, &["rs", "md", "toml", "sh", "py"]) {
        if file.ends_with("architecture.rs") || file.contains("recordings/") {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            let mut terms = lower.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            if let Some(found) = terms.find(|term| WORDS.contains(term)) {
                faults.push(format!(
                    "{file}:{}: \"{found}\": {}",
                    index + 1,
                    line.trim()
                ));
            }
        }
    }
    assert!(faults.is_empty(), "use plain words:\n{}", faults.join("\n"));
}

/// A file below `src/`.
struct Source {
    /// Without `src/` and `.rs`.
    name: String,
    /// Without comments and unit tests.
    code: String,
    /// Every `crate::` path in the code, without `crate`, and with groups expanded.
    imports: Vec<Vec<String>>,
}

impl Source {
    fn module(&self) -> &str {
        self.name.split('/').next().unwrap_or(&self.name)
    }

    /// As a module path.
    fn path(&self) -> Vec<String> {
        let parts = self.name.split('/').map(str::to_owned);
        parts.filter(|part| part != "mod").collect()
    }
}

fn sources() -> Vec<Source> {
    let files = texts(&["src"], &["rs"]);
    let files = files.into_iter().filter(|(file, _)| file != "src/lib.rs");
    files
        .map(|(file, text)| {
            let name = file
                .trim_start_matches("src/")
                .trim_end_matches(".rs")
                .to_owned();
            let end = text.find("\n#[cfg(test)]\nmod ").unwrap_or(text.len());
            let lines = text[..end]
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            let code = lines.collect::<Vec<_>>().join("\n");
            let imports = crate_paths(&code);
            Source {
                name,
                code,
                imports,
            }
        })
        .collect()
}

/// One circle of imports, if there is any. An import of itself is none, and one of what is no key leads nowhere.
fn find_circle(mut edges: BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    // What imports nothing of what is left cannot be in a circle.
    loop {
        let left: BTreeSet<String> = edges.keys().cloned().collect();
        for (name, targets) in &mut edges {
            targets.retain(|target| target != name && left.contains(target));
        }
        edges.retain(|_, targets| !targets.is_empty());
        if edges.len() == left.len() {
            break;
        }
    }
    // What remains imports a circle or is in one; following any import ends in the circle.
    let mut next = edges.keys().next()?;
    let mut trail: Vec<&str> = Vec::new();
    let start = loop {
        if let Some(start) = trail.iter().position(|step| step == next) {
            break start;
        }
        trail.push(next);
        next = edges[next].first()?;
    };
    Some(format!("{} -> {next}", trail[start..].join(" -> ")))
}

fn layer_of(module: &str) -> Option<u8> {
    LAYERS
        .iter()
        .find(|(name, _)| *name == module)
        .map(|(_, layer)| *layer)
}

/// `crate::a::{b::C, d}` is `a::b::C` and `a::d`.
fn crate_paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        expand(&code[at + "crate::".len()..], &mut Vec::new(), &mut paths);
    }
    paths
}

/// Reads one path or group; returns the rest of the text behind it.
fn expand<'t>(
    mut text: &'t str,
    prefix: &mut Vec<String>,
    paths: &mut Vec<Vec<String>>,
) -> &'t str {
    let depth = prefix.len();
    loop {
        text = text.trim_start();
        if let Some(mut inner) = text.strip_prefix('{') {
            loop {
                inner = expand(inner, prefix, paths).trim_start();
                match inner.strip_prefix(',') {
                    Some(next) => inner = next.trim_start(),
                    None => break,
                }
                if inner.starts_with('}') {
                    break;
                }
            }
            prefix.truncate(depth);
            return inner.strip_prefix('}').unwrap_or(inner);
        }
        let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
        let (segment, rest) = text.split_at(end.unwrap_or(text.len()));
        if segment != "self" {
            prefix.push(segment.to_owned());
        }
        match rest.strip_prefix("::") {
            Some(next) => text = next,
            None => {
                paths.push(prefix.clone());
                prefix.truncate(depth);
                return rest;
            }
        }
    }
}

fn names_crate(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::")).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        !before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_' || letter == ':')
    })
}

/// The project's files with these extensions, by their paths from its root.
fn texts(roots: &[&str], extensions: &[&str]) -> Vec<(String, String)> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let mut open: Vec<PathBuf> = roots.iter().map(|root| project.join(root)).collect();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("a directory");
            open.extend(entries.map(|entry| entry.expect("an entry").path()));
        } else if path
            .extension()
            .is_some_and(|own| extensions.iter().any(|one| own == *one))
        {
            let name = path.strip_prefix(project).expect("below the project");
            files.push((
                name.to_string_lossy().into_owned(),
                fs::read_to_string(&path).expect("text"),
            ));
        }
    }
    files.sort();
    files
}
