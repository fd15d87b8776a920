//! Evaluations: what their runs are, how one of them starts with a definition that is no agent's of today, and what all of them
//! show. The driver in `web/evals` starts the runs, because cases are bodies of requests.

pub mod definitions;
pub mod divergence;
pub mod plan;
pub mod result;
pub mod scoring;
