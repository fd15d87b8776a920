//! Times by the clock of the database.

/// The milliseconds of PostgreSQL's clock. Times that one node sets and another one waits for are by it: nodes' clocks differ. With
/// SQLite it is `:now`, the time of this process.
macro_rules! clock {
    () => {
        "{:now|(extract(epoch FROM now()) * 1000)::bigint}"
    };
}
pub(crate) use clock;

/// A time by this node's clock, as one by the database's: another node may read it. `:now` is the time of this node.
macro_rules! by_database_clock {
    ($time:literal) => {
        concat!(
            "(",
            $time,
            "::bigint - :now::bigint + ",
            $crate::store::sql::clock::clock!(),
            ")"
        )
    };
}
pub(crate) use by_database_clock;
