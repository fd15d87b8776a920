//! The environment and the directories that the readers of all sections need.

use std::path::PathBuf;

use crate::config::environment::Environment;

pub(in crate::config) struct LoadContext<'e> {
    pub(in crate::config) environment: &'e Environment,
    pub(in crate::config) home: Option<PathBuf>,
    pub(in crate::config) config_dir: PathBuf,
    pub(in crate::config) config_file: PathBuf,
}
