//! SQL with parameters by name, and their values.

use std::borrow::Cow;
use std::error::Error;

use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use crate::domain::run::RunId;

/// A value of a parameter. Texts that may contain U+0000 are bytes: see [`free_text`].
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Text(Cow<'a, str>),
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
        &[$(($name, $crate::store::postgres::sql::Value::from($value))),*]
    };
}
pub(crate) use params;

/// The same as an array, for statements whose parameters are collected.
macro_rules! values {
    ($($name:literal: $value:expr),* $(,)?) => {
        [$(($name, $crate::store::postgres::sql::Value::from($value))),*]
    };
}
pub(crate) use values;

/// The milliseconds of the database's clock. Times that one node sets and another one waits for are by it: nodes' clocks differ.
macro_rules! clock {
    () => {
        "(extract(epoch FROM now()) * 1000)::bigint"
    };
}
pub(crate) use clock;

/// A time by this node's clock, as one by the database's: another node may read it. `:now` is the time of this node.
macro_rules! by_database_clock {
    ($time:literal) => {
        concat!("(", $time, "::bigint - :now::bigint + ", clock!(), ")")
    };
}
pub(crate) use by_database_clock;

/// A text that clients or models may have chosen: such columns are `bytea`, because `text` refuses U+0000.
pub fn free_text(text: &str) -> Value<'_> {
    Value::Bytes(Cow::Borrowed(text.as_bytes()))
}

/// Like [`free_text`].
pub fn free_text_or_null(text: Option<&String>) -> Value<'_> {
    text.map_or(Value::Null, |text| free_text(text))
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

/// SQL as the server reads it, with the names of its parameters in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSql {
    pub text: String,
    names: Vec<String>,
}

impl NamedSql {
    /// Replaces each `:name` by the number of its parameter. A cast has two colons.
    pub fn parse(sql: &str) -> Self {
        let mut parsed = Self {
            text: String::with_capacity(sql.len()),
            names: Vec::new(),
        };
        let mut rest = sql;
        while let Some(at) = rest.find(':') {
            let after = &rest[at + 1..];
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let len = after.find(|c| !is_name(c)).unwrap_or(after.len());
            if after.starts_with(':') || len == 0 {
                let skipped = at + 1 + usize::from(after.starts_with(':'));
                parsed.text.push_str(&rest[..skipped]);
                rest = &rest[skipped..];
                continue;
            }
            let name = &after[..len];
            let number = match parsed.names.iter().position(|known| known == name) {
                Some(index) => index + 1,
                None => {
                    parsed.names.push(name.to_owned());
                    parsed.names.len()
                }
            };
            parsed.text.push_str(&rest[..at]);
            parsed.text.push_str(&format!("${number}"));
            rest = &after[len..];
        }
        parsed.text.push_str(rest);
        parsed
    }

    /// Where the value of each parameter is. Those of a parameter without a value are left out, so that the server
    /// rejects the statement.
    pub fn positions(&self, params: Params<'_, '_>) -> Vec<usize> {
        let position = |name: &String| params.iter().position(|(known, _)| known[1..] == **name);
        self.names.iter().filter_map(position).collect()
    }

    /// Whether these are the positions of the parameters: a caller passes the same names each time.
    pub fn are_positions(&self, params: Params<'_, '_>, positions: &[usize]) -> bool {
        let is_at = |(name, at): (&String, &usize)| {
            params
                .get(*at)
                .is_some_and(|(known, _)| known[1..] == **name)
        };
        positions.len() == self.names.len() && self.names.iter().zip(positions).all(is_at)
    }
}

#[cfg(test)]
mod tests {
    use super::{NamedSql, Value};

    #[test]
    fn names_become_numbers() {
        let sql = NamedSql::parse("SELECT :a, :b_2::bigint WHERE x = :a AND y::text = ':'");
        assert_eq!(
            sql.text,
            "SELECT $1, $2::bigint WHERE x = $1 AND y::text = ':'"
        );
        let params = [(":b_2", Value::from("b")), (":a", Value::from(1_i64))];
        assert_eq!(sql.positions(&params), [1, 0]);
        assert_eq!(sql.positions(&params[..1]), [0], "one is missing");
        assert!(sql.are_positions(&params, &[1, 0]));
        assert!(!sql.are_positions(&params, &[0, 1]));
        assert!(!sql.are_positions(&params, &[1]));
    }
}
