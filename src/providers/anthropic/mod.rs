//! The client of Anthropic's Messages API (`POST /v1/messages`, <https://docs.claude.com/en/api/messages>).

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::config;
use crate::providers::anthropic::batches::AnthropicBatches;
use crate::providers::anthropic::reply::AnthropicReplyBuilder;
use crate::providers::anthropic::request::RequestBody;
use crate::providers::batches::BatchApi;
use crate::providers::endpoint::Endpoint;
use crate::providers::http_client::HttpClient;
use crate::providers::http_client::base_url::BaseUrl;
use crate::providers::http_client::headers::KeyHeader;
use crate::providers::setup_error::SetupError;
use crate::providers::{
    BatchClient, BatchItem, BatchProvider, ChatRequest, Delta, Provider, ProviderError, Reply,
    request_body,
};

mod batches;
mod reply;
mod request;

const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
const DEFAULT_API_VERSION: &str = "2023-06-01";

/// The client of one service that implements Anthropic's Messages API.
pub struct Anthropic {
    endpoint: Endpoint<AnthropicReplyBuilder>,
    batches: AnthropicBatches,
}

impl Anthropic {
    pub fn new(service_id: String, config: &config::Provider) -> Result<Self, SetupError> {
        let base = BaseUrl::parse(config.base_url.as_deref().unwrap_or(DEFAULT_BASE_URL))?;
        let client = HttpClient::new(config, &base, "/v1/messages", KeyHeader::ApiKey)?;
        let version = config.version.as_deref().unwrap_or(DEFAULT_API_VERSION);
        let client = client.with_header("anthropic-version", version)?;
        let batches = AnthropicBatches(BatchApi::new(&client, &base, config.batch_poll));
        Ok(Self {
            endpoint: Endpoint::new(client, service_id),
            batches,
        })
    }

    pub fn endpoint(&self) -> &Endpoint<AnthropicReplyBuilder> {
        &self.endpoint
    }
}

impl Provider for Anthropic {
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
        let body = RequestBody::new(&request, self.endpoint.origin(request.model));
        self.endpoint.complete(&body, &request, deltas)
    }
}

impl BatchProvider for Anthropic {
    fn batch_client(&self) -> &dyn BatchClient {
        &self.batches
    }

    fn batch_item(&self, request: &ChatRequest<'_>) -> Result<BatchItem, ProviderError> {
        let body = RequestBody::new(request, self.endpoint.origin(request.model));
        let body = request_body::serialize_with_extra(&body, request)?;
        let path = "/v1/messages";
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
