//! The labels that nodes need to drive unfinished trees: rows of PostgreSQL have them, SQLite's do not.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tokio_postgres::{Error, Transaction};
use uuid::Uuid;

use crate::domain::agent::Agent;

/// The labels that a node needs to drive a tree of an agent with this definition.
pub type NodeLabels<'l> = &'l (dyn Fn(&Agent) -> Vec<String> + Sync);

const DEFINITIONS: &str = "SELECT hash, body FROM definitions WHERE hash IN \
     (SELECT r.definition FROM runs r JOIN trees t ON t.root = r.root)";
const RUNS: &str = "SELECT DISTINCT r.root, r.definition FROM runs r JOIN trees t ON t.root = r.root \
     WHERE r.definition = ANY($1)";

/// Sets the labels of the trees: those of the definitions that their runs have.
pub async fn set(target: &Transaction<'_>, node_labels: NodeLabels<'_>) -> Result<(), Error> {
    let mut by_definition: HashMap<Vec<u8>, Vec<String>> = HashMap::new();
    for row in target.query(DEFINITIONS, &[]).await? {
        // A run without a valid definition fails when it is resumed, wherever that is.
        if let Ok(agent) = serde_json::from_slice::<Agent>(row.try_get("body")?) {
            by_definition.insert(row.try_get("hash")?, node_labels(&agent));
        }
    }
    by_definition.retain(|_, labels| !labels.is_empty());
    let hashes: Vec<&[u8]> = by_definition.keys().map(Vec::as_slice).collect();
    let mut by_tree: BTreeMap<Uuid, BTreeSet<&str>> = BTreeMap::new();
    for row in target.query(RUNS, &[&hashes]).await? {
        let definition: Vec<u8> = row.try_get("definition")?;
        let labels = by_definition.get(&definition).into_iter().flatten();
        let tree = by_tree.entry(row.try_get("root")?).or_default();
        tree.extend(labels.map(String::as_str));
    }
    for (root, labels) in by_tree {
        let labels: Vec<&str> = labels.into_iter().collect();
        let update = "UPDATE trees SET labels = $2 WHERE root = $1";
        target.execute(update, &[&root, &labels]).await?;
    }
    Ok(())
}
