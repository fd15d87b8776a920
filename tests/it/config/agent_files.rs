//! Agent files on disk: which count, which win, what a broken one leaves, and how soon a change is in force.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axed::catalog::reload::Catalog;
use axed::catalog::{Agents, Rules, read, template};

use crate::support::within_timeout;

const GOOD: &str = "name = \"a\"\nmodel = \"p/m\"\n";

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
    fs::write(path, text).expect("a file");
}

/// Waits for a snapshot of which `holds` is true.
async fn until(catalog: &Catalog, holds: impl Fn(&Agents) -> bool) -> Arc<Agents> {
    let mut news = catalog.subscribe();
    let found = async {
        loop {
            // Marked as seen before looking: a change in between is noticed.
            news.borrow_and_update();
            let agents = catalog.current();
            if holds(&agents) {
                return agents;
            }
            news.changed().await.expect("a catalogue");
        }
    };
    within_timeout("the files in force", found).await
}

fn version(agents: &Agents, name: &str) -> Option<String> {
    Some(agents.get(name).ok()?.version.clone())
}

#[test]
fn the_first_directory_wins_and_other_files_are_ignored() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    write(
        &first.join("a.toml"),
        &format!("{GOOD}description = \"first\"\n"),
    );
    write(&second.join("a.toml"), GOOD);
    write(
        &second.join("b.toml"),
        "name = \"other\"\nmodel = \"p/m\"\n",
    );
    write(&second.join("broken.toml"), "name = \"broken\"\n");
    write(&second.join("no agent.toml"), GOOD);
    write(&second.join(".hidden.toml"), GOOD);
    write(&second.join("notes.md"), "notes");
    fs::create_dir(second.join("dir.toml")).expect("a directory");
    symlink("b.toml", second.join("link.toml")).expect("a link");
    symlink("nowhere", second.join("dangling.toml")).expect("a link");

    let dirs = vec![first.clone(), second.clone(), dir.path().join("missing")];
    let catalog = Catalog::open(dirs, Rules::default());
    let agents = catalog.current();
    let names: Vec<&str> = agents.entries.keys().map(String::as_str).collect();
    assert_eq!(names, ["a", "b", "broken", "dangling", "link"]);
    assert_eq!(
        agents.get("a").expect("a").description.as_deref(),
        Some("first")
    );
    let hidden = format!("hides {}", second.join("a.toml").display());
    let warnings = |name: &str| {
        let warnings = agents.entries[name].warnings.iter();
        warnings
            .map(|it| it.format_in("f"))
            .collect::<Vec<String>>()
    };
    assert_eq!(warnings("a"), [format!("f: {hidden}")]);
    assert_eq!(
        warnings("b"),
        ["f:1:1: name is \"other\", but the file makes it \"b\""]
    );
    let ignored = agents.ignored_files.iter();
    let ignored: Vec<_> = ignored.map(|(path, why)| (path, why.is_error())).collect();
    let (hidden, misnamed) = (second.join("a.toml"), second.join("no agent.toml"));
    assert_eq!(ignored, [(&hidden, false), (&misnamed, true)]);
    let why = |name: &str| agents.get(name).expect_err("no agent").to_string();
    assert_eq!(why("broken"), "agent config missing required field: model");
    assert!(why("dangling").starts_with("failed to parse agent config \"dangling\": "));
    assert_eq!(why("../a"), "agent config not found: ../a");
    assert_eq!(agents.get("link").expect("a link").name, "link");
}

#[test]
fn an_invalid_file_keeps_its_last_valid_definition_and_an_unchanged_file_its_value() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("a.toml");
    write(&file, GOOD);
    write(&dir.path().join("b.toml"), GOOD);
    let catalog = Catalog::open(vec![dir.path().to_owned()], Rules::default());
    let before = catalog.current();

    catalog.reload();
    assert!(Arc::ptr_eq(&before, &catalog.current()));

    write(&file, "name = ");
    catalog.reload();
    let broken = catalog.current();
    assert!(broken.entries["a"].error.is_some());
    let same = |name: &str| {
        Arc::ptr_eq(
            before.get(name).expect("good"),
            broken.get(name).expect("good"),
        )
    };
    assert!(same("a") && same("b"));

    write(&file, &format!("{GOOD}stream = true\n"));
    fs::remove_file(dir.path().join("b.toml")).expect("removed");
    catalog.reload();
    let after = catalog.current();
    assert!(after.get("a").expect("good").stream && after.entries["a"].error.is_none());
    assert_eq!(
        after.get("b").expect_err("gone").to_string(),
        "agent config not found: b"
    );
}

