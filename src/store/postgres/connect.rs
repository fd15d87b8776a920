//! Opens connections: the parts of the URL that the client library does not know, and what every connection has.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Connect, Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream, stream};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::config::{Config, SslMode, TargetSessionAttrs};
use tokio_postgres::{AsyncMessage, Client};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::store::StoreError;
use crate::store::postgres::error::DatabaseName;
use crate::store::postgres::tls::{self, TlsMode};

/// Connections for reading, and how long a caller waits for one, which may have to be opened.
const MAX_READERS: usize = 8;
const MAX_READER_WAIT: Duration = Duration::from_secs(30);
const MAX_READER_OPEN_TIME: Duration = Duration::from_secs(10);
/// A server that works ends a statement when its time is over, and says so within this time.
const MAX_ANSWER_DELAY: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// After this time without an acknowledgement a connection is broken.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(15);
const KEEPALIVES_IDLE: Duration = Duration::from_secs(15);
/// Options of every session, in milliseconds. Just-in-time compilation would take longer than each of our statements.
/// A process that is paused in a transaction, or a machine that is gone, keeps its locks for a shorter time than others take to see
/// that it is dead.
const SESSION_OPTIONS: &str = "-c statement_timeout=60000 -c lock_timeout=10000 \
     -c idle_in_transaction_session_timeout=5000 -c jit=off -c client_min_messages=warning \
     -c default_transaction_isolation=read\\ committed";

/// How the database is reached.
#[derive(Clone)]
pub struct Connector {
    pub name: DatabaseName,
    config: Config,
    tls: MakeRustlsConnect,
    /// Notified when the server did not answer the writer in time.
    pub unanswered: Arc<Notify>,
    /// Of the thread that drives the connections.
    runtime: Handle,
}

impl Connector {
    /// `key` is that of the configuration which has the URL.
    pub fn new(key: &str, url: &str, runtime: Handle) -> Result<Self, StoreError> {
        let (config, tls) =
            configure(url).map_err(|why| StoreError::Backend(format!("{key} {why}")))?;
        Ok(Self {
            name: DatabaseName::new(&config),
            tls,
            config,
            unanswered: Arc::default(),
            runtime,
        })
    }

    /// A connection of its own; the runtime's thread drives it.
    pub async fn connect(&self) -> Result<Client, tokio_postgres::Error> {
        let (client, _driver) = self.connect_driven().await?;
        Ok(client)
    }

    /// A connection that has to be driven by reading what the server sends unasked.
    pub async fn connect_listening(
        &self,
    ) -> Result<
        (
            Client,
            impl Stream<Item = Result<AsyncMessage, tokio_postgres::Error>> + use<>,
        ),
        tokio_postgres::Error,
    > {
        let (client, mut connection) = self.config.connect(self.tls.clone()).await?;
        let messages = stream::poll_fn(move |context| connection.poll_message(context));
        Ok((client, messages))
    }

    /// A connection with the task that drives it: to abort the task closes the connection.
    pub async fn connect_driven(&self) -> Result<(Client, JoinHandle<()>), tokio_postgres::Error> {
        let (client, connection) = self.config.connect(self.tls.clone()).await?;
        // The connection's end shows in the client's next call.
        let driver = self.runtime.spawn(connection.map(drop));
        Ok((client, driver))
    }

    /// The connections for reading; none is opened yet.
    pub fn reader_pool(&self) -> Result<Pool, StoreError> {
        let config = ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        };
        let manager = Manager::from_connect(self.config.clone(), self.clone(), config);
        Pool::builder(manager)
            .max_size(MAX_READERS)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(MAX_READER_WAIT))
            .create_timeout(Some(MAX_READER_OPEN_TIME))
            .build()
            .map_err(|error| StoreError::Backend(error.to_string()))
    }

    /// How long a server that works may take to answer a statement; `None` if the URL allows it any time, or says it in another unit than milliseconds.
    pub fn max_answer_time(&self) -> Option<Duration> {
        let limit = statement_timeout(self.config.get_options()?)?;
        Some(limit + MAX_ANSWER_DELAY)
    }
}

