//! Reads a reply from a service's answer, whole or as a stream, on any wire. Knows no service's JSON.

use crate::providers::echo::Origin;
use crate::providers::lines::Format;
use crate::providers::wire::{Answered, Part, Wire};
use crate::providers::{Delta, ProviderError, Reply};

/// A reply of one wire as far as it has come.
pub trait ReplyBuilder: Default + Send {
    /// How the wire separates the messages of a stream.
    const FORMAT: Format;

    /// Takes the whole reply, or one message of a stream; returns whether it was the last.
    ///
    /// # Errors
    /// The service reported one, or the message cannot be read.
    fn part(
        &mut self,
        part: Part<'_>,
        deltas: &mut dyn FnMut(Delta<'_>),
    ) -> Result<bool, ProviderError>;

    /// Whether all that the reply used has been reported.
    fn is_counted(&self) -> bool;

    /// The reply, with what is to go back to its `origin`.
    ///
    /// # Errors
    /// It has no content.
    fn reply(self, origin: Origin<'_>) -> Result<Reply, ProviderError>;
}

/// Reads an answer. `stream` is whether a stream, and so deltas, was asked for.
///
/// # Errors
/// The service refused, the connection broke, or the reply makes no sense.
pub async fn read_reply<B: ReplyBuilder>(
    wire: &Wire,
    answered: Answered,
    origin: Origin<'_>,
    stream: bool,
    deltas: &mut (dyn FnMut(Delta<'_>) + Send),
) -> Result<Reply, ProviderError> {
    let mut reply = B::default();
    let ended = wire
        .hear(answered, B::FORMAT, stream, |part| {
            reply.part(part, &mut |delta| {
                if stream || matches!(delta, Delta::Usage(_) | Delta::Billed(_)) {
                    deltas(delta);
                }
            })
        })
        .await;
    let is_counted = reply.is_counted();
    ended
        .and_then(|()| {
            let reply = reply.reply(origin);
            reply.map_err(|error| wire.broke_off(error))
        })
        .map_err(|error| error.counted(is_counted))
}
