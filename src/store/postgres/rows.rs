//! Reads values of columns. A value that cannot be read is damage.

use std::error::Error;
use std::fmt::Display;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use tokio_postgres::Row;
use tokio_postgres::row::RowIndex;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::encoding::definition_cache::Hash;
use crate::store::encoding::integers::unsigned;

pub type StoreResult<T> = Result<T, StoreError>;

/// A text in a column of texts or, because it may contain U+0000, of bytes.
pub struct StoredText<'r>(pub &'r str);

impl<'r> FromSql<'r> for StoredText<'r> {
    fn from_sql(_: &Type, raw: &'r [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(std::str::from_utf8(raw)?))
    }

    fn accepts(column: &Type) -> bool {
        matches!(*column, Type::TEXT | Type::BYTEA)
    }
}

pub fn get<'r, T: FromSql<'r>>(row: &'r Row, column: impl RowIndex + Display) -> StoreResult<T> {
    row.try_get(column)
        .map_err(|error| match error.source().map(ToString::to_string) {
            Some(cause) => damaged(format!("{error}: {cause}")),
            None => damaged(error),
        })
}

pub fn damaged(what: impl Display) -> StoreError {
    StoreError::Corrupt(what.to_string())
}

/// A text that is not copied.
pub fn str<'r>(row: &'r Row, column: impl RowIndex + Display) -> StoreResult<Option<&'r str>> {
    let text: Option<StoredText<'r>> = get(row, column)?;
    Ok(text.map(|it| it.0))
}

pub fn text(row: &Row, column: impl RowIndex + Display) -> StoreResult<Option<String>> {
    Ok(str(row, column)?.map(str::to_owned))
}

/// A text that is never null.
pub fn required_text(row: &Row, column: impl RowIndex + Display + Copy) -> StoreResult<String> {
    text(row, column)?.ok_or_else(|| damaged(format!("column {column} is null")))
}

pub fn json<T: DeserializeOwned>(
    row: &Row,
    column: impl RowIndex + Display + Copy,
) -> StoreResult<Option<T>> {
    let parsed = str(row, column)?.map(serde_json::from_str).transpose();
    parsed.map_err(|error| damaged(format!("column {column}: {error}")))
}

/// Milliseconds since 1970.
pub fn time(row: &Row, column: impl RowIndex + Display + Copy) -> StoreResult<Option<Timestamp>> {
    let milliseconds: Option<i64> = get(row, column)?;
    let time = milliseconds.map(Timestamp::from_millisecond).transpose();
    time.map_err(|error| damaged(format!("column {column}: {error}")))
}

/// A number that is never negative.
pub fn count(row: &Row, column: impl RowIndex + Display) -> StoreResult<u64> {
    get::<i64>(row, column).map(unsigned)
}

/// A number of a smaller type.
pub fn small<T: TryFrom<i64>>(row: &Row, column: impl RowIndex + Display + Copy) -> StoreResult<T> {
    let number: i64 = get(row, column)?;
    T::try_from(number).map_err(|_| damaged(format!("column {column}: {number} is out of range")))
}

pub fn id(row: &Row, column: impl RowIndex + Display) -> StoreResult<RunId> {
    get::<Uuid>(row, column).map(RunId)
}

pub fn optional_id(row: &Row, column: impl RowIndex + Display) -> StoreResult<Option<RunId>> {
    Ok(get::<Option<Uuid>>(row, column)?.map(RunId))
}

pub fn hash(row: &Row, column: impl RowIndex + Display + Copy) -> StoreResult<Option<Hash>> {
    let bytes: Option<&[u8]> = get(row, column)?;
    let hash = bytes.map(Hash::try_from).transpose();
    hash.map_err(|_| damaged(format!("column {column} is no hash")))
}
