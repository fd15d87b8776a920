//! `[[http_tools]]`: tools that are HTTP requests to hosts that the agent's file names. The requests pass the SSRF guard,
//! follow no redirects, and are bounded; the values of variables are redacted from what the model sees.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

use crate::config;
use crate::config::environment::Environment;
use crate::domain::http_tool::{BodyFormat, HttpMethod, HttpTool, Repeat};
use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec};
use crate::fair::fair_semaphore::{FairSemaphore, Permit};
use crate::ssrf;
use crate::tools::mcp::secrets::{Secrets, TemplateTable, read_secret_files};
use crate::tools::web::fetch::{FetchResponse, OutgoingRequest, WebFetcher};
use crate::tools::{CallContext, Effect, Probed, Tool, ToolOutput};

/// Bytes of a result that are kept free for notices.
const NOTICE_BYTES: usize = 4096;

/// Sends the requests of all such tools.
pub struct HttpToolSender {
    fetcher: WebFetcher,
    permits: Arc<FairSemaphore>,
    environment: Environment,
    /// Most bytes of a response's text in a result.
    max_bytes: usize,
}

impl HttpToolSender {
    /// Results have at most `max_result` bytes; each call takes one of the permits. `environment` has the variables of
    /// headers.
    pub fn new(
        config: &config::UrlFetch,
        max_result: usize,
        permits: Arc<FairSemaphore>,
        environment: Environment,
    ) -> Self {
        Self {
            fetcher: WebFetcher::https_only(config),
            permits,
            environment,
            max_bytes: max_result.saturating_sub(NOTICE_BYTES).max(max_result / 2),
        }
    }

    /// The tool of these settings; `None` if its schema cannot be read, which a valid file excludes.
    pub fn tool(self: &Arc<Self>, settings: &HttpTool) -> Option<Arc<dyn Tool>> {
        let schema = Schema::parse(Arc::clone(&settings.parameters)).ok()?;
        Some(Arc::new(HttpRequestTool {
            settings: settings.clone(),
            schema,
            sender: Arc::clone(self),
        }))
    }

    async fn send(
        &self,
        tool: &HttpTool,
        arguments: &Value,
        key: &str,
        context: CallContext<'_>,
    ) -> Result<ToolOutput, String> {
        let address = tool.render_url(arguments)?;
        let body = tool.render_body(arguments)?;
        let mut secrets = Secrets::default();
        let headers = self.headers(tool, arguments, body.is_some(), &mut secrets);
        let mut headers = headers.await?;
        let header = tool.idempotency_header.as_ref();
        if let Some(name) = header.and_then(|name| HeaderName::from_bytes(name.as_bytes()).ok())
            && let Ok(key) = HeaderValue::from_str(key)
        {
            headers.insert(name, key);
        }
        let permit = context.acquire(&self.permits).await;
        let request = request(tool, tool.method, &address, headers, body)?;
        let formatted = match self.fetcher.send(request).await {
            Ok(response) => format_response(tool, response, self.max_bytes, permit).await,
            Err(error) if error.is_end_unknown => {
                return Ok(ToolOutput::end_unknown(secrets.redact(&error.why)));
            }
            Err(error) => Err(error.why),
        };
        let redact = |text: String| secrets.redact(&text);
        formatted.map(redact).map(ToolOutput::from).map_err(redact)
    }

    /// Asks the service whether it performed a call. A response that says neither leaves that unknown.
    async fn probe(
        &self,
        tool: &HttpTool,
        arguments: &Value,
        key: &str,
        context: CallContext<'_>,
    ) -> Result<Probed, String> {
        let Some(probe) = tool.render_probe(arguments, key) else {
            return Ok(Probed::Unknown);
        };
        let (method, address) = probe?;
        let mut secrets = Secrets::default();
        let headers = self
            .headers(tool, &Value::Null, false, &mut secrets)
            .await?;
        let permit = context.acquire(&self.permits).await;
        let request = request(tool, method, &address, headers, None)?;
        let response = self.fetcher.send(request).await;
        let response = response.map_err(|error| error.why)?;
        match response.status {
            StatusCode::OK => {
                let text = format_response(tool, response, self.max_bytes, permit).await?;
                Ok(Probed::Done(secrets.redact(&text).into()))
            }
            StatusCode::NOT_FOUND => Ok(Probed::NotDone),
            _ => Ok(Probed::Unknown),
        }
    }

