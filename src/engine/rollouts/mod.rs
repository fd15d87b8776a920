//! Takes candidates off that are worse, and makes them the current version.

pub mod change;
pub mod comparison;
pub mod driver;
