//! Reads a reply from a service's answer, whole or as a stream, on any wire. Knows no service's JSON.

use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::{BodyPart, HttpClient, HttpResponse, PartError};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::{Delta, ProviderError, Reply};

/// A reply of one wire as far as it has come.
pub trait ReplyBuilder: Default + Send {
    /// How the wire separates the messages of a stream.
    const FORMAT: StreamFormat;

    /// Takes the whole reply, or one message of a stream; returns whether it was the last.
    ///
    /// # Errors
    /// The service reported one, or the message cannot be read.
    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError>;

    /// Whether all that the reply used has been reported.
    fn has_final_usage(&self) -> bool;

    /// The reply, with what is to go back to its `origin`.
    ///
    /// # Errors
    /// It has no content.
    fn finish(self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError>;
}

/// Reads an answer. `stream` is whether a stream, and so deltas, was asked for.
///
/// # Errors
/// The service refused, the connection broke, or the reply makes no sense.
pub async fn read_reply<B: ReplyBuilder>(
    client: &HttpClient,
    response: HttpResponse,
    origin: ReplyOrigin<'_>,
    stream: bool,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Reply, ProviderError> {
    let mut builder = B::default();
    let result = client
        .read_body(response, B::FORMAT, stream, |part| {
            builder.push_part(part, &mut |delta| {
                if stream || matches!(delta, Delta::Usage(_) | Delta::ServiceTier(_)) {
                    deltas(delta);
                }
            })
        })
        .await;
    let has_final_usage = builder.has_final_usage();
    result
        .and_then(|()| {
            let reply = builder.finish(origin);
            reply.map_err(|error| client.reply_error(error))
        })
        .map_err(|error| error.with_final_usage(has_final_usage))
}

/// Adds `more` to `text`; the first piece, often the only one, is not copied.
pub fn append(text: &mut String, more: String) {
    match text.is_empty() {
        true => *text = more,
        false => text.push_str(&more),
    }
}
