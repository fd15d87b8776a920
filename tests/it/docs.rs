//! The documentation: links lead somewhere, every page is in the index, and every example works.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use crate::support::app::TestApp;
use crate::support::daemon::AXED;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[tokio::test]
async fn the_examples_of_the_guide_work() {
    let output = Command::new("python3")
        .arg(Path::new(ROOT).join("tests/guide.py"))
        .args(["--axed", AXED])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await;
    let Ok(output) = output else {
        eprintln!("skipped: python3 is not installed");
        return;
    };
    let text = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&text)
    );
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut faults = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for target in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => page.clone(),
                file => page.parent().expect("a directory").join(file),
            };
            let is_there = match heading {
                "" => file.exists(),
                heading => {
                    fs::read_to_string(&file).is_ok_and(|text| headings(&text).contains(heading))
                }
            };
            if !is_there {
                faults.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "links to nothing:\n{}",
        faults.join("\n")
    );
}

#[test]
fn the_index_lists_every_page() {
    let docs = Path::new(ROOT).join("docs");
    let indexes = pages()
        .into_iter()
        .filter(|page| page.starts_with(&docs) && page.ends_with("README.md"));
    let listed: BTreeSet<PathBuf> = indexes
        .flat_map(|index| {
            let text = fs::read_to_string(&index).expect("an index");
            let folder = index.parent().expect("a directory").to_owned();
            let targets: Vec<PathBuf> = links(&text)
                .filter_map(|target| Some(folder.join(target.split('#').next()?)))
                .collect();
            targets
        })
        .collect();
    for page in pages() {
        let is_missing = page.starts_with(&docs) && !listed.contains(&page);
        assert!(
            !is_missing || page == docs.join("README.md"),
            "neither docs/README.md nor the README.md of its folder has a link to {}",
            page.display()
        );
    }
}

#[test]
fn a_page_has_at_most_30_kb() {
    for page in pages() {
        let bytes = fs::read(&page).expect("a page").len();
        assert!(
            bytes <= 30_000,
            "{} has {bytes} bytes: split it",
            page.display()
        );
    }
}

#[tokio::test]
async fn the_pages_of_the_api_name_every_route_and_every_code() {
    let app = TestApp::spawn().await;
    let document = app.get("/openapi.json").await.json();
    let read = |page| fs::read_to_string(Path::new(ROOT).join(page)).expect("the page");
    let (routes, errors) = (read("docs/api/README.md"), read("docs/api/errors.md"));
    let mut missing = Vec::new();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for method in operations.as_object().expect("operations").keys() {
            let method = method.to_uppercase();
            let mut lines = routes.lines();
            if !lines.any(|line| line.contains(&method) && has_path(line, path)) {
                missing.push(format!("{method} {path} in the table of routes"));
            }
        }
    }
    let codes = &document["components"]["schemas"]["ProblemCode"]["enum"];
    for code in codes.as_array().expect("codes") {
        let code = code.as_str().expect("a text");
        if !errors.contains(&format!("`{code}`")) {
            missing.push(format!("{code} in the table of errors"));
        }
    }
    assert!(
        missing.is_empty(),
        "docs/api lacks:\n{}",
        missing.join("\n")
    );
}

/// Whether the line has this path, and not only as a part of a longer one.
fn has_path(line: &str, path: &str) -> bool {
    let is_of_path = |letter: char| letter.is_alphanumeric() || "/{}:-_".contains(letter);
    let mut places = line.match_indices(path);
    places.any(|(at, _)| {
        let end = at + path.len();
        !line[..at].ends_with(is_of_path) && !line[end..].starts_with(is_of_path)
    })
}

/// Every page of the documentation.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                pages.push(path);
            }
        }
    }
    pages
}

/// The targets of the links outside of code blocks.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let blocks = text.split("\n```").step_by(2);
    blocks.flat_map(|block| {
        let ends = block.split("](").skip(1);
        ends.filter_map(|rest| Some(rest.split_once(')')?.0))
    })
}

/// The anchors of the headings, as GitHub makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let blocks = text.split("\n```").step_by(2);
    let lines = blocks.flat_map(str::lines);
    let titles =
        lines.filter_map(|line| Some(line.strip_prefix('#')?.trim_start_matches('#').trim()));
    titles
        .map(|title| {
            let letters = title.to_lowercase();
            let kept = letters
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}
