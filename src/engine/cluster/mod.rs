//! What runs and clients of this node need of the other nodes that share its database: permits, events, texts and ends of runs.

pub mod connection;
pub mod follow;
pub mod permits;
pub mod rate_limits;
pub mod retry_log;
pub mod serve_follower;
pub mod text_gate;
pub mod wait;
