//! `[cluster]`: this process among those that use one PostgreSQL database.

use crate::domain::node::check_labels;
use crate::settings::kinds::{Flag, Parsed, Unique};
use crate::settings::section::section;

section! {
    /// `[cluster]`
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Cluster {
        /// The name of this process.
        pub node: String, Parsed(check_node_name);
        /// Whether no two processes have the same name: then a start takes over from the process of its name at once.
        pub unique_names: bool, Flag;
        /// What agents may require of the node of their runs.
        pub labels: Vec<String>, Unique(|labels| check_labels(&labels).map(|()| labels));
    }
}

fn check_node_name(name: &str) -> Result<String, String> {
    match name.chars().any(char::is_control) {
        true => Err("contains a control character".to_owned()),
        false => Ok(name.to_owned()),
    }
}
