//! The tools for the files of a run's workdir. They reach files through the workdir's handle only, so no path and no link
//! leads out of it. They run on blocking threads, and stop early when the call is cancelled.

mod dir_ops;
mod edit;
mod file_ops;
#[cfg(test)]
mod file_tool_tests;
mod find;
mod gitignore;
mod grep;
mod list;
mod pattern;
mod read;
pub mod registry;
#[cfg(test)]
mod security_tests;
#[cfg(test)]
mod test_workdir;
mod tool;
mod walk;
mod workdir_fs;
mod write;
