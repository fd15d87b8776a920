//! What the writer finds out and repairs before its first task.

use std::collections::VecDeque;
use std::time::Duration;

use tokio_postgres::{Client, Error};

use crate::config::cluster::Cluster;
use crate::domain::run::RunId;
use crate::store::StoreError;
use crate::store::cluster::OtherNode;
use crate::store::encoding::clock_skew::{MAX_RETRY_MS, id_millis};
use crate::store::postgres::commit::WriterState;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::{node, pooler, schema};
use crate::store::sql::clock::clock;
use crate::store::sql::dialect::Dialect;
use crate::store::write_queue::deletions::Deletions;

/// How long the database may take for its first answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Connects, migrates the database and joins it. Returns the other nodes too.
pub async fn start(
    connector: &Connector,
    cluster: &Cluster,
) -> Result<(WriterState, Vec<OtherNode>), StoreError> {
    let name = &connector.name;
    let opened = tokio::time::timeout(ANSWER_TIMEOUT, open(connector)).await;
    let mut client = opened.unwrap_or_else(|_| {
        Err(StoreError::Backend(format!(
            "{name} did not answer within {} s; a pooler there may have too few connections",
            ANSWER_TIMEOUT.as_secs()
        )))
    })?;
    schema::migrate(&mut client, name, schema::MIGRATIONS).await?;
    let error = |error: Error| name.error(&error);
    let node = node::join(&mut client, cluster).await.map_err(error)?;
    let others = node::read_others(&client, node).await.map_err(error)?;
    align_clock(&client).await.map_err(error)?;
    let deletions = load_deletions(&client).await.map_err(error)?;
    Ok((WriterState::new(node, deletions), others))
}

async fn open(connector: &Connector) -> Result<Client, StoreError> {
    let name = &connector.name;
    let connected = connector.connect().await;
    let client = connected.map_err(|error| {
        let StoreError::Backend(why) = name.error(&error) else {
            return name.error(&error);
        };
        StoreError::Backend(format!("{why}; {}", advice(&why)))
    })?;
    pooler::check(connector, &client).await?;
    Ok(client)
}

/// What to do if a connection fails for this reason.
fn advice(why: &str) -> &'static str {
    const CASES: [(&str, &str); 4] = [
        (
            "startup parameter: options",
            "set ignore_startup_parameters = options in the pooler",
        ),
        (
            "client certificate",
            "axed has no certificate of its own: let its user in by password in the server's pg_hba.conf",
        ),
        (
            "certificate",
            "name the certificate of the server's authority in sslrootcert, or choose another sslmode",
        ),
        (
            "does not support TLS",
            "set up TLS at the server, or choose another sslmode",
        ),
    ];
    let case = CASES.iter().find(|(part, _)| why.contains(part));
    case.map_or(
        "check data.url, and that the server runs and lets this user in",
        |(_, advice)| advice,
    )
}

const ALIGN_DELIVERIES: &str = concat!(
    "UPDATE deliveries SET next_at = ",
    clock!(),
    ", since = least(since, ",
    clock!(),
    ") WHERE next_at > ",
    clock!(),
    " + $1"
);

/// Prepares for a clock that was set back since the last start: new runs sort after the stored ones, and no delivery waits
/// for a time that is far in the future.
async fn align_clock(client: &Client) -> Result<(), Error> {
    let newest = client
        .query_opt(
            "SELECT id, created_at FROM runs ORDER BY id DESC LIMIT 1",
            &[],
        )
        .await?;
    if let Some(row) = newest {
        let (id, created): (uuid::Uuid, i64) = (row.try_get("id")?, row.try_get("created_at")?);
        RunId(id).advance_newest();
        let id_ms = id_millis(id.as_u128());
        client
            .execute(
                "UPDATE clock SET lead = greatest(lead, $1), lag = greatest(lag, $2) WHERE id = 1",
                &[
                    &id_ms.saturating_sub(created),
                    &created.saturating_sub(id_ms),
                ],
            )
            .await?;
    }
    let align = Dialect::Postgres.text(ALIGN_DELIVERIES);
    client.execute(&*align, &[&MAX_RETRY_MS]).await?;
    Ok(())
}

async fn load_deletions(client: &Client) -> Result<Deletions, Error> {
    let found = client.query("SELECT root FROM deletions", &[]).await?;
    let roots = found.iter().map(|row| Ok(RunId(row.try_get("root")?)));
    Ok(Deletions::new(
        roots.collect::<Result<VecDeque<_>, Error>>()?,
    ))
}
