//! Drives an open connection: receives messages, and reads the process's standard error.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;

use crate::tools::mcp::close_state::CloseState;

const CLOSE_TIMEOUT: Duration = Duration::from_secs(6);
/// How long reading the last lines of a process may take after its end.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);

/// The work of a connection's task while the connection is open.
pub struct SessionDriver {
    pub service: BoxFuture<'static, ()>,
    pub stderr: StderrTask,
    pub close_state: CloseState,
}

/// Why a connection ended.
pub struct Disconnected(pub String);

/// Logs what a process writes to its standard error.
#[derive(Default)]
pub struct StderrTask {
    pub reader: Option<BoxFuture<'static, ()>>,
}

impl SessionDriver {
    /// Resolves when the connection has ended. Cancel safe.
    pub async fn wait_closed(&mut self) -> Disconnected {
        self.stderr.concurrently(&mut self.service).await;
        let reason = self
            .close_state
            .reason
            .get()
            .map_or("it closed the connection", String::as_str);
        Disconnected(self.close_state.redact(reason))
    }

    /// Closes the connection in order.
    pub async fn close(&mut self) {
        self.close_state.stop.cancel();
        // If that takes too long, the service is dropped, which kills its process.
        let _ = timeout(CLOSE_TIMEOUT, self.wait_closed()).await;
    }
}

impl StderrTask {
    /// Reads the rest of the output, if it ends soon.
    pub async fn drain(&mut self) {
        if let Some(listening) = self.reader.take() {
            let _ = timeout(STDERR_TIMEOUT, listening).await;
        }
    }

    /// Runs `work` while the output is logged. Otherwise a full pipe would block the process.
    pub async fn concurrently<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        if let Some(listening) = &mut self.reader {
            tokio::select! {
                biased;
                output = &mut work => return output,
                () = listening => {}
            }
            self.reader = None;
        }
        work.await
    }
}
