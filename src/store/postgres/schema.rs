//! Migrates the database to the tables of this version.

use tokio_postgres::{Client, Transaction};

use crate::store::StoreError;
use crate::store::postgres::error::DatabaseName;

/// The tables of the first release, then a step for each later version. Released ones are never edited.
pub const MIGRATIONS: &[&str] = &[include_str!("schema.sql")];
/// The advisory lock of who migrates: `axed` in ASCII.
const MIGRATION_LOCK: i64 = 0x6178_6564;
/// The oldest version of the tables whose programs can use those of this version.
const OLDEST_READER: i64 = 1;

/// Creates the tables, or migrates those of an older version. Of several processes that start at once one does it.
pub async fn migrate(
    client: &mut Client,
    name: &DatabaseName,
    migrations: &[&str],
) -> Result<(), StoreError> {
    let encoding = client
        .query_one("SHOW server_encoding", &[])
        .await
        .and_then(|row| row.try_get::<_, String>(0))
        .map_err(|error| name.error(&error))?;
    if encoding != "UTF8" {
        return Err(StoreError::Backend(format!(
            "{name} has the encoding {encoding}; create a database with the encoding UTF8"
        )));
    }
    let transaction = client
        .transaction()
        .await
        .map_err(|error| name.error(&error))?;
    apply(&transaction, name, migrations).await?;
    transaction
        .commit()
        .await
        .map_err(|error| name.error(&error))
}

async fn apply(
    transaction: &Transaction<'_>,
    name: &DatabaseName,
    migrations: &[&str],
) -> Result<(), StoreError> {
    let current = i64::try_from(migrations.len()).unwrap_or(i64::MAX);
    let error = |error| name.error(&error);
    // Of two that create a table at once one would fail, whether it may exist or not.
    transaction
        .execute("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK])
        .await
        .map_err(error)?;
    let is_development = transaction
        .query_one("SELECT to_regclass('axed_schema') IS NOT NULL", &[])
        .await
        .and_then(|row| row.try_get::<_, bool>(0))
        .map_err(error)?;
    if is_development {
        return Err(StoreError::Backend(format!(
            "{name} is a database of a development version of axed, from before the first release, which this version does \
             not read; choose another database with data.url"
        )));
    }
    // IF NOT EXISTS would have the server send a notice at each start.
    let is_new = transaction
        .query_one("SELECT to_regclass('axed_version') IS NULL", &[])
        .await
        .and_then(|row| row.try_get::<_, bool>(0))
        .map_err(error)?;
    if is_new {
        transaction
            .batch_execute(
                "CREATE TABLE axed_version (version bigint NOT NULL, oldest_reader bigint NOT NULL)",
            )
            .await
            .map_err(error)?;
    }
    transaction
        .batch_execute("LOCK TABLE axed_version IN EXCLUSIVE MODE")
        .await
        .map_err(error)?;
    let found = transaction
        .query_opt(
            "SELECT version, oldest_reader FROM axed_version FOR UPDATE",
            &[],
        )
        .await
        .map_err(error)?;
    let (version, oldest_reader): (i64, i64) = match &found {
        Some(row) => (
            row.try_get("version").map_err(error)?,
            row.try_get("oldest_reader").map_err(error)?,
        ),
        None => (0, 0),
    };
    if oldest_reader > current {
        return Err(StoreError::Backend(format!(
            "{name} was written by a newer version of axed (its tables are version {version}, this one knows {current}); \
             start that version, or choose another database"
        )));
    }
    let pending = usize::try_from(version).unwrap_or(0);
    for sql in migrations.iter().skip(pending) {
        transaction.batch_execute(sql).await.map_err(error)?;
    }
    if version < current {
        let versions: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&current, &OLDEST_READER];
        let sql = match found {
            Some(_) => "UPDATE axed_version SET version = $1, oldest_reader = $2",
            None => "INSERT INTO axed_version (version, oldest_reader) VALUES ($1, $2)",
        };
        transaction.execute(sql, &versions).await.map_err(error)?;
    }
    Ok(())
}
