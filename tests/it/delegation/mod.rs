//! Agents that call other agents.

mod ad_hoc;
mod background;
mod call_agent;
mod cancel_tree;
mod depth;
mod pinned_agents;
mod tree_limits;
