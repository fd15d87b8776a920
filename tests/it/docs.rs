//! The documentation: links lead somewhere, every page is in the index, and every example works.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

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
    let index = fs::read_to_string(Path::new(ROOT).join("docs/README.md")).expect("the index");
    let targets: BTreeSet<&str> = links(&index).collect();
    let docs = Path::new(ROOT).join("docs");
    for page in pages() {
        if let Ok(name) = page.strip_prefix(&docs)
            && name != Path::new("README.md")
        {
            let name = name.to_str().expect("a name in UTF-8");
            assert!(
                targets.contains(name),
                "docs/README.md has no link to {name}"
            );
        }
    }
}

/// Every page of the documentation.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    let mut pages = vec![root.join("README.md"), root.join("CONTRIBUTING.md")];
    for directory in ["docs", "docs/guide"] {
        let entries = fs::read_dir(root.join(directory)).expect("a directory");
        let files = entries.map(|entry| entry.expect("an entry").path());
        pages.extend(files.filter(|file| file.extension().is_some_and(|end| end == "md")));
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
