//! Copies the rows of a SQLite database to PostgreSQL.

use std::borrow::Cow;
use std::path::Path;
use std::pin::pin;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, Row};
use serde_json::value::RawValue;
use tokio_postgres::Transaction;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::store::StoreError;
use crate::store::encoding::ended_runs::Series;
use crate::store::migrate::node_labels::{self, NodeLabels};
use crate::store::migrate::tables::{Kind, TABLES, Table};
use crate::store::migrate::{CopiedTable, check_count, damaged, memories, not_empty};
use crate::store::postgres::error::{DatabaseName, store_error};
use crate::store::postgres::offline::Offline;
use crate::store::sql::value::Value;
use crate::store::sqlite;
use crate::store::sqlite::error::store_error as sqlite_error;

/// The trees that have not ended, which belong to nobody yet.
const INSERT_TREES: &str = "INSERT INTO trees (root, epoch, last_event, owner, agent, session, permit) \
     SELECT r.id, 0, greatest(r.last_event, coalesce((SELECT max(e.last_seq) FROM entries e WHERE e.root = r.id), 0)), \
     r.owner, r.agent, r.session, CASE r.status WHEN 'queued' THEN 1 WHEN 'waiting' THEN 0 ELSE 2 END \
     FROM runs r WHERE r.parent IS NULL AND r.finished_at IS NULL";
const INSERT_SESSIONS: &str = "INSERT INTO sessions (owner, name, last_run) \
     SELECT DISTINCT ON (coalesce(owner, ''), session) coalesce(owner, ''), session, id FROM runs \
     WHERE session IS NOT NULL AND parent IS NULL ORDER BY coalesce(owner, ''), session, id DESC";
const SET_SERIES: &str = "SELECT setval(pg_get_serial_sequence('usage_series', 'id'), \
     (SELECT coalesce(max(id), 0) + 1 FROM usage_series), false)";

pub async fn copy(
    source: &sqlite::offline::Offline,
    dir: &Path,
    target: &mut Offline,
    labels: NodeLabels<'_>,
) -> Result<Vec<CopiedTable>, StoreError> {
    let db = &source.connection;
    let name = target.name.clone();
    let transaction = target.begin().await?;
    for table in TABLES {
        check_empty(&transaction, &name, table).await?;
    }
    let mut copied = Vec::new();
    for table in TABLES {
        let rows = copy_table(db, &transaction, table).await?;
        let source_rows = count_rows(db, table).map_err(sqlite_error)?;
        check_count(table.name, source_rows, rows)?;
        copied.push(CopiedTable {
            name: table.name,
            rows,
        });
    }
    copied.push(memories::to_postgres(dir, &transaction, &name).await?);
    copy_clock(db, &transaction).await?;
    let make_rest = async {
        transaction.execute(INSERT_TREES, &[]).await?;
        node_labels::set(&transaction, labels).await?;
        transaction.execute(INSERT_SESSIONS, &[]).await?;
        transaction.query_one(SET_SERIES, &[]).await?;
        transaction.commit().await
    };
    make_rest.await.map_err(|error| name.error(&error))?;
    analyze(target).await?;
    Ok(copied)
}

/// Without statistics the first lists would be slow.
async fn analyze(target: &Offline) -> Result<(), StoreError> {
    target.execute("SET statement_timeout = 0; ANALYZE").await
}

async fn check_empty(
    target: &Transaction<'_>,
    name: &DatabaseName,
    table: &Table,
) -> Result<(), StoreError> {
    let sql = format!("SELECT 1 FROM {} LIMIT 1", table.name);
    let found = target.query_opt(&sql, &[]).await;
    match found.map_err(|error| name.error(&error))? {
        Some(_) => Err(not_empty(name, table.name)),
        None => Ok(()),
    }
}

fn count_rows(db: &Connection, table: &Table) -> rusqlite::Result<u64> {
    let sql = format!("SELECT count(*) AS count FROM {}", table.name);
    db.query_row(&sql, [], |row| row.get::<_, i64>("count"))
        .map(i64::unsigned_abs)
}

/// Returns the number of rows that the target has now.
async fn copy_table(
    db: &Connection,
    target: &Transaction<'_>,
    table: &Table,
) -> Result<u64, StoreError> {
    let error = |error: tokio_postgres::Error| match store_error(&error) {
        StoreError::Backend(why) => StoreError::Backend(format!("{}: {why}", table.name)),
        other => other,
    };
    let columns: Vec<(&str, Kind)> = table.columns.iter().chain(table.more).copied().collect();
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let types: Vec<Type> = columns.iter().map(|(_, kind)| column_type(*kind)).collect();
    let copy = format!(
        "COPY {} ({}) FROM STDIN (FORMAT binary)",
        table.name,
        names.join(", ")
    );
    let sink = target.copy_in(&copy).await.map_err(error)?;
    let mut writer = pin!(BinaryCopyInWriter::new(sink, &types));
    let mut sql = db.prepare(&select(table)).map_err(sqlite_error)?;
    let mut found = sql.query([]).map_err(sqlite_error)?;
    while let Some(row) = found.next().map_err(sqlite_error)? {
        let mut values = Vec::with_capacity(columns.len());
        for (index, (name, kind)) in columns.iter().enumerate() {
            values.push(read_value(row, index, *kind, (table.name, name))?);
        }
        if table.name == "usage_series" {
            values.pop();
            values.push(series(row).map_err(sqlite_error)?.digest().into());
        }
        let values: Vec<&(dyn ToSql + Sync)> = values.iter().map(|it| it as _).collect();
        writer.as_mut().write(&values).await.map_err(error)?;
    }
    writer.finish().await.map_err(error)?;
    let count = format!("SELECT count(*) FROM {}", table.name);
    let counted = target.query_one(&count, &[]).await.map_err(error)?;
    let counted: i64 = counted.try_get(0).map_err(error)?;
    Ok(counted.unsigned_abs())
}

