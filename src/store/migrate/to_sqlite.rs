//! Copies the rows of a PostgreSQL database to SQLite.

use std::path::Path;

use futures_util::TryStreamExt;
use rusqlite::types::{Value, ValueRef};
use rusqlite::{Connection, ToSql, params_from_iter};
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::domain::usage_sums::UsageSums;
use crate::store::StoreError;
use crate::store::encoding::run_values::MAX_INLINE_INPUT_BYTES;
use crate::store::migrate::memories::Memories;
use crate::store::migrate::tables::{Kind, TABLES, Table};
use crate::store::migrate::{CopiedTable, check_count, damaged, not_empty};
use crate::store::postgres::error::store_error;
use crate::store::postgres::offline::Offline;
use crate::store::sqlite;
use crate::store::sqlite::error::store_error as sqlite_error;

const OPEN_REQUEST: &str = "SELECT r.kind, r.run FROM requests r JOIN trees t ON t.root = r.root \
     WHERE r.answer IS NULL ORDER BY r.number LIMIT 1";

/// Fails if the database of the directory has rows.
pub fn check_empty(target: &sqlite::offline::Offline, dir: &Path) -> Result<(), StoreError> {
    for table in TABLES {
        if count_rows(&target.connection, table).map_err(sqlite_error)? > 0 {
            return Err(not_empty(
                &format_args!("the database in {}", dir.display()),
                table.name,
            ));
        }
    }
    Ok(())
}

/// Copies to a database without rows.
pub async fn copy(
    source: &mut Offline,
    target: &mut sqlite::offline::Offline,
    dir: &Path,
) -> Result<Vec<CopiedTable>, StoreError> {
    let transaction = target.connection.transaction().map_err(sqlite_error)?;
    let from = source.begin().await?;
    check_requests(&from).await?;
    let memories = Memories::read(&from).await?;
    memories.check_files(dir)?;
    let mut copied = Vec::new();
    for table in TABLES {
        let source_rows = copy_table(&from, &transaction, table).await?;
        let rows = count_rows(&transaction, table).map_err(sqlite_error)?;
        check_count(table.name, source_rows, rows)?;
        copied.push(CopiedTable {
            name: table.name,
            rows,
        });
    }
    copy_clock(&from, &transaction).await?;
    from.commit().await.map_err(|error| store_error(&error))?;
    copied.push(memories.write(dir)?);
    transaction.commit().map_err(sqlite_error)?;
    Ok(copied)
}

/// Fails if a node has not performed yet what another one has committed for an unfinished run: only nodes can. Without it, a run
/// that a later one has replaced in its session would go on.
async fn check_requests(source: &Transaction<'_>) -> Result<(), StoreError> {
    let found = source.query_opt(OPEN_REQUEST, &[]).await;
    let Some(row) = found.map_err(|error| store_error(&error))? else {
        return Ok(());
    };
    let column = |error: tokio_postgres::Error| store_error(&error);
    let kind: String = row.try_get("kind").map_err(column)?;
    let run: Uuid = row.try_get("run").map_err(column)?;
    Err(StoreError::Backend(format!(
        "no node has performed the request {kind} to the unfinished run {} yet; start a node on the database for some seconds, \
         stop it, then try again",
        RunId(run)
    )))
}

fn count_rows(db: &Connection, table: &Table) -> rusqlite::Result<u64> {
    let sql = format!("SELECT count(*) AS count FROM {}", table.name);
    db.query_row(&sql, [], |row| row.get::<_, i64>("count"))
        .map(i64::unsigned_abs)
}

/// Returns the number of rows that the source has, where those of several writers are one.
async fn copy_table(
    source: &Transaction<'_>,
    target: &Connection,
    table: &Table,
) -> Result<u64, StoreError> {
    let error = |error: tokio_postgres::Error| store_error(&error);
    let names = table.names();
    let places = vec!["?"; names.len()].join(", ");
    let insert = format!(
        "INSERT INTO {} ({}) VALUES ({places})",
        table.name,
        names.join(", ")
    );
    let mut insert = target.prepare(&insert).map_err(sqlite_error)?;
    let counted = source.query_one(&count(table), &[]).await.map_err(error)?;
    let counted: i64 = counted.try_get(0).map_err(error)?;
    let rows = source
        .query_raw(&select(table), NO_PARAMS.iter().copied())
        .await;
    let mut rows = std::pin::pin!(rows.map_err(error)?);
    let mut sums = SumRows::default();
    while let Some(row) = rows.try_next().await.map_err(error)? {
        let mut values = Vec::with_capacity(names.len());
        for (index, (name, kind)) in table.columns.iter().enumerate() {
            values.push(read_value(&row, index, *kind, (table.name, name))?);
        }
        let ready = match table.name {
            "runs" => {
                move_long_input(&row, table, &mut values, target)?;
                Some(values)
            }
            "usage_quarters" | "usage_days" => sums.push(values, table)?,
            _ => Some(values),
        };
        if let Some(values) = ready {
            insert
                .execute(params_from_iter(values))
                .map_err(sqlite_error)?;
        }
    }
    if let Some(values) = sums.finish() {
        insert
            .execute(params_from_iter(values))
            .map_err(sqlite_error)?;
    }
    Ok(counted.unsigned_abs())
}

const NO_PARAMS: [&(dyn tokio_postgres::types::ToSql + Sync); 0] = [];

