//! A prepared statement whose parameters are bound by name. SQLite looks a name up by comparing it with each of them, so
//! the positions are kept from one execution to the next.

use rusqlite::{Connection, Error, PrepFlags, Row, Rows, Statement, ToSql};

use crate::store::sql::value::Params;

/// Names, each with its colon, and values: what `rusqlite::named_params!` makes.
pub type Named<'a> = &'a [(&'static str, &'a dyn ToSql)];

/// A statement that is prepared once and executed many times.
pub struct PreparedStatement<'c> {
    statement: Statement<'c>,
    /// The names of the last execution, with their positions; 0 is that of a name without a parameter.
    positions: Vec<(&'static str, usize)>,
}

impl<'c> PreparedStatement<'c> {
    pub fn new(connection: &'c Connection, sql: &str) -> rusqlite::Result<Self> {
        // Else each statement keeps some of the connection's memory for short-lived values for itself, and none is left.
        let flags = PrepFlags::SQLITE_PREPARE_PERSISTENT;
        Ok(Self {
            statement: connection.prepare_with_flags(sql, flags)?,
            positions: Vec::new(),
        })
    }

    /// Returns the number of rows that changed.
    pub fn execute(&mut self, params: Named<'_>) -> rusqlite::Result<usize> {
        self.bind(params)?;
        self.statement.raw_execute()
    }

    /// As [`Self::execute`], with values of which some may have no parameter.
    pub fn change(&mut self, params: Params<'_, '_>) -> rusqlite::Result<usize> {
        self.find_positions(params)?;
        for ((_, value), (_, position)) in params.iter().zip(&self.positions) {
            if *position > 0 {
                self.statement.raw_bind_parameter(*position, value)?;
            }
        }
        self.statement.raw_execute()
    }

    /// Whether the statement returns a row.
    pub fn exists(&mut self, params: Named<'_>) -> rusqlite::Result<bool> {
        Ok(self.query(params)?.next()?.is_some())
    }

    /// Reads the first row; `None` if there is none.
    pub fn query_row<T>(
        &mut self,
        params: Named<'_>,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        self.query(params)?.next()?.map(read).transpose()
    }

    pub fn query(&mut self, params: Named<'_>) -> rusqlite::Result<Rows<'_>> {
        self.bind(params)?;
        Ok(self.statement.raw_query())
    }

    fn bind(&mut self, params: Named<'_>) -> rusqlite::Result<()> {
        self.find_positions(params)?;
        for ((name, value), (_, position)) in params.iter().zip(&self.positions) {
            match position {
                0 => return Err(Error::InvalidParameterName((*name).to_owned())),
                position => self.statement.raw_bind_parameter(*position, value)?,
            }
        }
        Ok(())
    }

    /// Finds where the values are bound, if they have other names than those of the last execution.
    fn find_positions<T>(&mut self, params: &[(&'static str, T)]) -> rusqlite::Result<()> {
        // The names of one caller are the same each time, and in the same memory.
        let is_same = |name: &str, other: &str| std::ptr::eq(name, other) || name == other;
        let is_known = params.len() == self.positions.len()
            && (params.iter().zip(&self.positions))
                .all(|((name, _), (known, _))| is_same(name, known));
        if is_known {
            return Ok(());
        }
        let position = |(name, _): &(&'static str, T)| {
            let position = self.statement.parameter_index(name)?;
            Ok((*name, position.unwrap_or(0)))
        };
        let positions: Vec<_> = params
            .iter()
            .map(position)
            .collect::<rusqlite::Result<_>>()?;
        // A parameter without a value would keep that of the execution before.
        let found = positions
            .iter()
            .filter(|(_, position)| *position > 0)
            .count();
        match self.statement.parameter_count() {
            expected if expected == found => self.positions = positions,
            expected => return Err(Error::InvalidParameterCount(found, expected)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, named_params};

    use super::PreparedStatement;

    #[test]
    fn parameters_are_bound_by_name_in_any_order() {
        let db = Connection::open_in_memory().expect("a database");
        let mut sql = PreparedStatement::new(&db, "SELECT :a - :b AS difference").expect("SQL");
        let mut difference =
            |params: super::Named<'_>| sql.query_row(params, |row| row.get::<_, i64>("difference"));
        let forward = difference(named_params! {":a": 5, ":b": 3});
        assert_eq!(forward, Ok(Some(2)));
        let backward = difference(named_params! {":b": 5, ":a": 3});
        assert_eq!(backward, Ok(Some(-2)));
        assert!(
            difference(named_params! {":a": 5}).is_err(),
            "one is missing"
        );
        assert!(
            difference(named_params! {":a": 5, ":c": 3}).is_err(),
            "an unknown name"
        );
    }
}