    async fn headers(
        &self,
        tool: &HttpTool,
        arguments: &Value,
        has_body: bool,
        secrets: &mut Secrets,
    ) -> Result<HeaderMap, String> {
        let name = &tool.name;
        let environment = read_secret_files(&tool.headers, &self.environment).await;
        let environment = environment.map_err(|why| format!("{name} cannot be called: {why}"))?;
        let expanded =
            secrets.expand_templates(TemplateTable::Headers, &tool.headers, &environment);
        let expanded = expanded.map_err(|why| format!("{name} cannot be called: {why}"))?;
        let mut headers = HeaderMap::new();
        for (header, value) in expanded {
            let parsed = HeaderName::from_bytes(header.as_bytes()).ok();
            let value = HeaderValue::from_str(&value).ok();
            let (Some(parsed), Some(mut value)) = (parsed, value) else {
                return Err(format!(
                    "{name} cannot be called: its headers.{header} holds characters that no header has"
                ));
            };
            value.set_sensitive(true);
            headers.insert(parsed, value);
        }
        for (header, value) in tool.render_headers(arguments) {
            let parsed = HeaderName::from_bytes(header.as_bytes()).ok();
            let value = HeaderValue::from_str(&value).ok();
            let (Some(parsed), Some(value)) = (parsed, value) else {
                return Err(format!(
                    "The value of {header} holds characters that no header has"
                ));
            };
            // Those of the agent's file win.
            headers.entry(parsed).or_insert(value);
        }
        if has_body && !headers.contains_key(CONTENT_TYPE) {
            let content_type = HeaderValue::from_static(content_type(tool.body_format));
            headers.insert(CONTENT_TYPE, content_type);
        }
        Ok(headers)
    }
}

fn request(
    tool: &HttpTool,
    method: HttpMethod,
    address: &str,
    headers: HeaderMap,
    body: Option<String>,
) -> Result<OutgoingRequest, String> {
    let url = ssrf::parse_url(address).map_err(|why| format!("The address {why}"))?;
    Ok(OutgoingRequest {
        method: http_method(method),
        url,
        headers,
        body,
        timeout: tool.timeout,
    })
}

struct HttpRequestTool {
    settings: HttpTool,
    schema: Schema,
    sender: Arc<HttpToolSender>,
}

impl Tool for HttpRequestTool {
    fn spec(&self) -> ToolSpec {
        let HttpTool {
            name, description, ..
        } = &self.settings;
        ToolSpec::new(name, description, self.schema.raw())
    }

    fn effect(&self) -> Effect {
        match self.settings.repeat {
            Repeat::Safe => Effect::ReadOnly,
            Repeat::WithKey => Effect::Keyed,
            Repeat::Never => Effect::Mutating,
        }
    }

    fn schema(&self) -> Option<&Schema> {
        Some(&self.schema)
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: Value = call.parse_arguments()?;
            let key = context.call_key(call);
            let sent = self.sender.send(&self.settings, &arguments, &key, context);
            sent.await
        })
    }

    fn probe<'a>(&'a self, call: &'a ToolCall, context: CallContext<'a>) -> BoxFuture<'a, Probed> {
        Box::pin(async move {
            let Ok(arguments) = call.parse_arguments() else {
                return Probed::Unknown;
            };
            let (tool, key) = (&self.settings, context.call_key(call));
            let probed = self.sender.probe(tool, &arguments, &key, context).await;
            probed.unwrap_or(Probed::Unknown)
        })
    }
}

fn content_type(format: BodyFormat) -> &'static str {
    match format {
        BodyFormat::Json => "application/json",
        BodyFormat::Form => "application/x-www-form-urlencoded",
        BodyFormat::Text => "text/plain; charset=utf-8",
    }
}

fn http_method(method: HttpMethod) -> http::Method {
    match method {
        HttpMethod::Get => http::Method::GET,
        HttpMethod::Post => http::Method::POST,
        HttpMethod::Put => http::Method::PUT,
        HttpMethod::Patch => http::Method::PATCH,
        HttpMethod::Delete => http::Method::DELETE,
    }
}

/// The response as the model reads it.
async fn format_response(
    tool: &HttpTool,
    response: FetchResponse,
    max_bytes: usize,
    permit: Permit,
) -> Result<String, String> {
    let status = response.status;
    let response = response.into_text(&tool.name, max_bytes, permit).await?;
    let mut text = response.text;
    if text.is_empty() {
        text = format!("({status}, without content)");
    }
    if response.is_truncated {
        text.push_str("\n... (cut: this is the beginning of a longer response)");
    }
    Ok(text)
}
