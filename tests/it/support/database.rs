//! The daemon's database behind its back, whichever engine it is: stories look into it, damage it, or have it refuse writes.

use std::path::PathBuf;
use std::thread::JoinHandle;

use rusqlite::Connection;

use crate::support::TEST_TIMEOUT;
use crate::support::postgres::with_client;

/// Locks these tables of a PostgreSQL database.
pub fn lock_tables(url: &str, tables: &str) -> Lock {
    let (locked, wait_for_lock) = std::sync::mpsc::channel();
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let (url, lock) = (url.to_owned(), format!("BEGIN; LOCK TABLE {tables}"));
    let holder = std::thread::spawn(move || {
        with_client(&url, async |client| {
            client.batch_execute(&lock).await?;
            locked.send(()).expect("a story that waits");
            let _ = released.await;
            client.batch_execute("ROLLBACK").await
        });
    });
    wait_for_lock.recv().expect("the lock");
    Lock::Postgres(release, holder)
}

pub enum Database {
    /// The file.
    Sqlite(PathBuf),
    /// The URL.
    Postgres(String),
}

/// Keeps others from writing.
pub enum Lock {
    Sqlite(Connection),
    Postgres(tokio::sync::oneshot::Sender<()>, JoinHandle<()>),
}

impl Lock {
    pub fn release(self) {
        match self {
            Self::Sqlite(db) => db.execute_batch("ROLLBACK").expect("released"),
            Self::Postgres(release, holder) => {
                release.send(()).expect("the holder of the lock");
                holder.join().expect("released");
            }
        }
    }
}

impl Database {
    /// Executes statements that both engines know.
    pub fn execute(&self, sql: &str) {
        match self {
            Self::Sqlite(_) => self.sqlite().execute_batch(sql).expect("changed"),
            Self::Postgres(url) => with_client(url, async |client| client.batch_execute(sql).await),
        }
    }

    /// The number in the only column of the first row; `None` if it is null.
    pub fn number(&self, sql: &str) -> Option<i64> {
        match self {
            Self::Sqlite(_) => {
                let number = self.sqlite().query_row(sql, [], |row| row.get(0));
                number.expect("a number")
            }
            Self::Postgres(url) => with_client(url, async |client| {
                let sql = format!("SELECT q.n::bigint FROM ({sql}) AS q (n)");
                client.query_one(&sql, &[]).await?.try_get(0)
            }),
        }
    }

    /// The text in the only column of the first row.
    pub fn text(&self, sql: &str) -> String {
        match self {
            Self::Sqlite(_) => {
                let text = self.sqlite().query_row(sql, [], |row| row.get(0));
                text.expect("a text")
            }
            Self::Postgres(url) => with_client(url, async |client| {
                client.query_one(sql, &[]).await?.try_get(0)
            }),
        }
    }

    /// How many rows a table has.
    pub fn count(&self, table: &str) -> i64 {
        let count = self.number(&format!("SELECT count(*) FROM {table}"));
        count.expect("a count")
    }

    /// From now on no entry of which `condition` holds can be written; `NEW` is the entry.
    pub fn refuse_entries(&self, condition: &str) {
        self.refuse("INSERT ON entries", condition);
    }

    pub fn accept_entries(&self) {
        self.accept("entries");
    }

    /// From now on no attempt of a webhook delivery can be recorded.
    pub fn refuse_attempts(&self) {
        self.refuse("UPDATE ON deliveries", "true");
    }

    pub fn accept_attempts(&self) {
        self.accept("deliveries");
    }

    fn refuse(&self, change: &str, condition: &str) {
        self.execute(&match self {
            Self::Sqlite(_) => format!(
                "CREATE TRIGGER refusal BEFORE {change} WHEN {condition} \
                 BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            ),
            Self::Postgres(_) => format!(
                "CREATE OR REPLACE FUNCTION refuse_entry() RETURNS trigger LANGUAGE plpgsql AS \
                 'BEGIN RAISE EXCEPTION USING MESSAGE = ''the disk is full'', ERRCODE = ''raise_exception''; END'; \
                 CREATE TRIGGER refusal BEFORE {change} FOR EACH ROW WHEN ({condition}) \
                 EXECUTE FUNCTION refuse_entry()"
            ),
        });
    }

    fn accept(&self, table: &str) {
        self.execute(&match self {
            Self::Sqlite(_) => "DROP TRIGGER refusal".to_owned(),
            Self::Postgres(_) => format!("DROP TRIGGER refusal ON {table}"),
        });
    }

    /// Keeps everybody from writing until the lock is released.
    pub fn lock(&self) -> Lock {
        match self {
            Self::Sqlite(_) => {
                let db = self.sqlite();
                db.execute_batch("BEGIN IMMEDIATE").expect("the lock");
                Lock::Sqlite(db)
            }
            Self::Postgres(url) => {
                lock_tables(url, "trees, runs, entries, checks IN EXCLUSIVE MODE")
            }
        }
    }

    /// The id of a run as a literal.
    pub fn id(&self, run: &str) -> String {
        let uuid = run.trim_start_matches("run_");
        match self {
            Self::Sqlite(_) => format!("x'{}'", uuid.replace('-', "")),
            Self::Postgres(_) => format!("'{uuid}'::uuid"),
        }
    }

    /// Such a column with a text in place of another.
    pub fn replaced(&self, column: &str, text: &str, by: &str) -> String {
        match self {
            Self::Sqlite(_) => format!("replace({column}, '{text}', '{by}')"),
            Self::Postgres(_) => format!(
                "convert_to(replace(convert_from({column}, 'UTF8'), '{text}', '{by}'), 'UTF8')"
            ),
        }
    }

    /// Bytes of a text, as a literal for columns of texts that clients or models choose.
    pub fn free_text(&self, text: &str) -> String {
        match self {
            Self::Sqlite(_) => format!("'{text}'"),
            Self::Postgres(_) => format!("convert_to('{text}', 'UTF8')"),
        }
    }

    /// Whether such a column contains a text.
    pub fn contains(&self, column: &str, text: &str) -> String {
        match self {
            Self::Sqlite(_) => format!("coalesce(instr({column}, '{text}'), 0) > 0"),
            Self::Postgres(_) => {
                format!("coalesce(position(convert_to('{text}', 'UTF8') IN {column}), 0) > 0")
            }
        }
    }

    /// Whether such a column begins with a text.
    pub fn begins_with(&self, column: &str, text: &str) -> String {
        match self {
            Self::Sqlite(_) => format!("coalesce(instr({column}, '{text}'), 0) = 1"),
            Self::Postgres(_) => {
                format!("coalesce(position(convert_to('{text}', 'UTF8') IN {column}), 0) = 1")
            }
        }
    }

    fn sqlite(&self) -> Connection {
        let Self::Sqlite(file) = self else {
            panic!("the story uses PostgreSQL");
        };
        let db = Connection::open(file).expect("the store");
        db.busy_timeout(TEST_TIMEOUT).expect("a timeout");
        db
    }
}
