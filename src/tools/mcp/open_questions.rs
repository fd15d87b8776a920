//! What a server asks people in requests of its own, while calls are in flight on its connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rmcp::model::ErrorData;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::tools::mcp::message::ASKING_CALL;

/// Questions that a call has not looked at.
const MAX_UNSEEN: usize = 8;
/// The longest parameters of a question.
const MAX_PARAMS_BYTES: usize = 32 << 10;

/// The calls in flight of one connection, which get its server's questions.
#[derive(Default)]
pub struct OpenQuestions {
    calls: Mutex<HashMap<String, mpsc::Sender<OpenQuestion>>>,
    /// Whether the server asks on this connection without saying for which call. Shared with its later connections.
    are_unnamed: Arc<AtomicBool>,
}

/// A request of the server that waits for its answer.
pub struct OpenQuestion {
    pub params: Value,
    reply: oneshot::Sender<Result<Value, ErrorData>>,
    /// Cancelled when the server does not wait any more.
    pub withdrawn: CancellationToken,
}

impl OpenQuestion {
    pub fn answer(self, answer: Value) {
        let _ = self.reply.send(Ok(answer));
    }

    pub fn refuse(self, why: String) {
        let _ = self.reply.send(Err(ErrorData::invalid_params(why, None)));
    }
}

impl OpenQuestions {
    pub fn new(are_unnamed: Arc<AtomicBool>) -> Self {
        Self {
            are_unnamed,
            ..Self::default()
        }
    }

    /// Registers the call with this key until the registration is dropped; `None` if it has to be alone and is not.
    pub fn register(self: &Arc<Self>, key: &str, alone: bool) -> Option<Registration> {
        let (sender, received) = mpsc::channel(MAX_UNSEEN);
        let mut calls = self.lock();
        if alone && !calls.is_empty() {
            return None;
        }
        calls.insert(key.to_owned(), sender.clone());
        Some(Registration {
            calls: Arc::clone(self),
            key: key.to_owned(),
            sender,
            received,
        })
    }

    /// Waits for the answer to a question.
    ///
    /// # Errors
    /// It is not known which call it is about, that call has too many questions, or it cannot be shown.
    pub async fn ask(
        &self,
        params: Value,
        withdrawn: CancellationToken,
    ) -> Result<Value, ErrorData> {
        let (reply, answer) = oneshot::channel();
        self.deliver(OpenQuestion {
            params,
            reply,
            withdrawn: withdrawn.clone(),
        })?;
        let cancelled = || Ok(json!({"action": "cancel"}));
        tokio::select! {
            // Otherwise the call has ended without an answer.
            answer = answer => answer.unwrap_or_else(|_| cancelled()),
            () = withdrawn.cancelled() => cancelled(),
        }
    }

    /// Gives a question to its call: the one on whose stream it came, else the only one in flight.
    fn deliver(&self, question: OpenQuestion) -> Result<(), ErrorData> {
        let refused = |why: String| Err(ErrorData::invalid_request(why, None));
        if question.params.to_string().len() > MAX_PARAMS_BYTES {
            return refused(format!("a question may have {MAX_PARAMS_BYTES} bytes"));
        }
        let calls = self.lock();
        let named = question.params.get(ASKING_CALL).and_then(Value::as_str);
        let call = match named {
            Some(named) => calls.get(named),
            None => {
                self.are_unnamed.store(true, Ordering::Relaxed);
                calls.values().next().filter(|_| calls.len() == 1)
            }
        };
        let Some(call) = call else {
            let why = "it is not known which of the calls in progress the question is about";
            return refused(why.to_owned());
        };
        match call.try_send(question) {
            Ok(()) => Ok(()),
            Err(_) => refused(format!("the call has {MAX_UNSEEN} questions that wait")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, mpsc::Sender<OpenQuestion>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that gets the questions that are about it.
pub struct Registration {
    calls: Arc<OpenQuestions>,
    key: String,
    sender: mpsc::Sender<OpenQuestion>,
    received: mpsc::Receiver<OpenQuestion>,
}

impl Registration {
    /// The next question. Cancel safe.
    pub async fn next(&mut self) -> OpenQuestion {
        match self.received.recv().await {
            Some(question) => question,
            // Cannot be: a sender is kept.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        if calls
            .get(&self.key)
            .is_some_and(|it| it.same_channel(&self.sender))
        {
            calls.remove(&self.key);
        }
    }
}
