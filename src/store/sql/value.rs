//! The values of parameters, by name.

use std::borrow::Cow;
use std::error::Error;

use rusqlite::types::{ToSqlOutput, ValueRef};
use serde::Serialize;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use crate::domain::run::RunId;

/// A value of a parameter. SQLite gets lists as JSON, with ids and blobs in hexadecimal: see [`crate::store::sql::dialect`].
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Text(Cow<'a, str>),
    /// A text that clients or models may have chosen: such columns are `bytea` in PostgreSQL, whose `text` refuses U+0000.
    FreeText(Cow<'a, str>),
    Bytes(Cow<'a, [u8]>),
    Uuid(Uuid),
    Uuids(Vec<Uuid>),
    Ints(Vec<i64>),
    Texts(Vec<Cow<'a, str>>),
    Blobs(Vec<&'a [u8]>),
}

/// A name with its colon, and its value.
pub type NamedValue<'a> = (&'static str, Value<'a>);
pub type Params<'p, 'a> = &'p [NamedValue<'a>];

/// The parameters of a statement: `params! {":id": id, ":limit": limit}`.
macro_rules! params {
    ($($name:literal: $value:expr),* $(,)?) => {
        &[$(($name, $crate::store::sql::value::Value::from($value))),*]
    };
}
pub(crate) use params;

/// The same as an array, for statements whose parameters are collected.
macro_rules! values {
    ($($name:literal: $value:expr),* $(,)?) => {
        [$(($name, $crate::store::sql::value::Value::from($value))),*]
    };
}
pub(crate) use values;

/// See [`Value::FreeText`].
pub fn free_text<'a>(text: impl Into<Cow<'a, str>>) -> Value<'a> {
    Value::FreeText(text.into())
}

/// Like [`free_text`].
pub fn free_text_or_null(text: Option<&String>) -> Value<'_> {
    text.map_or(Value::Null, free_text)
}

impl ToSql for Value<'_> {
    fn to_sql(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Self::Null => Ok(IsNull::Yes),
            Self::Bool(value) => value.to_sql(ty, out),
            Self::Int(value) => value.to_sql(ty, out),
            // Only a filter can have U+0000, which the server refuses: no name has this other character.
            Self::Text(value) if value.contains('\0') => {
                value.replace('\0', "\u{fffd}").to_sql(ty, out)
            }
            Self::Text(value) => value.to_sql(ty, out),
            Self::FreeText(value) => value.as_bytes().to_sql(ty, out),
            Self::Bytes(value) => value.to_sql(ty, out),
            Self::Uuid(value) => value.to_sql(ty, out),
            Self::Uuids(values) => values.to_sql(ty, out),
            Self::Ints(values) => values.to_sql(ty, out),
            Self::Texts(values) => values.to_sql(ty, out),
            Self::Blobs(values) => values.to_sql(ty, out),
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

impl rusqlite::ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self {
            Self::Null => ToSqlOutput::Borrowed(ValueRef::Null),
            Self::Bool(value) => i64::from(*value).into(),
            Self::Int(value) => (*value).into(),
            Self::Text(text) | Self::FreeText(text) => (&**text).into(),
            Self::Bytes(bytes) => (&**bytes).into(),
            Self::Uuid(id) => (&id.as_bytes()[..]).into(),
            Self::Uuids(ids) => json(ids.iter().map(|id| id.simple().to_string())).into(),
            Self::Ints(numbers) => json(numbers.iter()).into(),
            Self::Texts(texts) => json(texts.iter()).into(),
            Self::Blobs(blobs) => json(blobs.iter().map(|blob| hex(blob))).into(),
        })
    }
}

fn json(values: impl Iterator<Item = impl Serialize>) -> String {
    serde_json::to_string(&values.collect::<Vec<_>>()).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

macro_rules! value_from {
    ($($type:ty => |$value:ident| $made:expr,)*) => {$(
        impl<'a> From<$type> for Value<'a> {
            fn from($value: $type) -> Self { $made }
        }
    )*};
}

value_from! {
    bool => |value| Self::Bool(value),
    i64 => |value| Self::Int(value),
    u32 => |value| Self::Int(value.into()),
    u8 => |value| Self::Int(value.into()),
    String => |value| Self::Text(Cow::Owned(value)),
    &'a str => |value| Self::Text(Cow::Borrowed(value)),
    &'a String => |value| Self::Text(Cow::Borrowed(value)),
    &'a [u8] => |value| Self::Bytes(Cow::Borrowed(value)),
    &'a Vec<u8> => |value| Self::Bytes(Cow::Borrowed(value)),
    &'a [u8; 32] => |value| Self::Bytes(Cow::Borrowed(value)),
    [u8; 32] => |value| Self::Bytes(Cow::Owned(value.to_vec())),
    Vec<u8> => |value| Self::Bytes(Cow::Owned(value)),
    Uuid => |value| Self::Uuid(value),
    RunId => |value| Self::Uuid(value.0),
    &RunId => |value| Self::Uuid(value.0),
    Vec<Uuid> => |value| Self::Uuids(value),
    Vec<i64> => |value| Self::Ints(value),
    Vec<&'a str> => |value| Self::Texts(value.into_iter().map(Cow::Borrowed).collect()),
    Vec<&'a [u8]> => |value| Self::Blobs(value),
}

impl<'a, T: Into<Value<'a>>> From<Option<T>> for Value<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}