/// The columns as the table of the other engine has them.
fn select(table: &Table) -> String {
    let columns = table.columns.iter().chain(table.more);
    let columns: Vec<String> = columns
        .map(|(column, _)| match (table.name, *column) {
            ("runs", "input") => "coalesce(t.input, s.input, '')".to_owned(),
            ("runs", "input_is_parts") => "typeof(coalesce(t.input, s.input)) = 'blob'".to_owned(),
            ("runs", "task") => "coalesce(t.task, s.task)".to_owned(),
            ("runs", "stream") => "coalesce(s.stream, 0)".to_owned(),
            ("usage_series", "digest") => "NULL".to_owned(),
            (_, "writer") => "zeroblob(16)".to_owned(),
            (_, column) => format!("s.{column}"),
        })
        .collect();
    let (more, order) = match table.name {
        // Long inputs have a table of their own there.
        "runs" => ("LEFT JOIN texts t ON t.run = s.id", "ORDER BY s.id"),
        // Those of one write after the other.
        "entries" => ("", "ORDER BY s.root, s.last_seq, s.id"),
        _ => ("", ""),
    };
    format!(
        "SELECT {} FROM {} s {more} {order}",
        columns.join(", "),
        table.name
    )
}

fn column_type(kind: Kind) -> Type {
    match kind {
        Kind::Id => Type::UUID,
        Kind::Int => Type::INT8,
        Kind::Flag => Type::BOOL,
        Kind::Text => Type::TEXT,
        Kind::FreeText | Kind::Bytes => Type::BYTEA,
        Kind::List => Type::TEXT_ARRAY,
    }
}

fn read_value<'r>(
    row: &'r Row<'_>,
    index: usize,
    kind: Kind,
    (table, column): (&str, &str),
) -> Result<Value<'r>, StoreError> {
    let value = row.get_ref(index).map_err(sqlite_error)?;
    let made = match (kind, value) {
        (_, ValueRef::Null) => Some(Value::Null),
        (Kind::Id, ValueRef::Blob(bytes)) => Uuid::from_slice(bytes).ok().map(Value::Uuid),
        (Kind::Int, ValueRef::Integer(number)) => Some(Value::Int(number)),
        (Kind::Flag, ValueRef::Integer(number)) => Some(Value::Bool(number != 0)),
        (Kind::Text, ValueRef::Text(bytes)) => {
            let text = std::str::from_utf8(bytes).ok();
            text.map(|text| Value::Text(Cow::Borrowed(text)))
        }
        (Kind::FreeText, ValueRef::Text(bytes) | ValueRef::Blob(bytes))
        | (Kind::Bytes, ValueRef::Blob(bytes)) => Some(Value::Bytes(Cow::Borrowed(bytes))),
        (Kind::List, ValueRef::Text(bytes)) => {
            let elements: Option<Vec<&RawValue>> = serde_json::from_slice(bytes).ok();
            let texts = |elements: Vec<&'r RawValue>| {
                elements
                    .into_iter()
                    .map(|it| Cow::Borrowed(it.get()))
                    .collect()
            };
            elements.map(|elements| Value::Texts(texts(elements)))
        }
        _ => None,
    };
    made.ok_or_else(|| damaged(table, column, &"a value is of another type"))
}

/// The values that a row of `usage_series` is found by.
fn series(row: &Row<'_>) -> rusqlite::Result<Series> {
    Ok(Series {
        owner: row.get("owner")?,
        session: row.get("session")?,
        labels: row.get("labels")?,
        agent: row.get("agent")?,
        model: row.get("model")?,
    })
}

async fn copy_clock(db: &Connection, target: &Transaction<'_>) -> Result<(), StoreError> {
    let clock = db.query_row("SELECT lead, lag FROM clock WHERE id = 1", [], |row| {
        Ok((row.get("lead")?, row.get("lag")?))
    });
    let (lead, lag): (i64, i64) = clock.map_err(sqlite_error)?;
    let update = "UPDATE clock SET lead = $1, lag = $2 WHERE id = 1";
    let updated = target.execute(update, &[&lead, &lag]).await;
    updated.map(drop).map_err(|error| store_error(&error))
}
