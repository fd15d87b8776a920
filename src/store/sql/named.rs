//! SQL with parameters by name, for PostgreSQL, which has numbers.

use crate::store::sql::dialect::Dialect;
use crate::store::sql::value::Params;

/// SQL as the server reads it, with the names of its parameters in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedSql {
    pub text: String,
    names: Vec<String>,
}

impl NamedSql {
    /// Replaces each `:name` by the number of its parameter. A cast has two colons.
    pub fn parse(sql: &str) -> Self {
        let sql = &*Dialect::Postgres.text(sql);
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
    use super::NamedSql;
    use crate::store::sql::value::Value;

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
