//! Forks: new trees that continue from a copy of a part of another tree's record. The copy is committed with the new root,
//! in one transaction; then the root continues as after a restart.

pub mod cut;
pub mod definitions;
pub mod plan;
pub mod request;
mod restrict;
pub mod source;
pub mod start;
