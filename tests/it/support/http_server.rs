//! A server that a story writes itself.

use std::net::SocketAddr;

use axum::Router;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Serves these routes on a free port, until the set of tasks is dropped.
pub async fn serve(routes: Router) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let mut server = JoinSet::new();
    server.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
    (address, server)
}
