//! What a server asks persons in requests of its own, while calls are in flight on its connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rmcp::model::ErrorData;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::tools::mcp::message::ASKING_CALL;

/// Questions that a call has not looked at.
const MAX_UNSEEN: usize = 8;

/// The calls in flight of one connection, which get its server's questions.
#[derive(Default)]
pub struct OpenQuestions(Mutex<HashMap<String, CallState>>);

struct CallState {
    questions: mpsc::Sender<OpenQuestion>,
    /// Questions that are not answered.
    open: usize,
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
    /// Registers the call with this key until the registration is dropped.
    pub fn register(self: &Arc<Self>, key: &str) -> Registration {
        let (questions, received) = mpsc::channel(MAX_UNSEEN);
        let state = CallState { questions, open: 0 };
        self.lock().insert(key.to_owned(), state);
        Registration {
            calls: Arc::clone(self),
            key: key.to_owned(),
            received,
        }
    }

    /// Waits for the answer to a question.
    ///
    /// # Errors
    /// No call can be found that it is about, that call has too many questions, or it cannot be shown.
    pub async fn ask(
        &self,
        params: Value,
        withdrawn: CancellationToken,
    ) -> Result<Value, ErrorData> {
        let (reply, answer) = oneshot::channel();
        let question = OpenQuestion {
            params,
            reply,
            withdrawn,
        };
        let key = self.deliver(question)?;
        let answer = answer.await;
        if let Some(call) = self.lock().get_mut(&key) {
            call.open = call.open.saturating_sub(1);
        }
        // The call has ended without an answer.
        answer.unwrap_or_else(|_| Ok(json!({"action": "cancel"})))
    }

    /// Gives a question to its call: the one on whose stream it came, else the only one that does not wait for an answer already.
    fn deliver(&self, question: OpenQuestion) -> Result<String, ErrorData> {
        let mut calls = self.lock();
        let named = question.params.get(ASKING_CALL).and_then(Value::as_str);
        let mut candidates = calls.iter_mut().filter(|(key, call)| match named {
            Some(named) => *key == named,
            None => call.open == 0,
        });
        let (Some((key, call)), None) = (candidates.next(), candidates.next()) else {
            let why = "it is not known which of the calls in progress the question is about";
            return Err(ErrorData::invalid_request(why, None));
        };
        if call.questions.try_send(question).is_err() {
            let why = format!("the call has {MAX_UNSEEN} questions that wait");
            return Err(ErrorData::invalid_request(why, None));
        }
        call.open += 1;
        Ok(key.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CallState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that gets the questions that are about it.
pub struct Registration {
    calls: Arc<OpenQuestions>,
    key: String,
    received: mpsc::Receiver<OpenQuestion>,
}

impl Registration {
    /// The next question. Cancel safe.
    pub async fn next(&mut self) -> OpenQuestion {
        match self.received.recv().await {
            Some(question) => question,
            // The call's key was registered again.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.calls.lock().remove(&self.key);
    }
}
