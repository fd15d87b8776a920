//! Reads rows of either engine. A value that cannot be read is damage.

use std::error::Error;
use std::fmt::{self, Display};
use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::types::ValueRef;
use serde::de::DeserializeOwned;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::encoding::integers::unsigned;

pub type StoreResult<T> = Result<T, StoreError>;

pub enum Row<'r> {
    Sqlite(&'r rusqlite::Row<'r>),
    Postgres(&'r tokio_postgres::Row),
}

/// A column by its position or its name.
#[derive(Clone, Copy)]
pub enum Column {
    Position(usize),
    Name(&'static str),
}

/// A value as an engine returns it.
#[derive(Clone, Copy)]
pub enum Cell<'r> {
    Null,
    Int(i64),
    Bool(bool),
    Text(&'r [u8]),
    Blob(&'r [u8]),
    /// Of PostgreSQL: bytes, or a text that may contain U+0000.
    Bytea(&'r [u8]),
    Uuid(Uuid),
}

/// What a value can be read as; `None` if it has another type, or is out of range.
pub trait FromCell<'r>: Sized {
    fn from_cell(cell: Cell<'r>) -> Option<Self>;
}

impl<'r> Row<'r> {
    pub fn get<T: FromCell<'r>>(&self, column: impl Into<Column>) -> StoreResult<T> {
        let column = column.into();
        let cell = self.cell(column)?;
        T::from_cell(cell).ok_or_else(|| damaged(format_args!("column {column}: {}", cell.kind())))
    }

    /// `None` for null.
    pub fn json<T: DeserializeOwned>(&self, column: impl Into<Column>) -> StoreResult<Option<T>> {
        let column = column.into();
        let text: Option<&str> = self.get(column)?;
        let parsed = text.map(serde_json::from_str).transpose();
        parsed.map_err(|error| damaged(format_args!("column {column}: {error}")))
    }

    /// A list, which only PostgreSQL has.
    pub fn list<T: FromSql<'r>>(&self, column: &'static str) -> StoreResult<Vec<T>> {
        match self {
            Self::Postgres(row) => row.try_get(column).map_err(damaged),
            Self::Sqlite(_) => Err(damaged(format_args!("column {column} is no list"))),
        }
    }

    fn cell(&self, column: Column) -> StoreResult<Cell<'r>> {
        match self {
            Self::Sqlite(row) => {
                let value = match column {
                    Column::Position(at) => row.get_ref(at),
                    Column::Name(name) => row.get_ref(name),
                };
                value.map(Cell::from).map_err(damaged)
            }
            Self::Postgres(row) => {
                let value = match column {
                    Column::Position(at) => row.try_get(at),
                    Column::Name(name) => row.try_get(name),
                };
                value.map_err(damaged)
            }
        }
    }
}

pub fn damaged(what: impl Display) -> StoreError {
    StoreError::Corrupt(what.to_string())
}

impl From<usize> for Column {
    fn from(position: usize) -> Self {
        Self::Position(position)
    }
}

impl From<&'static str> for Column {
    fn from(name: &'static str) -> Self {
        Self::Name(name)
    }
}

impl Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Position(at) => at.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl Cell<'_> {
    /// What is wrong with a value that cannot be read.
    fn kind(&self) -> &'static str {
        match self {
            Self::Null => "is null",
            Self::Int(_) => "a number that does not belong here",
            Self::Bool(_) => "a flag that does not belong here",
            Self::Text(_) => "a text that does not belong here",
            Self::Blob(_) | Self::Bytea(_) => "bytes that do not belong here",
            Self::Uuid(_) => "an id that does not belong here",
        }
    }
}

impl<'r> From<ValueRef<'r>> for Cell<'r> {
    fn from(value: ValueRef<'r>) -> Self {
        match value {
            ValueRef::Null => Self::Null,
            ValueRef::Integer(number) => Self::Int(number),
            // No column has such numbers.
            ValueRef::Real(number) => Self::Int(number as i64),
            ValueRef::Text(text) => Self::Text(text),
            ValueRef::Blob(bytes) => Self::Blob(bytes),
        }
    }
}

