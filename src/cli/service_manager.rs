//! Reports the daemon's state to the service manager that started it, such as systemd (`Type=notify`). Without one,
//! nothing happens.

use std::convert::Infallible;
use std::net::SocketAddr;

use sd_notify::NotifyState;
use tokio::task::JoinSet;
use tracing::warn;

pub fn notify_ready(address: SocketAddr) {
    let status = format!("Listening on http://{address}");
    notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
}

/// A reload has begun. [`notify_reloaded`] must follow.
pub fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        // systemd requires the time.
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => warn!("The service manager is not notified of the reload: {error}"),
    }
}

pub fn notify_reloaded() {
    notify(&[NotifyState::Ready]);
}

pub fn notify_stopping() {
    let status = NotifyState::Status("Stopping after every run has ended");
    notify(&[NotifyState::Stopping, status]);
}

/// Reports that the daemon works, twice in each interval of the service manager's watchdog. If the runtime's threads
/// are blocked, the reports stop, and the service manager restarts the daemon.
pub async fn feed_watchdog() -> Infallible {
    let Some(timeout) = sd_notify::watchdog_enabled().filter(|timeout| !timeout.is_zero()) else {
        return std::future::pending().await;
    };
    let mut interval = tokio::time::interval(timeout / 2);
    let mut probes = JoinSet::new();
    loop {
        interval.tick().await;
        // A worker thread of the runtime has to run this.
        probes.spawn(async {});
        probes.join_next().await;
        notify(&[NotifyState::Watchdog]);
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!("The service manager cannot be notified through NOTIFY_SOCKET: {error}");
    }
}
