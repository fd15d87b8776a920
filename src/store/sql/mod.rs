//! SQL for both engines: its text, the values of its parameters, and the rows that it returns.

pub mod clock;
pub mod dialect;
pub mod named;
pub mod row;
pub mod value;
