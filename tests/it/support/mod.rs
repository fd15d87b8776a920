//! Support for the stories: a daemon for each, a fake provider, and readers for responses.

pub mod app;
pub mod attachments;
pub mod client;
pub mod crashing_store;
pub mod daemon;
pub mod database;
pub mod events;
pub mod gate;
pub mod hanging_server;
pub mod hostile;
pub mod http_server;
pub mod oauth_server;
pub mod postgres;
pub mod provider;
pub mod relay;
pub mod replay;
pub mod run;
pub mod usage_sums;
pub mod webhook_receiver;

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpSocket;

/// The maximum wait of a story for one thing. Only a broken build reaches it, also on a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(180);

/// Waits for `what`, and fails the story with its name after the timeout.
pub async fn within_timeout<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TEST_TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {TEST_TIMEOUT:?} without seeing {what}"),
    }
}

/// Polls until `look` returns a value. Only for state outside of axed and this process, without notifications: files,
/// processes, another program's port.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    within_timeout(what, async {
        loop {
            if let Some(seen) = look().await {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// An address at which connections are refused: nobody listens, and nobody else gets the port while the socket lives.
pub fn refusing_address() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    let address = socket.local_addr().expect("an address");
    (socket, address)
}
