//! Sends messages to other nodes, many in one transaction.

use std::time::Duration;

use tokio_postgres::{Client, Error, Statement};
use tracing::debug;

use crate::store::postgres::connect::Connector;
use crate::store::postgres::messages::channel;
use crate::store::postgres::messages::queue::{MessageQueue, QueuedMessage};

/// The time between two transactions, in which messages gather. The first message after a pause is sent at once.
const INTERVAL: Duration = Duration::from_millis(12);
/// Messages in one transaction.
const MAX_MESSAGES: usize = 512;
/// What takes longer is of no use any more.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failure. Messages of that time are sent afterwards, if there are not too many.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Nothing is lost with a message, so that the transaction need not wait for the disk.
const SEND: &str = "WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)) \
     SELECT count(pg_notify(m.channel, m.payload)) \
     FROM relaxed, unnest($1::text[], $2::text[]) AS m (channel, payload)";

/// Sends what is queued, for ever. What fails is dropped.
pub async fn run(connector: &Connector, queue: &MessageQueue) {
    let mut connection: Option<(Client, Statement)> = None;
    loop {
        let messages = queue.take(MAX_MESSAGES).await;
        let sent = tokio::time::timeout(TIMEOUT, send(connector, &mut connection, &messages)).await;
        let pause = match sent {
            Ok(Ok(())) => INTERVAL,
            Ok(Err(error)) => {
                debug!(error = %error, "{}: messages to other nodes were not sent: {error}", connector.name);
                connection = None;
                RETRY_INTERVAL
            }
            Err(_) => {
                debug!(
                    "{}: messages to other nodes were not sent in time",
                    connector.name
                );
                connection = None;
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn send(
    connector: &Connector,
    connection: &mut Option<(Client, Statement)>,
    messages: &[QueuedMessage],
) -> Result<(), Error> {
    let (channels, payloads): (Vec<String>, Vec<String>) = messages
        .iter()
        .filter_map(|it| Some((channel::name(it.to), channel::encode(&it.message)?)))
        .unzip();
    if payloads.is_empty() {
        return Ok(());
    }
    let (client, statement) = match connection {
        Some((client, statement)) if !client.is_closed() => (client, statement),
        _ => {
            let client = connector.connect().await?;
            let statement = client.prepare(SEND).await?;
            let (client, statement) = connection.insert((client, statement));
            (client, statement)
        }
    };
    client.query(statement, &[&channels, &payloads]).await?;
    Ok(())
}
