//! Answers of the fake provider, independent of the wire.

use axum::body::Bytes;
use serde_json::{Value, json};

use crate::support::gate::Gate;

/// Tokens that an answer reports. `input` leaves the cached ones out, as Anthropic's wire does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Fresh input.
    pub input: u64,
    /// Output.
    pub output: u64,
    /// Read from the cache.
    pub cache_read: u64,
    /// Written to the cache.
    pub cache_write: u64,
}

impl Tokens {
    /// Input as axed counts it: the cached ones included.
    pub fn total_input(&self) -> u64 {
        self.input + self.cache_read + self.cache_write
    }
}

/// One scripted answer.
#[derive(Clone, Debug)]
pub struct ScriptedAnswer {
    /// The content.
    pub content: Content,
    /// `None`: the answer reports no usage.
    pub usage: Option<Tokens>,
    /// `None`: the wire's default.
    pub stop_reason: Option<String>,
    /// The reported model; `None`: the requested one.
    pub model: Option<String>,
    /// The reported tier; `None`: the requested one.
    pub tier: Option<&'static str>,
    /// The service lets it expire within a batch.
    pub expires: bool,
    /// Additional headers.
    pub headers: Vec<(&'static str, String)>,
    /// Nothing is sent before this opens.
    pub start_gate: Option<Gate>,
    /// The head and the first piece are sent, the rest only when this opens.
    pub resume_gate: Option<Gate>,
    /// The last piece is sent only when this opens.
    pub last_gate: Option<Gate>,
    /// Its text is a refusal, in the wire's own form.
    pub is_refusal: bool,
    /// The model's thinking before the answer.
    pub thought: Option<Thought>,
    /// Whether and how the answer breaks.
    pub ending: Ending,
}

/// Thinking, as a service reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Thought {
    /// Its text, or a summary.
    Readable(String),
    /// Encrypted, without a text.
    Hidden,
}

/// The content of an answer.
#[derive(Clone, Debug)]
pub enum Content {
    /// A model's reply.
    Reply {
        /// Its text.
        text: String,
        /// Its tool calls.
        calls: Vec<(String, Value)>,
    },
    /// An error in the wire's own shape.
    Error {
        /// HTTP's status.
        status: u16,
        /// The message in the body.
        message: String,
    },
    /// These bytes, whatever the wire.
    Raw {
        /// HTTP's status.
        status: u16,
        /// The content type.
        kind: &'static str,
        /// The body.
        body: Bytes,
    },
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Completely.
    Whole,
    /// The connection breaks in the middle of an event or of the JSON.
    Cut,
    /// It never ends.
    Endless,
}

/// A final text.
pub fn says(text: impl Into<String>) -> ScriptedAnswer {
    ScriptedAnswer::new(Content::Reply {
        text: text.into(),
        calls: Vec::new(),
    })
}

/// Tool calls, without text.
pub fn calls<N: Into<String>>(calls: impl IntoIterator<Item = (N, Value)>) -> ScriptedAnswer {
    ScriptedAnswer::new(Content::Reply {
        text: String::new(),
        calls: calls.into_iter().map(|(n, a)| (n.into(), a)).collect(),
    })
}

/// Delegates each of these tasks to its agent, all in one reply.
pub fn delegates<const N: usize>(tasks: [(&str, &str); N]) -> ScriptedAnswer {
    calls(tasks.map(|(agent, task)| ("call_agent", json!({"agent": agent, "task": task}))))
}

/// An error in the wire's own shape.
pub fn fails(status: u16, message: impl Into<String>) -> ScriptedAnswer {
    ScriptedAnswer::new(Content::Error {
        status,
        message: message.into(),
    })
}

/// Any bytes.
pub fn raw(status: u16, kind: &'static str, body: impl Into<Bytes>) -> ScriptedAnswer {
    ScriptedAnswer::new(Content::Raw {
        status,
        kind,
        body: body.into(),
    })
}

/// Never answers: the connection stays open until the other side closes it.
pub fn hangs() -> ScriptedAnswer {
    says("never said").after_gate(&Gate::closed())
}

impl ScriptedAnswer {
    fn new(content: Content) -> Self {
        Self {
            content,
            usage: Some(Tokens {
                input: 10,
                output: 5,
                ..Tokens::default()
            }),
            stop_reason: None,
            model: None,
            tier: None,
            expires: false,
            headers: Vec::new(),
            start_gate: None,
            resume_gate: None,
            last_gate: None,
            is_refusal: false,
            thought: None,
            ending: Ending::Whole,
        }
    }

    /// A text beside tool calls.
    pub fn with_text(mut self, added: &str) -> Self {
        if let Content::Reply { text, .. } = &mut self.content {
            added.clone_into(text);
        }
        self
    }

    /// Adds thinking.
    pub fn with_thought(mut self, text: &str) -> Self {
        self.thought = Some(Thought::Readable(text.to_owned()));
        self
    }

    /// Adds encrypted thinking.
    pub fn with_hidden_thought(mut self) -> Self {
        self.thought = Some(Thought::Hidden);
        self
    }

    /// Reports these tokens.
    pub fn with_usage(mut self, input: u64, output: u64) -> Self {
        self.usage = Some(Tokens {
            input,
            output,
            ..Tokens::default()
        });
        self
    }

    /// Reports these cached tokens too.
    pub fn with_cached_tokens(mut self, read: u64, write: u64) -> Self {
        let usage = self.usage.get_or_insert_default();
        usage.cache_read = read;
        usage.cache_write = write;
        self
    }

    /// Reports no usage.
    pub fn without_usage(mut self) -> Self {
        self.usage = None;
        self
    }

    /// Sets the provider's stop reason.
    pub fn with_stop_reason(mut self, reason: &str) -> Self {
        self.stop_reason = Some(reason.to_owned());
        self
    }

    /// Refuses with its text.
    pub fn into_refusal(mut self) -> Self {
        self.is_refusal = true;
        self
    }

    /// Reports this model.
    pub fn with_model(mut self, model: &str) -> Self {
        self.model = Some(model.to_owned());
        self
    }

    /// Reports this tier.
    pub fn with_tier(mut self, tier: &'static str) -> Self {
        self.tier = Some(tier);
        self
    }

    /// Expires within a batch.
    pub fn expiring(mut self) -> Self {
        self.expires = true;
        self
    }

    /// Sends this header too.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Sends nothing before the gate opens.
    pub fn after_gate(mut self, gate: &Gate) -> Self {
        self.start_gate = Some(gate.clone());
        self
    }

    /// Sends its head and first piece, and the rest when the gate opens.
    pub fn pausing_at(mut self, gate: &Gate) -> Self {
        self.resume_gate = Some(gate.clone());
        self
    }

    /// Sends everything but its last piece, and that when the gate opens. Only of streams.
    pub fn ending_at(mut self, gate: &Gate) -> Self {
        self.last_gate = Some(gate.clone());
        self
    }

    /// Breaks the connection in the middle.
    pub fn cut(mut self) -> Self {
        self.ending = Ending::Cut;
        self
    }

    /// Never stops sending.
    pub fn endless(mut self) -> Self {
        self.ending = Ending::Endless;
        self
    }
}
