//! The columns of a run's row, declared once for the select list and for the reader.

/// Declares the columns of a SELECT, each with a name and its SQL. The select list is made from the same table as the
/// positions at which its values are read, so a column is found without a look-up.
macro_rules! columns {
    (list: $($name:ident: $sql:expr,)*) => { columns!(joined: $($sql,)*) };
    (joined: $first:expr, $($rest:expr,)*) => { concat!($first, $(", ", $rest,)*) };
    (names: $($name:ident: $sql:expr,)*) => {
        /// A column of a run's row, by its position in the select list.
        #[derive(Clone, Copy)]
        #[expect(dead_code, reason = "usage is read from its first column on")]
        enum RunColumn { $($name,)* }

    };
}
pub(crate) use columns;
