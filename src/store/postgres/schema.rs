//! Migrates the database to the tables of this version.

use tokio_postgres::{Client, Transaction};

use crate::store::StoreError;
use crate::store::postgres::error::DatabaseName;

/// Step `n` migrates a database of version `n` to version `n + 1`. Shipped steps are never edited.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/1.sql"),
    include_str!("migrations/2.sql"),
    include_str!("migrations/3.sql"),
    include_str!("migrations/4.sql"),
];
/// The advisory lock of who migrates: `axed` in ASCII.
const MIGRATION_LOCK: i64 = 0x6178_6564;
/// The oldest version of the tables whose programs can use those of this version.
const OLDEST_READER: i64 = 2;

/// Creates the tables, or migrates those of an older version. Of several processes that start at once one does it.
pub async fn migrate(client: &mut Client, name: &DatabaseName) -> Result<(), StoreError> {
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
    apply(&transaction, name).await?;
    transaction
        .commit()
        .await
        .map_err(|error| name.error(&error))
}

async fn apply(transaction: &Transaction<'_>, name: &DatabaseName) -> Result<(), StoreError> {
    let error = |error| name.error(&error);
    // Of two that create a table at once one would fail, whether it may exist or not.
    transaction
        .execute("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK])
        .await
        .map_err(error)?;
    // IF NOT EXISTS would have the server send a notice at each start.
    let is_new = transaction
        .query_one("SELECT to_regclass('axed_schema') IS NULL", &[])
        .await
        .and_then(|row| row.try_get::<_, bool>(0))
        .map_err(error)?;
    if is_new {
        transaction
            .batch_execute(
                "CREATE TABLE axed_schema (version bigint NOT NULL, oldest_reader bigint NOT NULL)",
            )
            .await
            .map_err(error)?;
    }
    transaction
        .batch_execute("LOCK TABLE axed_schema IN EXCLUSIVE MODE")
        .await
        .map_err(error)?;
    let found = transaction
        .query_opt(
            "SELECT version, oldest_reader FROM axed_schema FOR UPDATE",
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
    if oldest_reader > current_version() {
        return Err(StoreError::Backend(format!(
            "{name} was written by a newer version of axed (its tables are version {version}, this one knows {}); \
             start that version, or choose another database",
            current_version()
        )));
    }
    let pending = usize::try_from(version).unwrap_or(0);
    for sql in MIGRATIONS.iter().skip(pending) {
        transaction.batch_execute(sql).await.map_err(error)?;
    }
    if version < current_version() {
        let versions: [&(dyn tokio_postgres::types::ToSql + Sync); 2] =
            [&current_version(), &OLDEST_READER];
        let sql = match found {
            Some(_) => "UPDATE axed_schema SET version = $1, oldest_reader = $2",
            None => "INSERT INTO axed_schema (version, oldest_reader) VALUES ($1, $2)",
        };
        transaction.execute(sql, &versions).await.map_err(error)?;
    }
    Ok(())
}

fn current_version() -> i64 {
    i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX)
}