fn count(table: &Table) -> String {
    match table.name {
        "usage_quarters" | "usage_days" => format!(
            "SELECT count(*) FROM (SELECT DISTINCT start, series FROM {}) AS rows",
            table.name
        ),
        "budget_usage" => {
            "SELECT count(*) FROM (SELECT DISTINCT budget, quarter FROM budget_usage) AS rows"
                .to_owned()
        }
        name => format!("SELECT count(*) FROM {name}"),
    }
}

fn select(table: &Table) -> String {
    let columns: Vec<String> = table
        .columns
        .iter()
        .map(|(column, _)| match (table.name, *column) {
            ("budget_usage", "tokens" | "cost") => {
                format!("least(sum({column}), 9223372036854775807)::bigint")
            }
            (_, column) => column.to_owned(),
        })
        .chain((table.name == "runs").then(|| "input_is_parts".to_owned()))
        .collect();
    let order = match table.name {
        "entries" => "ORDER BY root, last_seq, id",
        "runs" => "ORDER BY id",
        "usage_quarters" | "usage_days" => "ORDER BY start, series",
        "budget_usage" => "GROUP BY budget, quarter",
        _ => "",
    };
    format!("SELECT {} FROM {} {order}", columns.join(", "), table.name)
}

fn read_value(
    row: &Row,
    index: usize,
    kind: Kind,
    (table, column): (&str, &str),
) -> Result<Value, StoreError> {
    let error = |error: tokio_postgres::Error| damaged(table, column, &error);
    Ok(match kind {
        Kind::Id => {
            let id: Option<Uuid> = row.try_get(index).map_err(error)?;
            id.map(|id| id.as_bytes().to_vec()).into()
        }
        Kind::Int => row.try_get::<_, Option<i64>>(index).map_err(error)?.into(),
        Kind::Flag => row.try_get::<_, Option<bool>>(index).map_err(error)?.into(),
        Kind::Text => row
            .try_get::<_, Option<String>>(index)
            .map_err(error)?
            .into(),
        Kind::FreeText => {
            let bytes: Option<Vec<u8>> = row.try_get(index).map_err(error)?;
            let text = bytes.map(String::from_utf8).transpose();
            text.map_err(|why| damaged(table, column, &why))?.into()
        }
        Kind::Bytes => row
            .try_get::<_, Option<Vec<u8>>>(index)
            .map_err(error)?
            .into(),
        Kind::List => {
            let elements: Option<Vec<String>> = row.try_get(index).map_err(error)?;
            elements
                .map(|elements| format!("[{}]", elements.join(",")))
                .into()
        }
    })
}

/// An input of several parts is a blob, and a long one is in a table of its own.
fn move_long_input(
    row: &Row,
    table: &Table,
    values: &mut [Value],
    target: &Connection,
) -> Result<(), StoreError> {
    let position = |name: &str| table.names().iter().position(|known| *known == name);
    let (Some(id), Some(input), Some(task)) = (position("id"), position("input"), position("task"))
    else {
        return Ok(());
    };
    let is_parts = row.try_get("input_is_parts");
    if is_parts.map_err(|error| damaged("runs", "input_is_parts", &error))?
        && let Value::Text(text) = &values[input]
    {
        values[input] = Value::Blob(text.clone().into_bytes());
    }
    let bytes = |value: &Value| match ValueRef::from(value) {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len(),
        _ => 0,
    };
    if bytes(&values[input]) + bytes(&values[task]) > MAX_INLINE_INPUT_BYTES {
        let moved: [&dyn ToSql; 3] = [&values[id], &values[input], &values[task]];
        target
            .execute(
                "INSERT INTO texts (run, input, task) VALUES (?, ?, ?)",
                moved,
            )
            .map_err(sqlite_error)?;
        values[input] = Value::Null;
        values[task] = Value::Null;
    }
    Ok(())
}

/// Adds up the rows of several writers, which come one after the other.
#[derive(Default)]
struct SumRows(Option<(Value, Value, UsageSums)>);

impl SumRows {
    /// Takes a row, and returns the sum before it if that is complete.
    fn push(
        &mut self,
        values: Vec<Value>,
        table: &Table,
    ) -> Result<Option<Vec<Value>>, StoreError> {
        let Ok([start, series, Value::Blob(bytes)]) = <[Value; 3]>::try_from(values) else {
            return Err(damaged(table.name, "sums", &"a value is missing"));
        };
        let sums =
            UsageSums::decode(&bytes).map_err(|error| damaged(table.name, "sums", &error))?;
        if let Some((known_start, known_series, known)) = &mut self.0
            && (&*known_start, &*known_series) == (&start, &series)
        {
            known.add(&sums);
            return Ok(None);
        }
        let complete = std::mem::take(self).finish();
        self.0 = Some((start, series, sums));
        Ok(complete)
    }

    fn finish(self) -> Option<Vec<Value>> {
        let (start, series, sums) = self.0?;
        Some(vec![start, series, Value::Blob(sums.encode())])
    }
}

async fn copy_clock(source: &Transaction<'_>, target: &Connection) -> Result<(), StoreError> {
    let clock = source
        .query_one("SELECT lead, lag FROM clock WHERE id = 1", &[])
        .await;
    let clock = clock.map_err(|error| store_error(&error))?;
    let read = |column| {
        clock
            .try_get::<_, i64>(column)
            .map_err(|error| store_error(&error))
    };
    let (lead, lag) = (read("lead")?, read("lag")?);
    target
        .execute(
            "UPDATE clock SET lead = ?1, lag = ?2 WHERE id = 1",
            [lead, lag],
        )
        .map(drop)
        .map_err(sqlite_error)
}
