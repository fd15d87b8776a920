//! What the system and the person at the terminal ask of a running process.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// A wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalAction {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Reload,
}

/// Hears signals from the moment it is made; the process no longer dies of them.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Starts to listen.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next wish.
    pub async fn recv(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.hangup.recv() => SignalAction::Reload,
        }
    }

    /// Waits until somebody wants this process to stop. A terminal that goes away wants that too, where there is nothing
    /// to reload.
    pub async fn wait_for_stop(&mut self) {
        self.recv().await;
    }
}
