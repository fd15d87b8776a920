//! What the engine does beside other nodes that share its database.

pub mod budgets;
pub mod cancel_anywhere;
pub mod claims;
pub mod connection;
pub mod follow;
pub mod message_loop;
pub mod node_tasks;
pub mod other_agents;
pub mod perform_change;
pub mod permits;
pub mod retry_log;
pub mod run_change;
pub mod send_change;
pub mod serve_follower;
pub mod text_gate;
pub mod unserved;
pub mod wait;
pub mod wake_up;
