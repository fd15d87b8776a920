//! SQL that both engines execute is written once, for PostgreSQL. Where SQLite needs other words both stand in braces, SQLite's
//! first: `{max|greatest}(a, b)`. SQLite gets no casts.

use std::borrow::Cow;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Sqlite,
    Postgres,
}

/// A statement as both engines read it, for one that is long and often executed.
#[derive(Debug)]
pub struct Texts {
    sqlite: String,
    postgres: String,
}

impl Texts {
    pub fn new(sql: &str) -> Self {
        Self {
            sqlite: Dialect::Sqlite.text(sql).into_owned(),
            postgres: Dialect::Postgres.text(sql).into_owned(),
        }
    }

    pub fn of(&self, dialect: Dialect) -> &str {
        match dialect {
            Dialect::Sqlite => &self.sqlite,
            Dialect::Postgres => &self.postgres,
        }
    }
}

impl Dialect {
    /// A statement as the engine reads it.
    pub fn text(self, sql: &str) -> Cow<'_, str> {
        let has_casts = self == Self::Sqlite && sql.contains("::");
        if !has_casts && !sql.contains('|') {
            return Cow::Borrowed(sql);
        }
        let mut text = String::with_capacity(sql.len());
        self.push(sql, &mut text);
        Cow::Owned(text)
    }

    fn push(self, mut rest: &str, text: &mut String) {
        while let Some(at) = rest.find(['{', ':']) {
            text.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(cast) = rest.strip_prefix("::") {
                let is_type = |c: char| c.is_ascii_alphanumeric() || c == '[' || c == ']';
                let end = cast.find(|c| !is_type(c)).unwrap_or(cast.len());
                if self == Self::Postgres {
                    text.push_str(&rest[..2 + end]);
                }
                rest = &cast[end..];
            } else if let Some((choice, after)) = self.choice(rest) {
                self.push(choice, text);
                rest = after;
            } else {
                text.push_str(&rest[..1]);
                rest = &rest[1..];
            }
        }
        text.push_str(rest);
    }

    /// The words for this engine in the braces that the text begins with, and what is behind the braces. `None` if there is nothing to
    /// choose.
    fn choice(self, text: &str) -> Option<(&str, &str)> {
        let mut depth = 0;
        let end = text.find(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        })?;
        let (sqlite, postgres) = text.get(1..end)?.split_once('|')?;
        let words = match self {
            Self::Sqlite => sqlite,
            Self::Postgres => postgres,
        };
        Some((words, &text[end + 1..]))
    }
}

#[cfg(test)]
mod tests {
    use super::Dialect;

    #[test]
    fn each_engine_gets_its_own_words() {
        let sql = "SELECT {max|greatest}(:a::bigint, b), '{}' FROM t WHERE x = {|ANY('{}'::text[])} || :c";
        assert_eq!(
            Dialect::Postgres.text(sql),
            "SELECT greatest(:a::bigint, b), '{}' FROM t WHERE x = ANY('{}'::text[]) || :c"
        );
        assert_eq!(
            Dialect::Sqlite.text(sql),
            "SELECT max(:a, b), '{}' FROM t WHERE x =  || :c"
        );
    }
}
