//! The directories that runs work in. They are opened by handle below what the operator configures and shared by the
//! runs of one directory. The daemon's own files are out of reach.

pub mod file_id;
pub mod handle;
mod path_resolver;
pub mod registry;
pub mod reserved;
pub mod skill_dir;
pub mod workdir;
