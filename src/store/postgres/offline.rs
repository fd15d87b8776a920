//! Opens the database for a copy of all of it, while no daemon uses it.

use tokio::runtime::Handle;
use tokio_postgres::{Client, Transaction};

use crate::domain::node::NodeId;
use crate::store::StoreError;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::DatabaseName;
use crate::store::postgres::{node, schema};

pub struct Offline {
    pub name: DatabaseName,
    client: Client,
    /// What this process is in the table of nodes.
    node: NodeId,
}

impl Offline {
    /// Connects and migrates the database to the tables of this version. Fails if a daemon uses it, which may take some
    /// seconds to find out.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        let connector = Connector::new("data.url", url, Handle::current())?;
        let connected = connector.connect().await;
        let mut client = connected.map_err(|error| connector.name.error(&error))?;
        schema::migrate(&mut client, &connector.name, schema::MIGRATIONS).await?;
        let node = node::join_alone(&mut client, &connector.name, "axed data migrate").await?;
        Ok(Self {
            name: connector.name,
            client,
            node,
        })
    }

    /// A transaction that keeps daemons from joining. Its statements may take as long as they need.
    pub async fn begin(&mut self) -> Result<Transaction<'_>, StoreError> {
        let error = |error| self.name.error(&error);
        let transaction = self.client.transaction().await.map_err(error)?;
        transaction
            .batch_execute(
                "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0; \
                 SELECT version FROM axed_version FOR UPDATE",
            )
            .await
            .map_err(error)?;
        let left = transaction
            .execute("DELETE FROM nodes WHERE incarnation = $1", &[&self.node.0])
            .await
            .map_err(error)?;
        if left == 0 {
            return Err(StoreError::Backend(format!(
                "{} is in use by an axed that has started meanwhile; stop it, then try again",
                self.name
            )));
        }
        Ok(transaction)
    }

    /// Executes statements outside of a transaction.
    pub async fn execute(&self, sql: &str) -> Result<(), StoreError> {
        let done = self.client.batch_execute(sql).await;
        done.map_err(|error| self.name.error(&error))
    }
}
