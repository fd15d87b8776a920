//! The client of OpenAI's Responses API (`POST /responses`,
//! <https://platform.openai.com/docs/api-reference/responses>). The service stores nothing: every request carries the whole
//! conversation.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::config::models::ModelFacts;
use crate::domain::agent::params::Params;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::openai_chat::OpenAiChat;
use crate::providers::openai_models::{is_openai_model, prefers_responses_api};
use crate::providers::openai_responses::reply::ResponsesReplyBuilder;
use crate::providers::openai_responses::request::RequestBody;
use crate::providers::setup_error::SetupError;
use crate::providers::{
    BatchClient, BatchItem, BatchProvider, ChatRequest, Delta, Provider, ProviderError, Reply,
    request_body,
};

mod reply;
mod request;

/// The client of one service that implements OpenAI's Responses API.
pub struct OpenAiResponses {
    endpoint: Endpoint<ResponsesReplyBuilder>,
    /// The same service's chat API, for requests that need what this API lacks.
    chat: OpenAiChat,
    /// Whether the models of others are requested on the chat API.
    only_openai_models: bool,
}

impl OpenAiResponses {
    /// `chat` must be a client of the same service at `base`.
    pub fn new(service_id: String, base: &BaseUrl, chat: OpenAiChat) -> Result<Self, SetupError> {
        let client = chat.endpoint().client().with_path(base, "/responses")?;
        Ok(Self {
            endpoint: Endpoint::new(client, service_id),
            chat,
            only_openai_models: false,
        })
    }

    /// Leaves the models of others to the chat API.
    pub fn for_openai_models(self) -> Self {
        Self {
            only_openai_models: true,
            ..self
        }
    }

    /// Whether a request is for a model, or needs a feature, that only the chat API has.
    fn needs_chat_api(&self, request: &ChatRequest<'_>) -> bool {
        let (model, facts) = (request.model, request.facts);
        let lacks_stop = !request.params.stop.is_empty() && !prefers_responses_api(model, facts);
        lacks_stop || (self.only_openai_models && !is_openai_model(model, facts))
    }

    pub fn endpoint(&self) -> &Endpoint<ResponsesReplyBuilder> {
        &self.endpoint
    }

    fn request_body<'a>(&self, request: &ChatRequest<'a>) -> RequestBody<'a> {
        let origin = self.endpoint.origin(request.model);
        RequestBody::new(request, origin, self.chat.dialect())
    }
}

impl Provider for OpenAiResponses {
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        Some(self)
    }

    fn takes_tool_choice(&self) -> bool {
        true
    }

    fn caches_prompts(&self) -> bool {
        true
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if self.needs_chat_api(&request) {
            return self.chat.complete(request, deltas);
        }
        let body = self.request_body(&request);
        self.endpoint.complete(&body, &request, deltas)
    }

    fn dropped_params_warning(
        &self,
        model: &str,
        params: &Params,
        facts: Option<&ModelFacts>,
    ) -> Option<String> {
        (!params.stop.is_empty() && prefers_responses_api(model, facts)).then(|| {
            format!(
                "`stop` is not sent: {model} is served on OpenAI's Responses API, which has no stop sequences; remove \
                 it from the agent, or set api = \"chat\" for the provider"
            )
        })
    }
}

impl BatchProvider for OpenAiResponses {
    fn batch_client(&self) -> &dyn BatchClient {
        self.chat.batch_client()
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        if self.needs_chat_api(request) {
            return self.chat.batch_item(request);
        }
        let body = request_body::serialize_with_extra(&self.request_body(request), request)?;
        let path = "/v1/responses";
        let request = self.endpoint.sent_request(body, request.api_key);
        Ok(BatchItem { path, request })
    }

    fn read_batch_reply<'a>(
        &'a self,
        request: ChatRequest<'a>,
        status: u16,
        body: Bytes,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        if self.needs_chat_api(&request) {
            return self.chat.read_batch_reply(request, status, body, deltas);
        }
        (self.endpoint).read_batch_reply(request.model, status, body, deltas)
    }
}
