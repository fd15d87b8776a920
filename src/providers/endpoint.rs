//! One service on one wire: sends requests, reads replies and tags echoes with their origin.

use std::marker::PhantomData;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderName, HeaderValue};
use secrecy::SecretString;
use serde::Serialize;

use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::HttpClient;
use crate::providers::http_client::transport::HttpResponse;
use crate::providers::reply_builder::{ReplyBuilder, read_reply};
use crate::providers::{
    ChatRequest, Delta, ErrorCategory, ProviderError, Reply, SentRequest, request_body,
};

/// One service. `B` parses its replies.
pub struct Endpoint<B> {
    client: HttpClient,
    /// Identifies the service in the echoes of its replies.
    service_id: String,
    /// Sent with the id of the request's conversation.
    conversation_header: Option<HeaderName>,
    builder: PhantomData<fn() -> B>,
}

impl<B: ReplyBuilder> Endpoint<B> {
    pub fn new(client: HttpClient, service_id: String) -> Self {
        Self {
            client,
            service_id,
            conversation_header: None,
            builder: PhantomData,
        }
    }

    pub fn with_conversation_header(self, name: HeaderName) -> Self {
        Self {
            conversation_header: Some(name),
            ..self
        }
    }

    pub fn client(&self) -> &HttpClient {
        &self.client
    }

    pub fn origin<'a>(&'a self, model: &'a str) -> ReplyOrigin<'a> {
        let service = &self.service_id;
        ReplyOrigin { service, model }
    }

    /// The request with this body, as it is sent.
    pub fn sent_request(&self, body: Vec<u8>, key: Option<&SecretString>) -> SentRequest {
        SentRequest {
            head: self.client.head(key),
            body: body.into(),
        }
    }

    /// Sends the request with this body, and reads the reply.
    pub fn complete<'a>(
        &'a self,
        body: &impl Serialize,
        request: &ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = request_body::serialize_with_extra(body, request);
        let (model, stream, trace) = (request.model, request.stream, request.trace);
        let key = request.api_key;
        let conversation = HeaderValue::from_str(request.conversation_id).ok();
        let conversation = self.conversation_header.as_ref().zip(conversation);
        Box::pin(async move {
            let sent = self.sent_request(body?, key);
            deltas(Delta::Sending(&sent));
            let response = self
                .client
                .send(sent.body, trace, key, conversation)
                .await?;
            deltas(Delta::ResponseStarted {
                status: response.status().as_u16(),
                headers: response.headers(),
            });
            // Boxed, so that requests whose response has not begun take no memory for it.
            Box::pin(self.read_response(response, model, stream, deltas)).await
        })
    }

    /// Reads a response to a request for `model`. `stream` is whether the request has `stream: true`, which publishes deltas.
    ///
    /// # Errors
    /// See [`read_reply`].
    pub fn read_response<'a>(
        &'a self,
        response: HttpResponse,
        model: &'a str,
        stream: bool,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> impl Future<Output = Result<Reply, ProviderError>> + Send + 'a {
        let origin = self.origin(model);
        read_reply::<B>(&self.client, response, origin, stream, deltas)
    }

    /// Reads a response that came in a batch like one from the network.
    pub fn read_batch_reply<'a>(
        &'a self,
        model: &'a str,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let response =
            HttpResponse::from_chunks(status, "application/json", [body]).map_err(|error| {
                let message =
                    format!("the batch has a response with an invalid HTTP status: {error}");
                ProviderError::new(ErrorCategory::Server, message)
            });
        Box::pin(async move { self.read_response(response?, model, false, deltas).await })
    }
}