/// The last of these options that limits a statement, if it is in milliseconds, and not 0: that is no limit.
fn statement_timeout(options: &str) -> Option<Duration> {
    let options = options.replace('-', "_");
    let (_, limit) = options.rsplit_once("statement_timeout=")?;
    let limit = limit.split_whitespace().next()?.parse().ok()?;
    (limit > 0).then(|| Duration::from_millis(limit))
}

/// What a URL says. Opens no connection. An error follows the key that has the URL.
pub fn configure(url: &str) -> Result<(Config, MakeRustlsConnect), StoreError> {
    check_separators(url)?;
    let (url, mode) = tls::split_url(url)?;
    let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
        // The library's error does not contain the URL, which has the password. Its cause names the option.
        let why = error
            .source()
            .map_or_else(|| error.to_string(), ToString::to_string);
        StoreError::Backend(format!("is no PostgreSQL URL: {why}"))
    })?;
    if config.get_hosts().is_empty() {
        return Err(StoreError::Backend(
            "names no host, such as postgres://user@host/database".to_owned(),
        ));
    }
    config.ssl_mode(match mode {
        TlsMode::Disable => SslMode::Disable,
        TlsMode::Prefer => SslMode::Prefer,
        TlsMode::Require { .. } | TlsMode::VerifyCa { .. } | TlsMode::VerifyFull { .. } => {
            SslMode::Require
        }
    });
    let options = match config.get_options() {
        Some(options) => format!("{SESSION_OPTIONS} {options}"),
        None => SESSION_OPTIONS.to_owned(),
    };
    config.options(options);
    if config.get_application_name().is_none() {
        config.application_name("axed");
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    config.keepalives_idle(KEEPALIVES_IDLE);
    // After a failover, a name may lead to the old server for a while, or to a standby: what is read there is old, and nothing can be
    // written.
    config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    let tls = MakeRustlsConnect::new(tls::client_config(&mode)?);
    Ok((config, tls))
}

/// Refuses a URL whose password may be cut at an `@` or `?` of its own: what follows the first of them is taken for the names of host,
/// database and options, which errors and logs show.
fn check_separators(url: &str) -> Result<(), StoreError> {
    let (base, options) = url.split_once('?').unwrap_or((url, ""));
    if base.matches('@').count() > 1 || options.contains('@') {
        let why = "has an @ that does not end its password: in names, passwords and options write @ as %40 and ? as %3F";
        return Err(StoreError::Backend(why.to_owned()));
    }
    Ok(())
}

impl Connect for Connector {
    fn connect(
        &self,
        _: &Config,
    ) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), tokio_postgres::Error>> {
        Box::pin(async move {
            let connector = self.clone();
            // On the runtime of the driver: the socket belongs to the runtime that opens it.
            let opening = self
                .runtime
                .spawn(async move { connector.connect_driven().await });
            match opening.await {
                Ok(opened) => opened,
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_that_may_be_cut_is_refused_and_not_shown() {
        for url in [
            "postgres://axed:se@cret@db/axed",
            "postgres://axed:se@c/ret@db/axed",
            "postgres://axed:se?cret@db/axed",
        ] {
            let Err(error) = configure(url).map(drop) else {
                panic!("{url} was accepted");
            };
            let said = error.to_string();
            assert!(said.contains("as %40") && !said.contains("ret"), "{said}");
        }
        let url = "postgres://axed:s%40c%3Fret@db/axed?application_name=a%40b";
        let (config, _tls) = configure(url).unwrap();
        assert_eq!(config.get_password(), Some(&b"s@c?ret"[..]));
        assert_eq!(config.get_application_name(), Some("a@b"));
    }

    #[test]
    fn the_last_limit_of_a_statement_holds() {
        let limit = |options: &str| statement_timeout(&format!("{SESSION_OPTIONS} {options}"));
        let milliseconds = |it| Some(Duration::from_millis(it));
        assert_eq!(limit(""), milliseconds(60_000));
        assert_eq!(limit("-c statement_timeout=5000"), milliseconds(5000));
        assert_eq!(limit("--statement-timeout=7 -c jit=on"), milliseconds(7));
        assert_eq!(limit("-c statement_timeout=0"), None);
        assert_eq!(limit("-c statement_timeout=5min"), None);
    }
}
