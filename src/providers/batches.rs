//! Batches of OpenAI (<https://developers.openai.com/api/docs/guides/batch>) and of Anthropic
//! (<https://platform.claude.com/docs/en/api/messages/batches>): a request is handed over, and its reply is there when the
//! service found time for it. Each batch here has one request. Knows no run.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::providers::wire::{self, Base, Call, Wire};
use crate::providers::{Category, ProviderError, refusal};

/// How long OpenAI keeps the files of a batch, in seconds: longer than any batch takes.
const KEPT: u64 = 172_800;
/// The key of OpenAI's metadata by which a batch is found again.
const ITEM: &str = "axed_item";
/// Most characters of a batch's id.
const MAX_ID: usize = 128;

/// A service's batches.
pub struct Batches {
    wire: Wire,
    base: Base,
    form: Form,
    /// The longest pause between two looks at a batch.
    pub longest_pause: Duration,
}

/// Whose batches they are.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// A file of requests, a batch of that file, and a file of replies.
    Openai,
    /// A list of requests, and a list of replies.
    Anthropic,
}

/// The request of a batch.
pub struct BatchItem {
    /// OpenAI: the endpoint that it is for.
    pub path: &'static str,
    /// Its body.
    pub body: Vec<u8>,
}

/// What a look at a batch found.
#[derive(Debug)]
pub enum Look {
    /// It is not done.
    Working,
    /// What the service answered, as it would have at once.
    Answered {
        /// HTTP's status.
        status: u16,
        /// The body.
        body: Bytes,
    },
    /// There is no answer, and why.
    Failed(ProviderError),
    /// The service had no time for it.
    Expired,
}

impl Batches {
    /// Those of the service below `base`.
    pub fn new(wire: &Wire, base: &Base, form: Form, longest_pause: Duration) -> Self {
        Self {
            wire: wire.clone(),
            base: base.clone(),
            form,
            longest_pause,
        }
    }

