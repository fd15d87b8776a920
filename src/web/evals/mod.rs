//! Evaluations of agents: their cases are bodies of requests, as lines of batches are; the driver starts their runs, behind live
//! work, has them scored, and measures.

pub mod driver;
mod queue;
pub mod recorded_case;
pub mod request;
pub mod scheduled;
