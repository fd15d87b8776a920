//! The admission queue and its limits.

mod limits;
mod memory;
mod overload;
