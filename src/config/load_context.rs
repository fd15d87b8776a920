//! The environment and the directories that the readers of all sections need.

use std::path::PathBuf;

use crate::config::environment::Environment;
use crate::settings::kinds::expand_home;
use crate::settings::table_reader::TableReader;

pub(in crate::config) struct LoadContext<'e> {
    pub(in crate::config) environment: &'e Environment,
    pub(in crate::config) home: Option<PathBuf>,
    pub(in crate::config) config_dir: PathBuf,
    pub(in crate::config) config_file: PathBuf,
}

impl LoadContext<'_> {
    /// Expands `~`. The error follows the key's name.
    pub(in crate::config) fn resolve_path(&self, text: &str) -> Result<PathBuf, String> {
        if text.trim().is_empty() {
            return Err("must not be an empty path".to_owned());
        }
        if self.home.is_none() && (text == "~" || text.starts_with("~/")) {
            return Err("starts with ~, but HOME is not set; write the absolute path".to_owned());
        }
        Ok(expand_home(text, self.home.as_deref()))
    }

    pub(in crate::config) fn read_paths(
        &self,
        reader: &mut TableReader<'_>,
        key: &'static str,
    ) -> Option<Vec<PathBuf>> {
        let node = reader.peek(key)?;
        let texts = reader.text_list(key)?;
        let paths: Result<Vec<PathBuf>, String> =
            texts.iter().map(|text| self.resolve_path(text)).collect();
        match paths {
            Ok(paths) => Some(paths),
            Err(message) => {
                reader.push_invalid(&node, key, &message);
                None
            }
        }
    }
}
