//! What ended runs have used, summed over time, and budgets over time.

mod budgets;
mod sums;