    /// Hands a request over; the id of its batch. `name` is what the request is known by there.
    pub async fn create(
        &self,
        name: &str,
        item: &BatchItem,
        key: Option<&SecretString>,
    ) -> Result<String, ProviderError> {
        let body: &RawValue = wire::read(std::str::from_utf8(&item.body).unwrap_or_default())?;
        let created = match self.form {
            Form::Anthropic => {
                #[derive(Serialize)]
                struct Request<'a> {
                    custom_id: &'a str,
                    params: &'a RawValue,
                }
                #[derive(Serialize)]
                struct Create<'a> {
                    requests: [Request<'a>; 1],
                }
                let create = Create {
                    requests: [Request {
                        custom_id: name,
                        params: body,
                    }],
                };
                let call = Call::post("/v1/messages/batches", wire::write(&create)?);
                self.wire.call(&self.base, call, key).await?
            }
            Form::Openai => {
                #[derive(Serialize)]
                struct Line<'a> {
                    custom_id: &'a str,
                    method: &'static str,
                    url: &'static str,
                    body: &'a RawValue,
                }
                let line = Line {
                    custom_id: name,
                    method: "POST",
                    url: item.path,
                    body,
                };
                let file = self.upload(name, wire::write(&line)?, key).await?;
                let create = json!({
                    "input_file_id": file,
                    "endpoint": item.path,
                    "completion_window": "24h",
                    "metadata": {ITEM: name},
                    "output_expires_after": {"anchor": "created_at", "seconds": KEPT},
                });
                let call = Call::post("/batches", wire::write(&create)?);
                self.wire.call(&self.base, call, key).await?
            }
        };
        id_in(&created)
    }

    /// Uploads a file of one line; its id.
    async fn upload(
        &self,
        name: &str,
        line: Vec<u8>,
        key: Option<&SecretString>,
    ) -> Result<String, ProviderError> {
        // The line has no line end in it, so that it cannot hold the boundary.
        let boundary = format!("axed-{name}");
        let field = |field: &str, value: &str| {
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"{field}\"\r\n\r\n{value}\r\n"
            )
        };
        let mut body = [
            field("purpose", "batch"),
            field("expires_after[anchor]", "created_at"),
            field("expires_after[seconds]", &KEPT.to_string()),
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}.jsonl\"\r\n\
                 Content-Type: application/jsonl\r\n\r\n"
            ),
        ]
        .concat()
        .into_bytes();
        body.extend(line);
        body.extend(format!("\n\r\n--{boundary}--\r\n").into_bytes());
        let call = Call {
            content_type: Some(format!("multipart/form-data; boundary={boundary}")),
            ..Call::post("/files", body)
        };
        id_in(&self.wire.call(&self.base, call, key).await?)
    }

    /// Finds the batch of a request that was handed over, where the service tells: Anthropic does not.
    pub async fn find(
        &self,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<Option<String>, ProviderError> {
        #[derive(Deserialize)]
        struct Listed {
            id: String,
            status: Option<String>,
            metadata: Option<serde_json::Map<String, serde_json::Value>>,
        }
        #[derive(Deserialize)]
        struct List {
            data: Vec<Listed>,
        }
        if let Form::Anthropic = self.form {
            return Ok(None);
        }
        let call = Call {
            query: Some("limit=100"),
            ..Call::get("/batches")
        };
        let list = self.wire.call(&self.base, call, key).await?;
        let list: List = read(&list)?;
        let is_it = |batch: &Listed| {
            let named = batch
                .metadata
                .as_ref()
                .and_then(|it| it.get(ITEM)?.as_str());
            let is_over = matches!(
                batch.status.as_deref(),
                Some("failed" | "cancelled" | "cancelling")
            );
            named == Some(name) && !is_over
        };
        let found = list.data.into_iter().find(is_it);
        found.map(|batch| checked(batch.id)).transpose()
    }

    /// Looks at a batch, and fetches what it has for the request once it is done.
    ///
    /// # Errors
    /// The look failed, which says nothing of the batch.
    pub async fn look(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<Look, ProviderError> {
        match self.form {
            Form::Anthropic => self.look_at_anthropic(batch, name, key).await,
            Form::Openai => self.look_at_openai(batch, name, key).await,
        }
    }

    async fn look_at_anthropic(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<Look, ProviderError> {
        #[derive(Deserialize)]
        struct State<'a> {
            processing_status: Cow<'a, str>,
        }
        let path = format!("/v1/messages/batches/{batch}");
        let state = self.wire.call(&self.base, Call::get(&path), key).await?;
        if read::<State<'_>>(&state)?.processing_status != "ended" {
            return Ok(Look::Working);
        }
        let results = format!("{path}/results");
        let results = self.wire.call(&self.base, Call::get(&results), key).await?;
        of_anthropic(text(&results)?, name)
    }

    async fn look_at_openai(
        &self,
        batch: &str,
        name: &str,
        key: Option<&SecretString>,
    ) -> Result<Look, ProviderError> {
        #[derive(Deserialize)]
        struct Errors<'a> {
            #[serde(borrow)]
            data: Option<Vec<&'a RawValue>>,
        }
        #[derive(Deserialize)]
        struct State<'a> {
            status: Cow<'a, str>,
            output_file_id: Option<String>,
            error_file_id: Option<String>,
            #[serde(borrow)]
            errors: Option<Errors<'a>>,
        }
        let path = format!("/batches/{batch}");
        let state = self.wire.call(&self.base, Call::get(&path), key).await?;
        let state: State<'_> = read(&state)?;
        let without = match state.status.as_ref() {
            "completed" => Look::Failed(ProviderError::new(
                Category::Server,
                "the batch has no reply to the request",
            )),
            "expired" => Look::Expired,
            "cancelled" => cancelled(),
            "failed" => {
                let error = state
                    .errors
                    .and_then(|errors| errors.data?.into_iter().next());
                let said = error.map(|error| refusal::in_reply(error.get()).message);
                let said = said.unwrap_or_else(|| "the batch failed".to_owned());
                return Ok(Look::Failed(ProviderError::new(Category::BadRequest, said)));
            }
            _ => return Ok(Look::Working),
        };
        for file in [state.output_file_id, state.error_file_id]
            .into_iter()
            .flatten()
        {
            let path = format!("/files/{}/content", checked(file)?);
            let lines = self.wire.call(&self.base, Call::get(&path), key).await?;
            if let Some(found) = of_openai(text(&lines)?, name)? {
                return Ok(found);
            }
        }
        Ok(without)
    }

    /// Asks the service not to begin with a batch.
    pub async fn cancel(
        &self,
        batch: &str,
        key: Option<&SecretString>,
    ) -> Result<(), ProviderError> {
        let path = match self.form {
            Form::Anthropic => format!("/v1/messages/batches/{batch}/cancel"),
            Form::Openai => format!("/batches/{batch}/cancel"),
        };
        let call = Call::post(&path, Vec::new());
        self.wire.call(&self.base, call, key).await.map(drop)
    }
}

fn of_anthropic(lines: &str, name: &str) -> Result<Look, ProviderError> {
    #[derive(Deserialize)]
    struct Outcome<'a> {
        #[serde(rename = "type")]
        kind: Cow<'a, str>,
        #[serde(borrow)]
        message: Option<&'a RawValue>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        result: Outcome<'a>,
    }
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let Line { custom_id, result } = wire::read(line)?;
        if custom_id != name {
            continue;
        }
        return Ok(match (result.kind.as_ref(), result.message, result.error) {
            ("succeeded", Some(message), _) => answered(200, message),
            ("errored", _, Some(error)) => Look::Failed(refusal::in_reply(error.get())),
            ("expired", ..) => Look::Expired,
            ("canceled", ..) => cancelled(),
            _ => Look::Failed(refusal::in_reply(line)),
        });
    }
    let message = "the batch has no reply to the request";
    Ok(Look::Failed(ProviderError::new(Category::Server, message)))
}

