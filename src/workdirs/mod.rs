//! The directories that runs work in: opened by handle below what the operator names, shared by the runs of one
//! directory, with the daemon's own files out of reach.

pub mod file_id;
pub mod handle;
mod path_resolver;
pub mod registry;
pub mod reserved;
pub mod workdir;
