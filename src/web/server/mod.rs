//! Accepts connections, speaks HTTP/1.1 and HTTP/2 on them, and surrounds every request with the same middleware. Knows no route.

pub mod connection;
pub mod forwarded;
pub mod host;
pub mod listener;
pub mod middleware;
pub mod origin_guard;
pub mod pending;
