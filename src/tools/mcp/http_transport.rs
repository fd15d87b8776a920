//! The HTTP transport of one connection, which ends if the server reads no answers to its own requests.

use rmcp::RoleClient;
use rmcp::model::JsonRpcMessage;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::streamable_http_client::StreamableHttpError;
use rmcp::transport::{StreamableHttpClientTransport, Transport};
use tokio_util::sync::CancellationToken;

use crate::tools::mcp::close_state::CloseReason;
use crate::tools::mcp::http::HttpClient;
use crate::tools::mcp::http_response::HttpError;
use crate::tools::mcp::unread::{UNREAD_REASON, UnreadMessages};

pub struct HttpTransport {
    /// `None` once the connection has ended because of the answers.
    client: Option<StreamableHttpClientTransport<HttpClient>>,
    /// Answers to requests of the server. Our own requests do not count: they may take long.
    unread_answers: UnreadMessages,
    close_reason: CloseReason,
    /// Cancelled when the connection ends because of the answers, so that nothing waits for them.
    ended: CancellationToken,
}

impl HttpTransport {
    pub fn new(
        client: StreamableHttpClientTransport<HttpClient>,
        close_reason: CloseReason,
    ) -> Self {
        Self {
            client: Some(client),
            unread_answers: UnreadMessages::default(),
            close_reason,
            ended: CancellationToken::new(),
        }
    }
}

impl Transport<RoleClient> for HttpTransport {
    type Error = StreamableHttpError<HttpError>;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        let is_answer = matches!(
            &message,
            JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)
        );
        let guard = is_answer.then(|| self.unread_answers.count_one());
        let ended = self.ended.clone();
        let sending = self.client.as_mut().map(|client| client.send(message));
        async move {
            match (sending, guard) {
                (Some(sending), Some(_guard)) => tokio::select! {
                    sent = sending => sent,
                    () = ended.cancelled() => Ok(()),
                },
                (Some(sending), None) => sending.await,
                (None, _) => Ok(()),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if self.unread_answers.is_full() {
            let _ = self.close_reason.set(UNREAD_REASON.to_owned());
            self.ended.cancel();
            // Closing it could wait for ever: its task gives out one message more. It ends the session after it is dropped, too.
            self.client = None;
        }
        self.client.as_mut()?.receive().await
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        match &mut self.client {
            Some(client) => client.close().await,
            None => Ok(()),
        }
    }
}
