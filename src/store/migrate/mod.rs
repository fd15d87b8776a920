//! Copies a whole store from one engine to the other, while no daemon uses either. A copy is one transaction of the target: it is

mod tables;
mod to_postgres;
