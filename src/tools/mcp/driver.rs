//! What the one task of a connection drives while the connection is open.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::timeout;

use crate::tools::mcp::close_state::CloseState;

/// The longest that an orderly end may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(6);
/// How long what a process wrote last may take to be read after its end.
const STDERR_TIMEOUT: Duration = Duration::from_secs(1);

/// What goes on while a connection is open.
pub struct SessionDriver {
    pub service: BoxFuture<'static, ()>,
    pub stderr: StderrTask,
    pub close_state: CloseState,
}

/// Why a connection ended.
pub struct Disconnected(pub String);

/// Logs what a process writes on its standard error.
#[derive(Default)]
pub struct StderrTask {
    pub reader: Option<BoxFuture<'static, ()>>,
}

impl SessionDriver {
    /// Comes back when the connection has ended. May be dropped and called again.
    pub async fn wait_closed(&mut self) -> Disconnected {
        self.stderr.concurrently(&mut self.service).await;
        let reason = self
            .close_state
            .reason
            .get()
            .map_or("it closed the connection", String::as_str);
        Disconnected(self.close_state.redact(reason))
    }

    /// Ends it in order.
    pub async fn close(&mut self) {
        self.close_state.stop.cancel();
        // What does not end by then is dropped, and with it its process.
        let _ = timeout(CLOSE_TIMEOUT, self.wait_closed()).await;
    }
}

impl StderrTask {
    /// Reads what was written to its end, if that comes soon.
    pub async fn drain(&mut self) {
        if let Some(listening) = self.reader.take() {
            let _ = timeout(STDERR_TIMEOUT, listening).await;
        }
    }

    /// Does the work while what is written is logged: a full pipe would stop the writer.
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
