//! `run_command`: runs a model's shell command in a sandbox, under a supervisor that kills its whole process tree.

#[cfg(target_os = "linux")]
mod cgroup;
mod containment;
pub mod limits;
#[cfg(target_os = "linux")]
mod namespaces;
#[cfg(target_os = "linux")]
mod process_tree;
#[cfg(target_os = "linux")]
mod sandbox;
#[cfg(target_os = "linux")]
mod seccomp;
pub mod supervisor;
pub mod tool;
#[cfg(target_os = "linux")]
mod usage;
