//! One service on one wire: sends its requests, reads its replies and names their origin. Knows no service's JSON.

use std::marker::PhantomData;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;

use crate::providers::echo::Origin;
use crate::providers::reply_builder::{ReplyBuilder, read_reply};
use crate::providers::wire::{Answered, Wire};
use crate::providers::{Category, ChatRequest, Delta, ProviderError, Reply, request_body};

/// One service whose replies a `B` reads.
pub struct Endpoint<B> {
    wire: Wire,
    /// Marks the echoes of this service.
    mark: String,
    builder: PhantomData<fn() -> B>,
}

impl<B: ReplyBuilder> Endpoint<B> {
    /// The service that `wire` posts to.
    pub fn new(wire: Wire, mark: String) -> Self {
        let builder = PhantomData;
        Self {
            wire,
            mark,
            builder,
        }
    }

    /// What it posts with.
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Where the replies of that model come from.
    pub fn origin<'a>(&'a self, model: &'a str) -> Origin<'a> {
        let service = &self.mark;
        Origin { service, model }
    }

    /// Sends the request as this body, and reads the reply.
    pub fn complete<'a>(
        &'a self,
        body: &impl Serialize,
        request: &ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = request_body::write(body, request);
        let (model, stream, trace) = (request.model, request.stream, request.trace);
        let key = request.key;
        Box::pin(async move {
            let answered = self.wire.send(body?, trace, key).await?;
            self.read(answered, model, stream, deltas).await
        })
    }

    /// Reads an answer of the service to a request for `model`. `stream` is whether a stream, and so deltas, was asked
    /// for.
    ///
    /// # Errors
    /// See [`read_reply`].
    pub fn read<'a>(
        &'a self,
        answered: Answered,
        model: &'a str,
        stream: bool,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> impl Future<Output = Result<Reply, ProviderError>> + Send + 'a {
        let origin = self.origin(model);
        read_reply::<B>(&self.wire, answered, origin, stream, deltas)
    }

    /// Reads an answer that came in a batch as one of the network's.
    pub fn read_item<'a>(
        &'a self,
        model: &'a str,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let answered = Answered::whole(status, "application/json", [body]).map_err(|why| {
            let message = format!("the batch answered with a status that there is not: {why}");
            ProviderError::new(Category::Server, message)
        });
        Box::pin(async move { self.read(answered?, model, false, deltas).await })
    }
}
