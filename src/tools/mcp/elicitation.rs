//! Questions of servers to people (MCP's elicitation): reads them, and writes the answers as the protocol has them.

use serde_json::{Map, Value, json};
use url::Url;

use crate::domain::input::MAX_QUESTION_BYTES;
use crate::domain::lenient_json::text;
use crate::domain::message::shorten;
use crate::domain::server_question::{ServerQuestion, ServerQuestions};
use crate::tools::AnswerToQuestion;
use crate::tools::ask_person::checked_schema;
use crate::tools::mcp::session::McpSession;

/// The most questions of one result.
const MAX_QUESTIONS: usize = 8;
const MAX_KEY_BYTES: usize = 200;
const MAX_STATE_BYTES: usize = 64 << 10;

/// Who asks, and for which key.
pub struct Asker<'a> {
    /// The name of the server.
    pub server: &'a str,
    pub session: &'a McpSession,
    /// The API key of the run.
    pub owner: Option<&'a str>,
}

impl Asker<'_> {
    /// The questions of a result that requires input; `None` if it requires none.
    ///
    /// # Errors
    /// They cannot be shown to a person.
    pub async fn required(&self, result: &Value) -> Result<Option<ServerQuestions>, String> {
        if result.get("resultType").and_then(Value::as_str) != Some("input_required") {
            return Ok(None);
        }
        let state = text(result, "requestState").map(str::to_owned);
        if state.as_ref().is_some_and(|it| it.len() > MAX_STATE_BYTES) {
            return Err(format!(
                "its requestState has more than {MAX_STATE_BYTES} bytes"
            ));
        }
        let none = Map::new();
        let requests = result.get("inputRequests").and_then(Value::as_object);
        let requests = requests.unwrap_or(&none);
        if requests.len() > MAX_QUESTIONS {
            return Err(format!(
                "it asks more than {MAX_QUESTIONS} questions at once"
            ));
        }
        if requests.is_empty() && state.is_none() {
            return Err("it requires input and does not say which".to_owned());
        }
        let mut questions = Vec::with_capacity(requests.len());
        for (key, request) in requests {
            if key.len() > MAX_KEY_BYTES {
                return Err(format!(
                    "a name of its questions has more than {MAX_KEY_BYTES} bytes"
                ));
            }
            let method = text(request, "method").unwrap_or_default();
            if method != "elicitation/create" {
                let method = shorten(method, 100);
                return Err(format!("it requires {method}, which axed does not support"));
            }
            let is_unanswered = request.get("unanswered") == Some(&Value::Bool(true));
            let key = (!is_unanswered).then(|| key.clone());
            let params = request.get("params").unwrap_or(&Value::Null);
            questions.push(self.question(key, params).await?);
        }
        Ok(Some(ServerQuestions { state, questions }))
    }

    /// The value without the server's secrets in its texts.
    fn redact(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.session.redact_result(text)),
            Value::Array(values) => values.into_iter().map(|it| self.redact(it)).collect(),
            Value::Object(fields) => {
                let fields = fields.into_iter();
                fields.map(|(key, it)| (key, self.redact(it))).collect()
            }
            other => other,
        }
    }

    /// The question of a request.
    ///
    /// # Errors
    /// It cannot be shown to a person.
    pub async fn question(
        &self,
        key: Option<String>,
        params: &Value,
    ) -> Result<ServerQuestion, String> {
        let message = text(params, "message").ok_or("its question has no message")?;
        let is_page = text(params, "mode") == Some("url");
        let (message, schema) = match is_page {
            true => {
                let url = text(params, "url").and_then(|url| Url::parse(url).ok());
                let url = url.filter(|url| matches!(url.scheme(), "http" | "https"));
                let url = url.ok_or("its question has no URL of a page (http or https)")?;
                let message =
                    format!("{message}\nOpen {url} and answer true when it is done there.");
                (message, json!({"type": "boolean", "enum": [true]}))
            }
            false => {
                let schema = params.get("requestedSchema").cloned();
                let schema = schema.unwrap_or_else(|| json!({"type": "object", "properties": {}}));
                (message.to_owned(), schema)
            }
        };
        if message.len() > MAX_QUESTION_BYTES {
            return Err(format!(
                "its question has more than {MAX_QUESTION_BYTES} bytes"
            ));
        }
        let Value::Object(schema) = self.redact(schema) else {
            return Err("the schema of its question is no object".to_owned());
        };
        let schema = checked_schema(&schema, self.owner).await;
        Ok(ServerQuestion {
            key,
            server: self.server.to_owned(),
            text: self.session.redact_result(message),
            schema: schema.map_err(|why| format!("the form of its question: {why}"))?,
            is_page,
        })
    }
}

/// The answer to a question.
pub fn response(question: &ServerQuestion, answer: &AnswerToQuestion) -> Value {
    match answer {
        AnswerToQuestion::Answered(_) if question.is_page => json!({"action": "accept"}),
        AnswerToQuestion::TimedOut { .. } if question.is_page => json!({"action": "cancel"}),
        AnswerToQuestion::Answered(content)
        | AnswerToQuestion::TimedOut {
            default: Some(content),
            ..
        } => {
            let content: Value = serde_json::from_str(content.get()).unwrap_or_default();
            json!({"action": "accept", "content": content})
        }
        AnswerToQuestion::Declined(_) => json!({"action": "decline"}),
        AnswerToQuestion::TimedOut { default: None, .. } => json!({"action": "cancel"}),
    }
}
