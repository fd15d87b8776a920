//! A host that takes every connection and never answers, at every address of this machine.

use std::sync::Arc;

use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::within_timeout;

/// The host. Goes away with the story.
pub struct HangingServer {
    port: u16,
    connections: Arc<watch::Sender<usize>>,
    _server: JoinSet<()>,
}

impl HangingServer {
    /// Starts one on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("0.0.0.0:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let open = Arc::new(watch::Sender::new(0));
        let mut server = JoinSet::new();
        let count = Arc::clone(&open);
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut connection, _)) = listener.accept().await {
                count.send_modify(|open| *open += 1);
                let count = Arc::clone(&count);
                connections.spawn(async move {
                    let mut buffer = [0; 4096];
                    while let Ok(1..) = connection.read(&mut buffer).await {}
                    count.send_modify(|open| *open -= 1);
                });
            }
        });
        Self {
            port,
            connections: open,
            _server: server,
        }
    }

    /// Its address under this host's name.
    pub fn url(&self, host: &str) -> String {
        format!("http://{host}:{}/", self.port)
    }

    /// Waits until that many connections hang.
    pub async fn wait_for_connections(&self, count: usize) {
        let mut open = self.connections.subscribe();
        let enough = open.wait_for(|open| *open >= count);
        let held = within_timeout(&format!("connection {count}"), enough).await;
        drop(held.expect("it lives"));
    }

    /// How many hang now.
    pub fn open_connections(&self) -> usize {
        *self.connections.borrow()
    }
}
