//! Evaluations: what their runs are, and what all of them show.

pub mod plan;
pub mod result;