impl<'r> FromSql<'r> for Cell<'r> {
    fn from_sql(column: &Type, raw: &'r [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(match *column {
            Type::INT8 => Self::Int(i64::from_sql(column, raw)?),
            Type::INT4 => Self::Int(i32::from_sql(column, raw)?.into()),
            Type::BOOL => Self::Bool(bool::from_sql(column, raw)?),
            Type::UUID => Self::Uuid(Uuid::from_slice(raw)?),
            Type::BYTEA => Self::Bytea(raw),
            _ => Self::Text(raw),
        })
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self::Null)
    }

    fn accepts(column: &Type) -> bool {
        let types = [
            Type::INT8,
            Type::INT4,
            Type::BOOL,
            Type::UUID,
            Type::BYTEA,
            Type::TEXT,
        ];
        types.contains(column)
    }
}

impl<'r, T: FromCell<'r>> FromCell<'r> for Option<T> {
    fn from_cell(cell: Cell<'r>) -> Option<Self> {
        match cell {
            Cell::Null => Some(None),
            cell => T::from_cell(cell).map(Some),
        }
    }
}

impl<'r> FromCell<'r> for &'r str {
    fn from_cell(cell: Cell<'r>) -> Option<Self> {
        match cell {
            Cell::Text(text) | Cell::Bytea(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }
}

impl<'r> FromCell<'r> for &'r [u8] {
    fn from_cell(cell: Cell<'r>) -> Option<Self> {
        match cell {
            Cell::Blob(bytes) | Cell::Bytea(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// The bytes of a text or of a blob.
pub struct Content<'r>(pub &'r [u8]);

impl<'r> FromCell<'r> for Content<'r> {
    fn from_cell(cell: Cell<'r>) -> Option<Self> {
        match cell {
            Cell::Text(bytes) | Cell::Blob(bytes) | Cell::Bytea(bytes) => Some(Self(bytes)),
            _ => None,
        }
    }
}

impl FromCell<'_> for i64 {
    fn from_cell(cell: Cell<'_>) -> Option<Self> {
        match cell {
            Cell::Int(number) => Some(number),
            _ => None,
        }
    }
}

impl FromCell<'_> for bool {
    fn from_cell(cell: Cell<'_>) -> Option<Self> {
        match cell {
            Cell::Bool(flag) => Some(flag),
            Cell::Int(number) => Some(number != 0),
            _ => None,
        }
    }
}

impl FromCell<'_> for Uuid {
    fn from_cell(cell: Cell<'_>) -> Option<Self> {
        match cell {
            Cell::Uuid(id) => Some(id),
            Cell::Blob(bytes) => Self::from_slice(bytes).ok(),
            _ => None,
        }
    }
}

/// Types that are read by way of another one.
macro_rules! from_cell {
    ($($type:ty: $by:ty => |$value:ident| $read:expr;)+) => {$(
        impl<'r> FromCell<'r> for $type {
            fn from_cell(cell: Cell<'r>) -> Option<Self> {
                let $value = <$by>::from_cell(cell)?;
                $read
            }
        }
    )+};
}

from_cell! {
    String: &'r str => |text| Some(text.to_owned());
    Arc<str>: &'r str => |text| Some(text.into());
    Vec<u8>: &'r [u8] => |bytes| Some(bytes.to_vec());
    [u8; 32]: &'r [u8] => |bytes| bytes.try_into().ok();
    RunId: Uuid => |id| Some(Self(id));
    Timestamp: i64 => |millisecond| Self::from_millisecond(millisecond).ok();
    u64: i64 => |number| Some(unsigned(number));
    u32: i64 => |number| number.try_into().ok();
    u8: i64 => |number| number.try_into().ok();
    usize: i64 => |number| number.try_into().ok();
}
