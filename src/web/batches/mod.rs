//! Batches of runs: clients send many requests at once, as lines of JSON. The lines are in the record before the batch is
//! accepted; the feeder starts their runs a few at a time.

pub mod feeder;
pub mod line;
