//! What clients change of a run: at the node that drives it, which other nodes send their changes to.

pub mod add_message;
pub mod cancel;
pub mod cancel_anywhere;
pub mod client_results;
pub mod hold;
pub mod perform_change;
pub mod run_change;
pub mod second_look;
pub mod send_change;
