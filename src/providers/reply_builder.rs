//! Reads a reply from a response, whole or as a stream, on any wire.

use crate::domain::message::truncate_to_bytes;
use crate::providers::echo::ReplyOrigin;
use crate::providers::http_client::transport::HttpResponse;
use crate::providers::http_client::{BodyPart, HttpClient, PartError};
use crate::providers::stream_decoder::StreamFormat;
use crate::providers::{Delta, ProviderError, Reply};

/// The longest name of a model or of a reason to stop that is kept.
const MAX_NAME_BYTES: usize = 256;

/// Builds a reply from the parts of a response. Each wire has its own.
pub trait ReplyBuilder: Default + Send {
    const FORMAT: StreamFormat;

    /// Adds a whole reply, or one message of a stream. Returns whether it was the last; at the end of a stream, whether the
    /// reply is complete all the same.
    ///
    /// # Errors
    /// The service reported an error, or the part cannot be parsed.
    fn push_part(
        &mut self,
        part: BodyPart<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, PartError>;

    /// Whether the service has reported the final usage.
    fn has_final_usage(&self) -> bool;

    /// Returns the reply. Its echo is tagged with `origin`.
    ///
    /// # Errors
    /// The reply has no content.
    fn finish(self, origin: ReplyOrigin<'_>) -> Result<Reply, ProviderError>;
}

/// Reads a response. `stream` is whether the request has `stream: true`, which publishes deltas.
///
/// # Errors
/// The service sent an error, the connection broke, or the reply is invalid.
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
                if stream || matches!(delta, Delta::Usage(_) | Delta::Cost(_) | Delta::Billing(_)) {
                    deltas(delta);
                }
            })
        })
        .await;
    let has_final_usage = builder.has_final_usage();
    result
        .and_then(|()| {
            let reply = builder.finish(origin).map(with_bounded_names);
            reply.map_err(|error| client.reply_error(error))
        })
        .map_err(|error| error.with_final_usage(has_final_usage))
}

/// What a service calls things is kept with the run, and in metrics and logs.
fn with_bounded_names(reply: Reply) -> Reply {
    let bounded = |mut name: String| {
        name.truncate(truncate_to_bytes(&name, MAX_NAME_BYTES).len());
        name
    };
    Reply {
        model: reply.model.map(bounded),
        stop_reason: reply.stop_reason.map(bounded),
        ..reply
    }
}

/// Appends without copying the first piece, which is often the only one.
pub fn append(text: &mut String, more: String) {
    match text.is_empty() {
        true => *text = more,
        false => text.push_str(&more),
    }
}
