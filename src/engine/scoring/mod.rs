//! Scores live runs after their end with the scorers of their agents: what is to be scored is recorded with the end of the run.

pub mod driver;
pub mod perform;