#[tokio::test]
async fn a_changed_file_is_loaded_automatically() {
    let dir = tempfile::tempdir().expect("a directory");
    // The directory appears after the watch has begun.
    let agents = dir.path().join("agents");
    let catalog = Arc::new(Catalog::open(vec![agents.clone()], Rules::default()));
    let watch = catalog.watch().expect("a watch");
    assert!(catalog.current().entries.is_empty());
    write(&agents.join("a.toml"), GOOD);
    let first = until(&catalog, |agents| agents.get("a").is_ok()).await;

    // An editor writes beside it and renames.
    write(&agents.join(".a.swp"), &format!("{GOOD}stream = true\n"));
    fs::rename(agents.join(".a.swp"), agents.join("a.toml")).expect("renamed");
    let second = until(&catalog, |now| version(now, "a") != version(&first, "a")).await;
    assert!(second.get("a").expect("a").stream);

    fs::remove_file(agents.join("a.toml")).expect("removed");
    until(&catalog, |agents| agents.entries.is_empty()).await;

    // The whole directory is replaced.
    fs::rename(&agents, dir.path().join("old")).expect("renamed");
    write(&agents.join("c.toml"), GOOD);
    until(&catalog, |agents| agents.get("c").is_ok()).await;
    write(&agents.join("d.toml"), GOOD);
    until(&catalog, |agents| agents.get("d").is_ok()).await;
    drop(watch);
}

#[tokio::test]
async fn a_swapped_link_is_a_change() {
    // As Kubernetes mounts a config map: files are links through `..data`, which is swapped by a rename.
    let dir = tempfile::tempdir().expect("a directory");
    let mount = dir.path();
    write(&mount.join("..1/a.toml"), GOOD);
    write(&mount.join("..2/a.toml"), &format!("{GOOD}stream = true\n"));
    symlink("..1", mount.join("..data")).expect("a link");
    symlink("..data/a.toml", mount.join("a.toml")).expect("a link");
    let catalog = Arc::new(Catalog::open(vec![mount.to_owned()], Rules::default()));
    let _watch = catalog.watch().expect("a watch");
    assert!(!catalog.current().get("a").expect("a").stream);
    symlink("..2", mount.join("..next")).expect("a link");
    fs::rename(mount.join("..next"), mount.join("..data")).expect("swapped");
    until(&catalog, |agents| {
        agents.get("a").is_ok_and(|agent| agent.stream)
    })
    .await;
}

#[test]
fn every_agent_that_ships_is_valid() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut open = vec![root.join("agents")];
    let mut files: Vec<PathBuf> = Vec::new();
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.path() {
                // Scripts are TOML too, and no agents.
                path if path.ends_with("scripts") => {}
                path if path.is_dir() => open.push(path),
                path if path.extension().is_some_and(|it| it == "toml") => files.push(path),
                _ => {}
            }
        }
    }
    for path in files {
        let bytes = fs::read(&path).expect("a file");
        let name = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .expect("a name");
        match read::read(name, &path, &bytes) {
            Ok(file) => assert_eq!(file.warnings, [], "{}", path.display()),
            Err(invalid) => panic!("{}: {}", path.display(), invalid.error),
        }
    }
}

#[test]
fn the_template_is_a_valid_agent() {
    let dir = tempfile::tempdir().expect("a directory");
    write(
        &dir.path().join("new.toml"),
        &template::template("new", &template::default_model()),
    );
    let agents = Catalog::open(vec![dir.path().to_owned()], Rules::default()).current();
    assert_eq!(agents.get("new").expect("an agent").name, "new");
}
