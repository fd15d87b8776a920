//! The files that an agent's memory cannot be in: those of the daemon. Blocking I/O.

use std::path::{Component, Path, PathBuf, absolute};

use crate::config::Config;
use crate::domain::memory_entry::MEMORY_DIR;

/// The daemon's own paths.
#[derive(Clone, Debug, Default)]
pub struct MemoryPaths {
    /// The default place of memories, which lies in the data directory.
    memory_dir: PathBuf,
    /// The configuration, data and secrets: files, and directories with all below them.
    reserved: Vec<PathBuf>,
    /// Agents and scripts: files, and directories whose `.toml` files the daemon reads.
    toml_dirs: Vec<PathBuf>,
}

impl MemoryPaths {
    pub fn from_config(config: &Config) -> Self {
        let own = [&config.config_file, &config.data.dir, &config.logins.dir];
        let scripts = config.providers.values().flat_map(|it| &it.scripts);
        Self {
            memory_dir: config.data.dir.join(MEMORY_DIR),
            reserved: own
                .into_iter()
                .chain(&config.secret_files)
                .cloned()
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
                "memory.path {shown} belongs to the daemon (configuration, agents, scripts, data or secrets); name another \
                 file, such as one in {}",
                memory_dir.display()
            )
        })
    }

    fn is_own(&self, file: &Path) -> bool {
        let memory_dir = resolve(&self.memory_dir);
        if file.starts_with(&memory_dir) && file != memory_dir {
            return false;
        }
        let is_toml = file.extension().is_some_and(|it| it == "toml");
        let mut reserved = self.reserved.iter();
        let mut toml_dirs = self.toml_dirs.iter();
        reserved.any(|own| file.starts_with(resolve(own)))
            || (is_toml && toml_dirs.any(|own| file.starts_with(resolve(own))))
    }
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
            reserved: vec![at("config/axed.toml"), at("data")],
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
            ("data/memory", "belongs to the daemon"),
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
        ] {
            assert_eq!(refusal(path), None, "{path}");
        }
    }
}
