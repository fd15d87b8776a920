//! Evaluations of agents: their cases are bodies of requests, as lines of batches are.

mod queue;