fn of_openai(lines: &str, name: &str) -> Result<Option<Look>, ProviderError> {
    #[derive(Deserialize)]
    struct Response<'a> {
        status_code: u16,
        #[serde(borrow)]
        body: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Fault<'a> {
        code: Option<Cow<'a, str>>,
    }
    #[derive(Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        response: Option<Response<'a>>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let read: Line<'_> = wire::read(line)?;
        if read.custom_id != name {
            continue;
        }
        if let Some(Response { status_code, body }) = read.response {
            return Ok(Some(answered(status_code, body)));
        }
        let error = read.error.map_or(line, RawValue::get);
        let fault = serde_json::from_str::<Fault<'_>>(error).ok();
        let code = fault.and_then(|fault| fault.code).unwrap_or_default();
        return Ok(Some(match code.as_ref() {
            "batch_expired" => Look::Expired,
            "batch_cancelled" => cancelled(),
            _ => Look::Failed(refusal::in_reply(error)),
        }));
    }
    Ok(None)
}

fn answered(status: u16, body: &RawValue) -> Look {
    Look::Answered {
        status,
        body: Bytes::copy_from_slice(body.get().as_bytes()),
    }
}

/// Somebody cancelled it at the service.
fn cancelled() -> Look {
    let message = "the batch was cancelled at the service";
    Look::Failed(ProviderError::new(Category::BadRequest, message))
}

fn id_in(body: &Bytes) -> Result<String, ProviderError> {
    #[derive(Deserialize)]
    struct Made {
        id: String,
    }
    checked(read::<Made>(body)?.id)
}

/// An id that may stand in a path.
fn checked(id: String) -> Result<String, ProviderError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    match (1..=MAX_ID).contains(&id.len()) && id.chars().all(is_plain) {
        true => Ok(id),
        false => Err(ProviderError::new(
            Category::Server,
            "the service named a batch or file by what is no id",
        )),
    }
}

fn text(body: &Bytes) -> Result<&str, ProviderError> {
    std::str::from_utf8(body).map_err(|why| {
        let message = format!("failed to parse response: {why}");
        ProviderError::new(Category::Server, message)
    })
}

fn read<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, ProviderError> {
    wire::read(text(body)?)
}

#[cfg(test)]
mod tests {
    use super::{Look, checked, of_anthropic, of_openai};

    fn shown(look: &Look) -> String {
        match look {
            Look::Working => "working".to_owned(),
            Look::Answered { status, body } => {
                format!("{status} {}", String::from_utf8_lossy(body))
            }
            Look::Failed(error) => error.to_string(),
            Look::Expired => "expired".to_owned(),
        }
    }

    #[test]
    fn a_line_of_results_is_found_by_its_name_and_read() {
        let anthropic = concat!(
            "{\"custom_id\":\"b\",\"result\":{\"type\":\"expired\"}}\n\n",
            "{\"custom_id\":\"a\",\"result\":{\"type\":\"succeeded\",\"message\":{\"id\":1}}}\n",
            "{\"custom_id\":\"c\",\"result\":{\"type\":\"errored\",\"error\":{\"type\":\"error\",\"error\":",
            "{\"type\":\"invalid_request_error\",\"message\":\"no\"}}}}\n",
            "{\"custom_id\":\"d\",\"result\":{\"type\":\"canceled\"}}",
        );
        for (name, wanted) in [
            ("a", "200 {\"id\":1}"),
            ("b", "expired"),
            ("c", "bad_request: no"),
            ("d", "bad_request: the batch was cancelled at the service"),
            ("e", "server: the batch has no reply to the request"),
        ] {
            assert_eq!(
                shown(&of_anthropic(anthropic, name).expect("lines")),
                wanted
            );
        }
        let openai = concat!(
            "{\"custom_id\":\"a\",\"response\":{\"status_code\":429,\"body\":{\"x\":1}},\"error\":null}\n",
            "{\"custom_id\":\"b\",\"response\":null,\"error\":{\"code\":\"batch_expired\",\"message\":\"late\"}}\n",
            "{\"custom_id\":\"c\",\"error\":{\"code\":\"rate_limit_exceeded\",\"message\":\"busy\"}}\n",
        );
        for (name, wanted) in [
            ("a", Some("429 {\"x\":1}")),
            ("b", Some("expired")),
            ("c", Some("rate_limit: busy")),
            ("d", None),
        ] {
            let found = of_openai(openai, name).expect("lines");
            assert_eq!(found.as_ref().map(shown).as_deref(), wanted);
        }
        assert!(of_openai("{", "a").is_err() && of_anthropic("[]", "a").is_err());
    }

    #[test]
    fn an_id_cannot_lead_elsewhere() {
        assert!(checked("batch_01-Ab".to_owned()).is_ok());
        for bad in ["", "../files", "a/b", "a?b", "a#b", "é", &"a".repeat(129)] {
            assert!(checked(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
