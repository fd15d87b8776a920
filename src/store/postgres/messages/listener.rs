//! Listens to the messages of other nodes on a connection of its own, which is opened again if it breaks.

use std::cell::Cell;
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
use crate::store::postgres::messages::queue::MessageQueue;
use crate::store::postgres::node::CurrentNode;

/// The pause before the connection is opened again; it doubles with each failure.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// How often the node looks whether it has another id.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often, in checks, a statement shows that the connection works, and how long it may take.
const CHECKS_PER_PROBE: u32 = 10;
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// After how many messages of this node to itself, of which none has arrived, the log says so. There is one in each interval.
const MAX_LOST_MESSAGES: u32 = 15;

/// Whether what this node sends itself arrives.
#[derive(Default)]
struct Delivery {
    has_received: Cell<bool>,
    has_warned: Cell<bool>,
}

/// Passes on what arrives, for ever. The queue is that of messages to other nodes.
pub async fn run(
    connector: &Connector,
    node: &CurrentNode,
    queue: &MessageQueue,
    received: &broadcast::Sender<Arc<NodeMessage>>,
) {
    let mut pause = MIN_RETRY_INTERVAL;
    let mut is_failing = false;
    let delivery = Delivery::default();
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
                let read = read(messages, received, &delivery);
                let subscribed = Subscriber {
                    connector,
                    client: &client,
                    node,
                    queue,
                    delivery: &delivery,
                };
                tokio::select! {
                    why = read => why,
                    why = subscribed.keep(on_listening) => why,
                }
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

/// Passes on what arrives. Returns why nothing does any more.
async fn read(
    messages: impl Stream<Item = Result<AsyncMessage, Error>>,
    received: &broadcast::Sender<Arc<NodeMessage>>,
    delivery: &Delivery,
) -> String {
    let mut messages = pin!(messages);
    while let Some(message) = messages.next().await {
        match message {
            Ok(AsyncMessage::Notification(notification)) => {
                delivery.has_received.set(true);
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
}

struct Subscriber<'l> {
    connector: &'l Connector,
    client: &'l Client,
    node: &'l CurrentNode,
    queue: &'l MessageQueue,
    delivery: &'l Delivery,
}

impl Subscriber<'_> {
    /// Listens to the channels of this node, also after it has joined again, and looks now and then whether the connection works:
    /// then it calls `on_listening`. Returns why it is of no use any more.
    async fn keep(&self, mut on_listening: impl FnMut()) -> String {
        let mut subscribed: Option<NodeId> = None;
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut checks, mut sent) = (0_u32, 0);
        self.delivery.has_received.set(false);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.node.joined_again.notified() => {}
            }
            let current = self.node.get();
            checks = checks.wrapping_add(1);
            let sql = if subscribed != Some(current) {
                let (all, own) = (channel::name(None), channel::name(Some(current)));
                format!("UNLISTEN *; LISTEN {all}; LISTEN {own}")
            } else if checks.is_multiple_of(CHECKS_PER_PROBE) {
                "SELECT 1".to_owned()
            } else {
                self.check_delivery(current, &mut sent);
                continue;
            };
            match tokio::time::timeout(PROBE_TIMEOUT, self.client.batch_execute(&sql)).await {
                Ok(Ok(())) => {
                    subscribed = Some(current);
                    on_listening();
                }
                Ok(Err(error)) => return describe(&error),
                Err(_) => return "the database did not answer in time".to_owned(),
            }
        }
    }

    /// Sends this node messages until one arrives: those of others come the same way. `sent` is their number.
    fn check_delivery(&self, node: NodeId, sent: &mut u32) {
        let Delivery {
            has_received,
            has_warned,
        } = self.delivery;
        if has_received.get() {
            if has_warned.take() {
                info!(
                    "{}: messages of other nodes arrive again",
                    self.connector.name
                );
            }
            return;
        }
        if *sent == MAX_LOST_MESSAGES && !has_warned.replace(true) {
            warn!(
                "{}: no messages arrive, so what other nodes do is seen up to a second later, and the text of their models not before it \
                 is complete: set data.listen_url to the database's own address, without a pooler",
                self.connector.name
            );
        }
        *sent = sent.saturating_add(1);
        // It only makes this node look for requests.
        self.queue.push(Some(node), NodeMessage::Requests);
    }
}
