//! The client of OpenAI's chat API (`POST /chat/completions`, <https://platform.openai.com/docs/api-reference/chat>), which
//! many other services and servers implement too.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderName;

use crate::config;
use crate::providers::batches::BatchApi;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::HttpClient;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::headers::KeyHeader;
use crate::providers::openai_chat::batches::OpenAiBatches;
use crate::providers::openai_chat::reply::ChatReplyBuilder;
use crate::providers::openai_chat::request::{Dialect, MaxTokensField, RequestBody};
use crate::providers::openai_service::OpenAiService;
use crate::providers::setup_error::SetupError;
use crate::providers::{
    BatchClient, BatchItem, BatchProvider, ChatRequest, Delta, Provider, ProviderError, Reply,
    request_body,
};

mod batches;
mod content_chunks;
pub mod echo_payload;
mod reasoning_details;
mod reply;
pub mod request;

const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// The header by which xAI sends the requests of a conversation to the server that caches its prompt.
const XAI_CONVERSATION: HeaderName = HeaderName::from_static("x-grok-conv-id");

/// The client of one service that implements OpenAI's chat API.
pub struct OpenAiChat {
    endpoint: Endpoint<ChatReplyBuilder>,
    dialect: Dialect,
    batches: OpenAiBatches,
}

/// The address of the configured service.
pub fn base_url(config: &config::Provider) -> Result<BaseUrl, SetupError> {
    let base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
    Ok(match base.has_path() {
        true => base,
        false => base.join("/v1"),
    })
}

impl OpenAiChat {
    pub fn new(
        service_id: String,
        service: OpenAiService,
        config: &config::Provider,
    ) -> Result<Self, SetupError> {
        let base = base_url(config)?;
        let max_tokens_field = match config.max_tokens_field.as_deref() {
            Some("max_tokens") => MaxTokensField::MaxTokens,
            Some("max_completion_tokens") => MaxTokensField::MaxCompletionTokens,
            Some(_) => return Err(SetupError::MaxTokensField),
            None if service.has_openai_rules() => MaxTokensField::MaxCompletionTokens,
            None => MaxTokensField::MaxTokens,
        };
        let dialect = Dialect {
            service,
            max_tokens_field,
            serves_openai: service.has_openai_rules() || service_id == "openai",
        };
        let client = HttpClient::new(config, &base, "/chat/completions", KeyHeader::Bearer)?;
        let batches = OpenAiBatches(BatchApi::new(&client, &base, config.batch_poll));
        let endpoint = Endpoint::new(client, service_id);
        Ok(Self {
            endpoint: match service {
                OpenAiService::Xai => endpoint.with_conversation_header(XAI_CONVERSATION),
                _ => endpoint,
            },
            dialect,
            batches,
        })
    }

    pub fn endpoint(&self) -> &Endpoint<ChatReplyBuilder> {
        &self.endpoint
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    fn request_body<'a>(&self, request: &ChatRequest<'a>) -> RequestBody<'a> {
        RequestBody::new(request, self.endpoint.origin(request.model), self.dialect)
    }
}

impl Provider for OpenAiChat {
    fn batch_provider(&self) -> Option<&dyn BatchProvider> {
        Some(self)
    }

    fn takes_tool_choice(&self) -> bool {
        true
    }

    fn caches_prompts(&self) -> bool {
        self.dialect.serves_openai || self.dialect.service.caches_prompts()
    }

    fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let body = self.request_body(&request);
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl BatchProvider for OpenAiChat {
    fn batch_client(&self) -> &dyn BatchClient {
        &self.batches
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = request_body::serialize_with_extra(&self.request_body(request), request)?;
        let path = "/v1/chat/completions";
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
        (self.endpoint).read_batch_reply(request.model, status, body, deltas)
    }
}
