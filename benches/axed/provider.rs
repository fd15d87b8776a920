//! An instant provider on OpenAI's wire, as lean as it gets: three prebuilt answers, chosen by a glance at the body.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio_util::task::TaskTracker;

use crate::load::request;
use crate::process::listen;

const TEXT: &[u8] = br#"{"id":"c","object":"chat.completion","created":0,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"Hello to everybody in the house."},"finish_reason":"stop"}],"usage":{"prompt_tokens":20,"completion_tokens":10,"total_tokens":30}}"#;

const THREE_CALLS: &[u8] = br#"{"id":"c","object":"chat.completion","created":0,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the cellar\"}"}},{"id":"b","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the hall\"}"}},{"id":"c","type":"function","function":{"name":"call_agent","arguments":"{\"agent\":\"leaf\",\"task\":\"greet the attic\"}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":90,"completion_tokens":60,"total_tokens":150}}"#;

/// Serves for ever, after `delay` each time.
pub fn serve(delay: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = listen();
        let connections = TaskTracker::new();
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let _ = stream.set_nodelay(true);
            connections.spawn(async move {
                let service = service_fn(move |request| answer(request, delay));
                // A client that goes away is no error here.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
}

/// A request that asks the provider without anything between.
pub fn asks_directly(address: &str) -> Vec<u8> {
    let body = r#"{"model":"solo","messages":[{"role":"user","content":"Say hello."}]}"#;
    request(address, "/v1/chat/completions", body)
}

async fn answer(
    request: Request<Incoming>,
    delay: Duration,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = request
        .into_body()
        .collect()
        .await
        .map(|body| body.to_bytes());
    let body = body.unwrap_or_default();
    let text = std::str::from_utf8(&body).unwrap_or_default();
    let answer = if text.contains("\"tools\":[") && !text.contains("\"role\":\"tool\"") {
        THREE_CALLS
    } else {
        TEXT
    };
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    let mut response = Response::new(Full::new(Bytes::from_static(answer)));
    response.headers_mut().insert(
        hyper::header::CONTENT_TYPE,
        hyper::header::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}
