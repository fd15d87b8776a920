//! Listens to the messages of other nodes on a connection of its own, which is opened again if it breaks.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tokio::sync::broadcast;
use tokio_postgres::{AsyncMessage, Client, Error};
use tracing::{info, warn};

use crate::domain::node::NodeId;
use crate::store::node_messages::NodeMessage;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::error::describe;
use crate::store::postgres::messages::channel;
use crate::store::postgres::node::CurrentNode;

/// The pause before the connection is opened again; it doubles with each failure.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// How often the node looks whether it has another id.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often, in checks, a statement shows that the connection works, and how long it may take.
const CHECKS_PER_PROBE: u32 = 10;
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Passes on what arrives, for ever.
pub async fn run(
    connector: &Connector,
    node: &CurrentNode,
    received: &broadcast::Sender<Arc<NodeMessage>>,
) {
    let mut pause = MIN_RETRY_INTERVAL;
    let mut is_failing = false;
    loop {
        let opened = tokio::time::timeout(PROBE_TIMEOUT, connector.connect_listening()).await;
        let why = match opened {
            Ok(Ok((client, messages))) => {
                let on_listening = || {
                    if std::mem::take(&mut is_failing) {
                        info!("{}: listening to the other nodes again", connector.name);
                    }
                    pause = MIN_RETRY_INTERVAL;
                };
                listen(&client, messages, node, received, on_listening).await
            }
            Ok(Err(error)) => describe(&error),
            Err(_) => "the database did not answer in time".to_owned(),
        };
        if !std::mem::replace(&mut is_failing, true) {
            warn!(
                "{}: not listening to the other nodes, so what they do is seen up to a second later: {why}",
                connector.name
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_INTERVAL);
    }
}

/// Calls `on_listening` whenever the connection has shown that it works. Returns why it is of no use any more.
async fn listen(
    client: &Client,
    messages: impl Stream<Item = Result<AsyncMessage, Error>>,
    node: &CurrentNode,
    received: &broadcast::Sender<Arc<NodeMessage>>,
    on_listening: impl FnMut(),
) -> String {
    let read = async {
        let mut messages = pin!(messages);
        while let Some(message) = messages.next().await {
            match message {
                Ok(AsyncMessage::Notification(notification)) => {
                    if let Some(message) = channel::decode(notification.payload()) {
                        // Nobody may be looking for messages yet.
                        let _ = received.send(Arc::new(message));
                    }
                }
                Ok(_) => {}
                Err(error) => return describe(&error),
            }
        }
        "the connection was closed".to_owned()
    };
    tokio::select! {
        why = read => why,
        why = keep_subscribed(client, node, on_listening) => why,
    }
}

/// Listens to the channels of this node, also after it has joined again, and looks now and then whether the connection works.
async fn keep_subscribed(
    client: &Client,
    node: &CurrentNode,
    mut on_listening: impl FnMut(),
) -> String {
    let mut subscribed: Option<NodeId> = None;
    let mut ticks = tokio::time::interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut checks = 0_u32;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = node.joined_again.notified() => {}
        }
        let current = node.get();
        checks = checks.wrapping_add(1);
        let sql = if subscribed != Some(current) {
            let (all, own) = (channel::name(None), channel::name(Some(current)));
            format!("UNLISTEN *; LISTEN {all}; LISTEN {own}")
        } else if checks.is_multiple_of(CHECKS_PER_PROBE) {
            "SELECT 1".to_owned()
        } else {
            continue;
        };
        match tokio::time::timeout(PROBE_TIMEOUT, client.batch_execute(&sql)).await {
            Ok(Ok(())) => {
                subscribed = Some(current);
                on_listening();
            }
            Ok(Err(error)) => return describe(&error),
            Err(_) => return "the database did not answer in time".to_owned(),
        }
    }
}
