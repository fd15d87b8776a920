//! `[cluster]`: this process among those that use one PostgreSQL database.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// The name of this process.
    pub node: String,
    /// Whether no two processes have the same name: then a start takes over from the process of its name at once.
    pub unique_names: bool,
    /// What agents may require of the node of their runs.
    pub labels: Vec<String>,
}
