//! The files that an agent's memory cannot be in: those of the daemon. Blocking I/O.

use std::path::{Component, Path, PathBuf, absolute};

use crate::config::Config;
use crate::config::environment::skills_dir;
use crate::domain::memory_entry::MEMORY_DIR;

/// The names of the database and its logs in a data directory begin with this.
const DATABASE: &str = "axed.db";
/// What else axed writes in a data directory, but for memories.
const DATA_NAMES: [&str; 4] = ["lock", "reserve", "openapi", "memory.new"];

/// The daemon's own paths.
#[derive(Clone, Debug, Default)]
pub struct MemoryPaths {
    /// The default place of memories, which lies in the data directory.
    memory_dir: PathBuf,
    /// The data directories, of which only what axed writes is its own.
    data_dirs: Vec<PathBuf>,
    /// The configuration, logins, skills and secrets: files, and directories with all below them.
    reserved: Vec<PathBuf>,
    /// Agents and scripts: files, and directories whose `.toml` files the daemon reads.
    toml_dirs: Vec<PathBuf>,
}

impl MemoryPaths {
    pub fn from_config(config: &Config) -> Self {
        let own = [
            config.config_file.clone(),
            config.logins.dir.clone(),
            skills_dir(&config.config_dir),
        ];
        let configured = config.configured_data_dir.as_ref();
        let scripts = config.providers.values().flat_map(|it| &it.scripts);
        Self {
            memory_dir: configured.unwrap_or(&config.data.dir).join(MEMORY_DIR),
            data_dirs: [&config.data.dir]
                .into_iter()
                .chain(&config.configured_data_dir)
                .cloned()
                .collect(),
            reserved: own
                .into_iter()
                .chain(config.secret_files.iter().cloned())
                .collect(),
            toml_dirs: config.agents.dirs.iter().chain(scripts).cloned().collect(),
        }
    }

    /// Why `memory.path` cannot be this one; `None` if it can.
    pub fn refusal(&self, path: &Path) -> Option<String> {
        let shown = path.display();
        let names_dir = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        if names_dir || path.is_dir() {
            return Some(format!(
                "memory.path {shown} is a directory; name a file in it"
            ));
        }
        let memory_dir = &self.memory_dir;
        self.is_own(&resolve(path)).then(|| {
            format!(
                "memory.path {shown} belongs to the daemon (configuration, agents, skills, scripts, data or secrets); \
                 name another file, such as one in {}",
                memory_dir.display()
            )
        })
    }

    fn is_own(&self, file: &Path) -> bool {
        let is_toml = file.extension().is_some_and(|it| it == "toml");
        let mut data_dirs = self.data_dirs.iter();
        let mut reserved = self.reserved.iter();
        let mut toml_dirs = self.toml_dirs.iter();
        data_dirs.any(|dir| is_written_by_axed(file, &resolve(dir)))
            || reserved.any(|own| file.starts_with(resolve(own)))
            || (is_toml && toml_dirs.any(|own| file.starts_with(resolve(own))))
    }
}

/// Whether axed writes this file of its data directory, other than as a memory.
fn is_written_by_axed(file: &Path, data_dir: &Path) -> bool {
    let Ok(in_data_dir) = file.strip_prefix(data_dir) else {
        return false;
    };
    let Some(name) = in_data_dir.components().next() else {
        return true;
    };
    let name = name.as_os_str();
    name.as_encoded_bytes().starts_with(DATABASE.as_bytes())
        || DATA_NAMES.iter().any(|own| name == *own)
        || in_data_dir == Path::new(MEMORY_DIR)
}

/// The absolute path without links, as far as it exists.
fn resolve(path: &Path) -> PathBuf {
    let Ok(path) = absolute(path) else {
        return path.to_owned();
    };
    for existing in path.ancestors() {
        let Ok(mut resolved) = existing.canonicalize() else {
            continue;
        };
        let missing = path.strip_prefix(existing).unwrap_or(Path::new(""));
        for part in missing.components() {
            match part {
                Component::ParentDir => drop(resolved.pop()),
                other => resolved.push(other),
            }
        }
        return resolved;
    }
    path
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::MemoryPaths;
    use crate::config::environment::Environment;
    use crate::config::load::{Flags, load};

    #[test]
    fn a_memory_is_no_file_of_the_daemon() {
        let home = tempfile::tempdir().expect("a directory");
        let at = |path: &str| home.path().join(path);
        fs::create_dir_all(at("agents")).expect("a directory");
        fs::create_dir_all(at("config")).expect("a directory");
        fs::create_dir_all(at("notes")).expect("a directory");
        symlink("config", at("link")).expect("a link");
        let paths = MemoryPaths {
            memory_dir: at("data/memory"),
            data_dirs: vec![at("data")],
            reserved: vec![at("config/axed.toml"), at("data/logins")],
            toml_dirs: vec![at("agents")],
        };
        let refusal = |path: &str| paths.refusal(&at(path));
        for (path, why) in [
            ("notes", "is a directory"),
            ("missing/", "is a directory"),
            ("config/axed.toml", "belongs to the daemon"),
            ("link/axed.toml", "belongs to the daemon"),
            ("missing/../agents/solo.toml", "belongs to the daemon"),
            ("data/axed.db", "belongs to the daemon"),
            ("data/axed.db-wal", "belongs to the daemon"),
            ("data/lock", "belongs to the daemon"),
            ("data/reserve", "belongs to the daemon"),
            ("data/openapi/petstore", "belongs to the daemon"),
            ("data/logins/token", "belongs to the daemon"),
            ("data/memory.new/solo.md", "belongs to the daemon"),
            ("data/memory", "belongs to the daemon"),
            ("data", "belongs to the daemon"),
        ] {
            let refused = refusal(path);
            assert!(
                refused.as_ref().is_some_and(|text| text.contains(why)),
                "{path}: {refused:?}"
            );
        }
        for path in [
            "notes/solo.md",
            "missing/solo.md",
            "config/solo.md",
            "agents/solo.md",
            "data/memory/solo.md",
            "data/notes/solo.md",
            "data/locks.md",
        ] {
            assert_eq!(refusal(path), None, "{path}");
        }
    }

    #[test]
    fn the_configured_data_directory_is_the_daemons_also_where_another_one_is_used() {
        let home = tempfile::tempdir().expect("a directory");
        let at = |path: &str| home.path().join(path);
        let file = at("axed.toml");
        let text = format!("[data]\ndir = {:?}\n", at("data"));
        fs::write(&file, text).expect("a file");
        let flags = Flags {
            config: Some(file),
            ..Flags::default()
        };
        let config = load(&flags, &Environment::new()).expect("a configuration");
        let paths = MemoryPaths::from_config(&config.with_data_dir(at("temporary")));
        for path in [
            "data/axed.db",
            "data/logins/token",
            "temporary/axed.db",
            "skills/review/SKILL.md",
        ] {
            assert!(paths.refusal(&at(path)).is_some(), "{path}");
        }
        for path in ["data/memory/solo.md", "temporary/solo.md", "solo.md"] {
            assert_eq!(paths.refusal(&at(path)), None, "{path}");
        }
    }
}
