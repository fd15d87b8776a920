//! The client of OpenAI's chat API (`POST /chat/completions`, <https://platform.openai.com/docs/api-reference/chat>), which
//! many other services and servers implement too.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::config::{self, OpenAiApi};
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::HttpClient;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::headers::KeyHeader;
use crate::providers::openai_chat::batches::OpenAiBatches;
use crate::providers::openai_chat::reply::ChatReplyBuilder;
use crate::providers::openai_chat::request::{Dialect, MaxTokensField, RequestBody};
use crate::providers::setup_error::SetupError;
use crate::providers::{
    BatchClient, BatchItem, BatchProvider, ChatRequest, Delta, Provider, ProviderError, Reply,
    request_body,
};

mod batches;
pub mod echo_payload;
mod reply;
mod request;

const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
const OPENAI_HOST: &str = "api.openai.com";
/// The end of the host of every resource of Azure OpenAI.
const AZURE_DOMAIN: &str = ".openai.azure.com";

/// The client of one service that implements OpenAI's chat API.
pub struct OpenAiChat {
    endpoint: Endpoint<ChatReplyBuilder>,
    dialect: Dialect,
    batches: OpenAiBatches,
}

/// The address of the configured service, and which of OpenAI's two APIs to use.
pub fn base_url_and_api(config: &config::Provider) -> Result<(BaseUrl, OpenAiApi), SetupError> {
    let mut base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
    if !base.has_path() {
        base = base.join("/v1");
    }
    let default_api = match base.host() == OPENAI_HOST {
        true => OpenAiApi::Responses,
        false => OpenAiApi::Chat,
    };
    let api = config.api.unwrap_or(default_api);
    Ok((base, api))
}

impl OpenAiChat {
    pub fn new(service_id: String, config: &config::Provider) -> Result<Self, SetupError> {
        let (base, _) = base_url_and_api(config)?;
        let max_tokens_field = match config.max_tokens_field.as_deref() {
            Some("max_tokens") => MaxTokensField::MaxTokens,
            Some("max_completion_tokens") => MaxTokensField::MaxCompletionTokens,
            Some(_) => return Err(SetupError::MaxTokensField),
            None if base.host() == OPENAI_HOST => MaxTokensField::MaxCompletionTokens,
            None => MaxTokensField::MaxTokens,
        };
        let is_service = |preset: &str, host: &str| {
            base.host() == host || service_id.strip_prefix("openai/") == Some(preset)
        };
        // These require their fields even in replies that another model wrote before a fallback.
        let wants_reasoning = is_service("deepseek", "api.deepseek.com");
        let wants_signatures = is_service("gemini", "generativelanguage.googleapis.com");
        let has_mistral_rules = is_service("mistral", "api.mistral.ai");
        let is_azure = service_id == "openai/azure" || base.host().ends_with(AZURE_DOMAIN);
        let needs_json_prompt = is_azure || service_id == "openai" || base.host() == OPENAI_HOST;
        let client = HttpClient::new(config, &base, "/chat/completions", KeyHeader::Bearer)?;
        let batches = OpenAiBatches::new(&client, &base, config.batch_poll);
        Ok(Self {
            endpoint: Endpoint::new(client, service_id),
            dialect: Dialect {
                max_tokens_field,
                wants_reasoning,
                wants_signatures,
                has_mistral_rules,
                needs_json_prompt,
            },
            batches,
        })
    }

    pub fn endpoint(&self) -> &Endpoint<ChatReplyBuilder> {
        &self.endpoint
    }

    /// Whether the service refuses the format `json_object` unless the prompt mentions JSON.
    pub fn needs_json_prompt(&self) -> bool {
        self.dialect.needs_json_prompt
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
