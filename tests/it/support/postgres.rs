//! PostgreSQL for the stories, if `AXED_TEST_POSTGRES` is the URL of a server: each story has a database of its own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio_postgres::{Client, NoTls};

/// The variable that sets `data.url`.
pub const DATABASE_URL: &str = "AXED_DATA__URL";

/// A database that exists as long as this value.
pub struct Postgres {
    /// What `data.url` is to be.
    pub url: String,
    server: String,
    name: String,
}

/// The server that the stories are to use; `None` for SQLite.
pub fn server() -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "a setting of the stories")]
    let server = std::env::var("AXED_TEST_POSTGRES");
    server.ok().filter(|url| !url.is_empty())
}

/// The URL of the same database over TLS, at `host`; `None` if the server has none.
pub fn tls_url(url: &str, host: &str, mode: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "a setting of the stories")]
    let server = std::env::var("AXED_TEST_POSTGRES_TLS").ok()?;
    let (path, _) = url.split_once('?')?;
    let (_, name) = path.rsplit_once('/')?;
    let server = server.replace("localhost", host);
    let server = server.replace("/?", &format!("/{name}?sslmode={mode}&"));
    Some(server)
}

/// The URL of the same database through the pooler that this variable names; `None` if there is none.
pub fn pooler_url(url: &str, variable: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "a setting of the stories")]
    let pooler = std::env::var(variable).ok()?;
    let (path, _) = url.split_once('?')?;
    let (_, name) = path.rsplit_once('/')?;
    Some(format!("{pooler}/{name}"))
}

impl Postgres {
    /// A new database, if the stories use PostgreSQL.
    pub fn create() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let server = server()?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("story_{}_{number}", std::process::id());
        let create = format!("CREATE DATABASE {name}");
        with_client(&server, async |client| client.batch_execute(&create).await);
        let (url, parameters) = server.split_once('?').unwrap_or((&server, ""));
        let (address, _) = url.rsplit_once('/').expect("a URL with a database");
        let url = format!("{address}/{name}?{parameters}");
        Some(Self { url, server, name })
    }
}

impl Postgres {
    /// Has a daemon use the database. It takes over from a killed one at once.
    pub fn set_environment(&self, environment: &mut BTreeMap<String, String>) {
        for (name, value) in [
            (DATABASE_URL, &*self.url),
            ("AXED_CLUSTER__NODE", "story"),
            ("AXED_CLUSTER__UNIQUE_NAMES", "true"),
        ] {
            environment.insert(name.to_owned(), value.to_owned());
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let drop = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        with_client(&self.server, async |client| {
            client.batch_execute(&drop).await
        });
    }
}

/// All rows of all tables, as text.
pub fn contents(url: &str) -> Vec<Vec<u8>> {
    with_client(url, async |client| {
        client.batch_execute("SET bytea_output = 'escape'").await?;
        let tables =
            "SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'public'";
        let mut contents = Vec::new();
        for table in client.query(tables, &[]).await? {
            let table: String = table.try_get(0)?;
            let rows = format!("SELECT t::text FROM {table} t");
            for row in client.query(&rows, &[]).await? {
                contents.push(row.try_get::<_, String>(0)?.into_bytes());
            }
        }
        Ok(contents)
    })
}

/// Calls `use_client` with a connection, on a thread of its own: stories call this within their runtimes.
pub fn with_client<T: Send>(
    url: &str,
    use_client: impl AsyncFnOnce(&Client) -> Result<T, tokio_postgres::Error> + Send,
) -> T {
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let used = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            let use_client = use_client(&client);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                used = use_client => used,
                ended = &mut connection => panic!("the connection ended: {ended:?}"),
            }
        });
        used.unwrap_or_else(|error| panic!("PostgreSQL: {error}: {:?}", error.as_db_error()))
    };
    std::thread::scope(|scope| scope.spawn(work).join().expect("no panic"))
}
