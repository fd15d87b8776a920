//! Changes of tables that no write of a run changes: statements that the writer of either engine executes.

use crate::domain::run::RunId;
use crate::store::sql::value::{NamedValue, Value};

/// Statements that are executed one after the other in one transaction.
#[derive(Debug, Default)]
pub struct Changes {
    pub statements: Vec<Statement>,
    /// Whether they are executed on a full disk, because they free space.
    pub frees_space: bool,
    /// Whether they make deliveries due.
    pub makes_deliveries_due: bool,
    /// The tree to whose record they add an entry.
    pub root: Option<RunId>,
}

/// A statement with its parameters. Values that it does not name are ignored.
#[derive(Debug)]
pub struct Statement {
    pub sql: &'static str,
    pub params: Vec<NamedValue<'static>>,
}

/// About how many bytes a change that frees space writes.
const FREED_BYTES: usize = 64 << 10;

impl Changes {
    pub fn one<const N: usize>(sql: &'static str, params: [NamedValue<'static>; N]) -> Self {
        Self::default().and(sql, params)
    }

    pub fn and<const N: usize>(self, sql: &'static str, params: [NamedValue<'static>; N]) -> Self {
        self.and_vec(sql, params.into())
    }

    pub fn and_vec(mut self, sql: &'static str, params: Vec<NamedValue<'static>>) -> Self {
        self.statements.push(Statement { sql, params });
        self
    }

    pub fn of_tree(self, root: RunId) -> Self {
        Self {
            root: Some(root),
            ..self
        }
    }

    pub fn freeing_space(self) -> Self {
        Self {
            frees_space: true,
            ..self
        }
    }

    pub fn with_deliveries(self) -> Self {
        Self {
            makes_deliveries_due: true,
            ..self
        }
    }

    /// About how many bytes they write.
    pub fn bytes(&self) -> usize {
        if self.frees_space {
            return FREED_BYTES;
        }
        let values = self.statements.iter().flat_map(|it| &it.params);
        let bytes = values.map(|(_, value)| match value {
            Value::Text(text) | Value::FreeText(text) => text.len(),
            Value::Bytes(bytes) => bytes.len(),
            _ => 0,
        });
        bytes.sum()
    }
}
