//! What a pooler before the database may not keep: prepared statements, the settings of a session.

use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};
use tracing::warn;

use crate::store::StoreError;
use crate::store::postgres::connect::Connector;

/// A pooler with a single session has none for the second client.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Fails if prepared statements are lost between transactions: their names could be those of another node's. Warns of lost settings.
pub async fn check(connector: &Connector, client: &Client) -> Result<(), StoreError> {
    let name = &connector.name;
    check_statements(connector, client).await.map_err(|error| {
        if matches!(
            error.code(),
            Some(
                &(SqlState::INVALID_SQL_STATEMENT_NAME | SqlState::DUPLICATE_PSTATEMENT)
            )
        ) {
            return StoreError::Backend(format!(
                "{name}: a pooler there does not keep prepared statements between transactions; set max_prepared_statements \
                 (PgBouncer 1.21 or newer), or use its session mode"
            ));
        }
        name.error(&error)
    })?;
    if !has_settings(client)
        .await
        .map_err(|error| name.error(&error))?
    {
        warn!(
            "{name}: a pooler drops the time limits of sessions, so a node that is cut off may keep locks; give them to the database's user with ALTER ROLE (docs/operations/postgresql.md#behind-a-pooler)"
        );
    }
    Ok(())
}

/// Executes a prepared statement after another client may have got the session in which it was prepared.
async fn check_statements(connector: &Connector, client: &Client) -> Result<(), Error> {
    let session = client.prepare("SELECT pg_backend_pid()").await?;
    client.query_one(&session, &[]).await?;
    let other = connector.connect().await?;
    // Keeps the session that was free last.
    other.batch_execute("BEGIN").await?;
    let again = tokio::time::timeout(CHECK_TIMEOUT, client.query_one(&session, &[])).await;
    other.batch_execute("ROLLBACK").await?;
    again.map_or(Ok(()), |again| again.map(drop))
}

/// Whether the session has the time limits that it was opened with.
async fn has_settings(client: &Client) -> Result<bool, Error> {
    let setting = "SELECT current_setting('idle_in_transaction_session_timeout') <> '0'";
    client.query_one(setting, &[]).await?.try_get(0)
}
