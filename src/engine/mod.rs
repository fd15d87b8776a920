//! Runs agents: the loop, delegation, budgets, the record. Knows nothing of HTTP and nothing of storage engines.

pub mod ad_hoc;
pub mod ask;
pub mod budget;
pub mod calls;
pub mod children;
pub mod close;
pub mod collect;
pub mod conversation;
pub mod definitions;
pub mod drive;
pub mod endings;
pub mod entry;
pub mod journal;
pub mod live;
pub mod memory;
pub mod parts;
pub mod quotas;
pub mod record;
pub mod recovery;
pub mod remains;
pub mod resolve;
pub mod retention;
pub mod runner;
pub mod spans;
pub mod turn;
pub mod webhook;
